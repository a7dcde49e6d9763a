"""Resolve: the value as it was put, or one family of errors; never a part of it, ciphertext, or None."""

from __future__ import annotations

import json
import logging
import secrets
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from pytest_django import Settings

from kfs_credentials import services
from kfs_credentials.conf import key_ring
from kfs_credentials.crypto import Credentials
from kfs_credentials.errors import (
    BindingBroken,
    InvalidCredentials,
    KfsCredentialsError,
    NoCredentials,
    SecretIntegrityError,
    SecretNotFound,
    SourceNotFound,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.models import KnowledgeSpace, SecretObject, Source
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory
from tests.management.rows import table_contents
from tests.services.conftest import (
    NEW,
    OLD,
    TENANT,
    Change,
    Files,
    before_get,
    elsewhere,
    execute,
    states,
)

pytestmark = pytest.mark.django_db(transaction=True)


def resolve(source: Source, tenant: str = TENANT) -> Credentials:
    return services.resolve_credentials(tenant=tenant, source_id=source.pk)


def test_what_was_put_comes_back_in_a_copy_that_shows_nothing(source: Source) -> None:
    """Changing what was taken out of it changes nothing, here or in the store."""
    found = resolve(source)
    assert found == OLD
    assert OLD["token"] not in f"{found!r} {found} {[found]}"
    found.reveal()["token"] = "changed"
    assert found == resolve(source) == OLD
    assert services.resolve_credentials(tenant=TENANT, source_id=str(source.pk).upper()) == OLD


def test_nothing_is_written(source: Source, files: Files) -> None:
    legacy = SourceFactory.create(credentials=OLD)
    before = table_contents(), [path.read_bytes() for path in files()]
    assert resolve(source) == resolve(legacy) == OLD
    assert (table_contents(), [path.read_bytes() for path in files()]) == before


def test_the_rate_of_the_workers_is_none_of_the_applications(source: Source, kfs_settings: Change) -> None:
    """However slow these are made, nobody who asks waits: the second call would take eleven days."""
    kfs_settings(RATE_LIMIT=0.000001)
    for _ in range(3):
        assert resolve(source) == OLD


def test_inside_a_transaction(source: Source) -> None:
    with transaction.atomic():
        assert resolve(source) == OLD
        services.revoke_credentials(tenant=TENANT, source_id=source.pk)
        with pytest.raises(NoCredentials):
            resolve(source)


@pytest.mark.parametrize("source_id", [uuid.uuid4(), "no-uuid", "", None, 5])
def test_a_source_that_there_is_not(store: EncryptedStore, transactional_db: None, source_id: Any) -> None:
    with pytest.raises(SourceNotFound, match=r"^this tenant has no such source$") as caught:
        services.resolve_credentials(tenant=TENANT, source_id=source_id)
    assert caught.value.code == "SOURCE_NOT_FOUND"


# In clear.


def test_credentials_in_clear_are_read_with_every_digit(store: EncryptedStore, transactional_db: None) -> None:
    source = SourceFactory.create(bare=True)
    execute("""UPDATE sources SET metadata = '{"credentials": {"n": 9007199254740993, "t": "x"}}'""")
    assert resolve(source).reveal() == {"n": 9007199254740993, "t": "x"}


def test_credentials_in_clear_are_not_read_where_the_settings_say_so(
    store: EncryptedStore, transactional_db: None, kfs_settings: Change
) -> None:
    source = SourceFactory.create(credentials=OLD)
    kfs_settings(LEGACY_READS=False)
    with pytest.raises(NoCredentials) as caught:
        resolve(source)
    assert str(caught.value) == (
        "the credentials of this source lie in clear, and KFS_CREDENTIALS['LEGACY_READS'] is False: "
        "`manage.py run_credential_backfill` moves them."
    )
    assert caught.value.code == "SOURCE_CREDENTIALS_MISSING"


def test_a_ref_goes_before_what_lies_in_clear(source: Source) -> None:
    execute("UPDATE sources SET metadata = %s", json.dumps({"credentials": NEW}))
    assert resolve(source) == OLD


@pytest.mark.parametrize("metadata", [{}, {"credentials": None}, [], ["credentials"], "credentials", None, 5])
def test_no_credentials(store: EncryptedStore, transactional_db: None, metadata: Any) -> None:
    source = SourceFactory.create(bare=True)
    execute("UPDATE sources SET metadata = %s", json.dumps(metadata))
    with pytest.raises(NoCredentials, match=r"^the source has no credentials$"):
        resolve(source)


@pytest.mark.parametrize(("value", "shape"), [("x", "string"), ([OLD], "array"), (5, "number"), (True, "boolean")])
def test_credentials_of_a_shape_that_nobody_can_use(
    store: EncryptedStore, transactional_db: None, value: Any, shape: str
) -> None:
    source = SourceFactory.create(credentials=value)
    with pytest.raises(NoCredentials) as caught:
        resolve(source)
    assert str(caught.value) == (
        f"the credentials of this source are a JSON {shape}, not an object: nothing here reads or moves them. "
        "`manage.py settle_unsupported_credentials` lists such sources."
    )


def test_credentials_in_clear_that_are_nested_too_deep(store: EncryptedStore, transactional_db: None) -> None:
    source = SourceFactory.create(bare=True)
    deep = '{"a":' * 600 + '"canary"' + "}" * 600
    execute("UPDATE sources SET metadata = %s", f'{{"credentials": {deep}}}')
    with pytest.raises(InvalidCredentials) as caught:
        resolve(source)
    assert "canary" not in str(caught.value)


# What fails: one family, and one line of the log.


def damage(files: Files, change: Callable[[bytes], bytes]) -> None:
    (path,) = files()
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(change(content))


def another_tag(content: bytes) -> bytes:
    envelope = json.loads(content)
    tag = envelope["tag"]
    return json.dumps({**envelope, "tag": ("B" if tag[0] == "A" else "A") + tag[1:]}).encode()


def another_version(content: bytes) -> bytes:
    return json.dumps({**json.loads(content), "version": 99}).encode()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-10],
    "empty": lambda content: b"",
    "no JSON": lambda content: b"\xff" + content,
    "another tag": another_tag,
    "an unknown version": another_version,
    "the value itself": lambda content: json.dumps(OLD).encode(),
}


def check_failure(source: Source, caplog: pytest.LogCaptureFixture, error: type[KfsCredentialsError]) -> None:
    caplog.clear()
    key_id = SecretObject.objects.get(pk=source.credential_ref).key_id
    with caplog.at_level(logging.DEBUG), pytest.raises(error) as caught:
        resolve(source)
    (record,) = [record for record in caplog.records if record.name == "kfs_credentials.services"]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"credentials of source {source.pk} (tenant {TENANT}, ref {source.credential_ref}, key {key_id}) cannot be "
        f"read: {caught.value}"
    )
    assert OLD["token"] not in caplog.text
    assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_object(
    source: Source, files: Files, caplog: pytest.LogCaptureFixture, change: Callable[[bytes], bytes]
) -> None:
    damage(files, change)
    check_failure(source, caplog, SecretIntegrityError)


def test_another_key(source: Source, kfs_settings: Change, caplog: pytest.LogCaptureFixture) -> None:
    kfs_settings(KEYS=[secrets.token_bytes(32)])
    assert SecretObject.objects.get().key_id != key_ring().primary.id
    check_failure(source, caplog, BindingBroken)


def test_a_key_that_is_no_longer_the_first(source: Source, settings: Settings, kfs_settings: Change) -> None:
    kfs_settings(KEYS=[secrets.token_bytes(32), *settings.KFS_CREDENTIALS["KEYS"]])
    assert resolve(source) == OLD


def test_a_missing_object(source: Source, files: Files, caplog: pytest.LogCaptureFixture) -> None:
    files()[0].unlink()
    check_failure(source, caplog, SecretNotFound)
    assert SecretNotFound.code == "SOURCE_CREDENTIAL_UNAVAILABLE"


def test_an_object_of_another_scope(source: Source, space: KnowledgeSpace, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody made a source name a ref that is another's."""
    execute("UPDATE sources SET credential_ref = NULL")
    thief = SourceFactory.create(knowledge_space=space, bare=True)
    execute("UPDATE sources SET credential_ref = %s WHERE id = %s", source.credential_ref, thief.pk)
    thief.refresh_from_db()
    check_failure(thief, caplog, SecretIntegrityError)


def test_a_store_that_cannot_serve(
    source: Source, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def get_many(addresses: Any, *, deadline: Any) -> Any:
        raise StoreUnavailable("down")

    monkeypatch.setattr(store, "_get_many", get_many)
    check_failure(source, caplog, StoreUnavailable)


def test_a_store_that_is_not_in_the_settings(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    SecretObject.objects.update(store="archive")
    check_failure(source, caplog, StoreMisconfigured)


def test_a_ref_that_is_none(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    execute("UPDATE sources SET credential_ref = 'nonsense'")
    with pytest.raises(KfsCredentialsError):
        resolve(source)


# Where the objects are.


def test_each_object_is_read_from_the_store_that_holds_it(
    source: Source, settings: Settings, tmp_path: Path, secrets_directory: Path
) -> None:
    """The default store may change: what was put before stays readable under its own alias."""
    stores = settings.KFS_CREDENTIALS["STORES"]
    elsewhere_directory = tmp_path / "elsewhere"
    elsewhere_directory.mkdir(mode=0o700)
    moved = json.loads(json.dumps(stores["default"]).replace(str(secrets_directory), str(elsewhere_directory)))
    settings.KFS_CREDENTIALS = {**settings.KFS_CREDENTIALS, "STORES": {"default": moved, "old": stores["default"]}}
    SecretObject.objects.update(store="old")
    assert resolve(source) == OLD


def test_a_ref_that_the_node_service_made_is_read_from_the_default_store(source: Source) -> None:
    SecretObject.objects.all().delete()
    assert resolve(source) == OLD


# Beside a rotation.


def test_readers_of_the_old_ref_go_on(source: Source, store: EncryptedStore) -> None:
    """Whoever has read the source before a rotation still gets the old value, for as long as the grace lasts."""

    def rotate() -> None:
        services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW)

    with before_get(store, rotate):
        assert resolve(source) == OLD
    assert resolve(source) == NEW


def test_a_reader_who_comes_too_late_for_the_old_ref_looks_again(
    source: Source, store: EncryptedStore, files: Files
) -> None:
    def rotate_and_erase() -> None:
        (old,) = files()
        services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW)
        old.unlink()

    with before_get(store, rotate_and_erase):
        assert resolve(source) == NEW


def test_a_reader_whose_source_was_revoked_meanwhile(source: Source, store: EncryptedStore, files: Files) -> None:
    def revoke_and_erase() -> None:
        services.revoke_credentials(tenant=TENANT, source_id=source.pk)
        files()[0].unlink()

    with before_get(store, revoke_and_erase), pytest.raises(NoCredentials):
        resolve(source)
    assert states() == ["retired"]


def test_an_old_writer_that_brings_back_an_old_ref_loses_no_reader(source: Source) -> None:
    services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW)
    execute("UPDATE sources SET credential_ref = %s", source.credential_ref)
    assert resolve(source) == OLD


def test_a_snapshot_that_is_older_than_the_erasure_ends_in_an_error(source: Source, files: Files) -> None:
    """Under REPEATABLE READ looking again finds the same ref: no endless loop."""
    with transaction.atomic():
        execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert resolve(source) == OLD
        files()[0].unlink()
        elsewhere(lambda: services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW))
        with pytest.raises(SecretNotFound):
            resolve(source)

"""Rotate: a new value under a new ref, in one commit that retires the old one and leaves nothing in clear."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from kfs_credentials import services
from kfs_credentials.crypto import Credentials, Scope
from kfs_credentials.errors import (
    BeingDeleted,
    CredentialsRejected,
    CredentialsTooLarge,
    InvalidCredentials,
    InvalidOperation,
    KfsCredentialsError,
    MutationFailed,
    OperationOver,
    SourceNotFound,
    StoreUnavailable,
    VersionConflict,
)
from kfs_credentials.models import (
    KnowledgeSpace,
    Purpose,
    RefState,
    Source,
    SourceSecretLifecycleRef,
)
from kfs_credentials.redaction import short_ref
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory
from tests.invariants import check_invariants
from tests.management.rows import table_contents
from tests.services.conftest import (
    NEW,
    OLD,
    TENANT,
    Change,
    Files,
    after_put,
    being_deleted,
    create,
    execute,
    plaintext_left,
    resolve,
    rotate,
    row_of,
    set_state,
    states,
    trigger,
)

pytestmark = pytest.mark.django_db(transaction=True)


def never(credentials: Credentials) -> None:
    raise AssertionError("the validator was called")


# What it does.


def test_a_new_ref_a_new_version_and_the_old_ref_retired(source: Source, store: EncryptedStore, files: Files) -> None:
    rotated = rotate(source)
    assert rotated.credential_ref != source.credential_ref
    assert (rotated.version, Source.objects.get().credential_ref) == (2, rotated.credential_ref)
    assert rotated.updated_at > source.updated_at
    new, old = row_of(rotated.credential_ref), row_of(source.credential_ref)
    assert (new.state, new.purpose, new.source_version) == (RefState.ACTIVE, Purpose.ROTATE, 2)
    assert (old.state, old.last_error_code, new.next_delete_at) == (RefState.RETIRED, None, None)
    assert resolve(source) == NEW
    assert len(files()) == 2
    assert check_invariants("default", store) == []


def test_the_old_value_can_be_read_until_the_grace_is_over(
    source: Source, store: EncryptedStore, kfs_settings: Change
) -> None:
    kfs_settings(ERASE_GRACE=77)
    rotate(source)
    old = row_of(source.credential_ref)
    assert old.next_delete_at is not None
    assert (old.next_delete_at - old.updated_at).total_seconds() == 77
    assert store.get(Scope(TENANT, source.knowledge_space_id, source.pk), old.credential_ref) == OLD


def test_all_rows_move_in_one_commit(source: Source) -> None:
    rotated = rotate(source)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(DISTINCT xmin::text), count(*) FROM (SELECT xmin FROM sources UNION ALL "
            "SELECT xmin FROM source_secret_lifecycle_refs) moved"
        )
        assert cursor.fetchone() == (1, 3)
    assert rotated.version == 2


def test_reserved_then_put_then_activated(
    source: Source, store: EncryptedStore, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source keeps its ref until the new value is durable; nothing is erased by it."""
    seen: list[Any] = []
    after_put(store, monkeypatch, lambda: seen.append((states(), Source.objects.get().credential_ref, len(files()))))
    rotate(source)
    assert seen == [(["active", "staged"], source.credential_ref, 2)]
    assert len(files()) == 2


@pytest.mark.parametrize("expected", [None, 1])
def test_the_version_that_the_caller_has_read(source: Source, expected: int | None) -> None:
    assert rotate(source, expected_version=expected).version == 2


def test_a_version_below_one_goes_up_like_any_other(space: KnowledgeSpace, store: EncryptedStore) -> None:
    source = SourceFactory.create(knowledge_space=space, bare=True, version=-3)
    rotated = rotate(source, expected_version=-3)
    assert (rotated.version, row_of(rotated.credential_ref).source_version) == (-2, None)


def test_the_rest_of_the_source_keeps_what_it_has_by_then(
    source: Source, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change by somebody else meanwhile is no conflict unless the caller asks for his version."""
    after_put(store, monkeypatch, lambda: execute("""UPDATE sources SET version = 5, metadata = '{"n": 1e400}'"""))
    rotate(source)
    with connection.cursor() as cursor:
        cursor.execute("SELECT version, metadata ->> 'n' = '1' || repeat('0', 400) FROM sources")
        assert cursor.fetchone() == (6, True)


def test_the_ledger_is_locked_in_id_order_and_then_the_source(source: Source) -> None:
    with CaptureQueriesContext(connection) as queries:
        rotate(source)
    locks = [query["sql"] for query in queries.captured_queries if "UPDATE OF" in query["sql"]]
    assert ["source_secret_lifecycle_refs" in statement for statement in locks] == [True, False]
    assert all("NOWAIT" in statement for statement in locks)
    assert 'ORDER BY "source_secret_lifecycle_refs"."id" ASC' in locks[0]


# A source without a ref.


def test_a_source_without_credentials(space: KnowledgeSpace, store: EncryptedStore) -> None:
    source = rotate(SourceFactory.create(knowledge_space=space, bare=True))
    assert (source.version, resolve(source), states()) == (2, NEW, ["active"])


@pytest.mark.parametrize("in_clear", [OLD, {}, None, "text", [OLD], 5])
def test_what_lies_in_clear_goes_with_it(space: KnowledgeSpace, store: EncryptedStore, in_clear: Any) -> None:
    source = rotate(SourceFactory.create(knowledge_space=space, credentials=in_clear, version=3))
    assert (source.version, source.metadata, resolve(source)) == (4, {"title": "Handbook"}, NEW)
    assert plaintext_left() == 0


@pytest.mark.parametrize("metadata", ['["credentials", 1]', '"credentials"', "5", "null"])
def test_metadata_that_is_no_object_stays_as_it_is(space: KnowledgeSpace, store: EncryptedStore, metadata: str) -> None:
    source = SourceFactory.create(knowledge_space=space)
    execute("UPDATE sources SET metadata = %s", metadata)
    rotate(source)
    with connection.cursor() as cursor:
        cursor.execute("SELECT metadata::text FROM sources")
        assert cursor.fetchone() == (metadata,)
    assert resolve(source) == NEW


def test_a_ref_and_plaintext_both_are_replaced(source: Source) -> None:
    execute("""UPDATE sources SET metadata = '{"credentials": {"a": 1}, "b": 2}'""")
    assert rotate(source).metadata == {"b": 2}
    assert states() == ["active", "retired"]


# What is refused before anything is written.


REFUSED: dict[str, tuple[dict[str, Any], type[KfsCredentialsError], str]] = {
    "a text": (
        {"credentials": "x"},
        InvalidCredentials,
        "Credentials must be a JSON object, not a value of type str.",
    ),
    "None": ({"credentials": None}, InvalidCredentials, "Credentials must be a JSON object, not a value of type None"),
    "NaN": ({"credentials": {"a": [float("nan")]}}, InvalidCredentials, "JSON cannot hold the value at $.a[0]: "),
    "too large": (
        {"credentials": {"token": "x" * 100}},
        CredentialsTooLarge,
        "the credentials have 112 bytes, and KFS_CREDENTIALS['MAX_SECRET_BYTES'] allows 64",
    ),
    "an old version": (
        {"expected_version": 7},
        VersionConflict,
        "the source has version 1, not 7: somebody else has changed it",
    ),
    "an empty operation": (
        {"operation_id": ""},
        InvalidOperation,
        "operation_id must be text of 1 to 255 characters, ",
    ),
    "no source": ({"source_id": uuid.uuid4()}, SourceNotFound, "this tenant has no such source"),
    "no id": ({"source_id": "no-uuid"}, SourceNotFound, "this tenant has no such source"),
}


@pytest.mark.parametrize(("given", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_before_anything_is_written(
    source: Source,
    files: Files,
    kfs_settings: Change,
    given: dict[str, Any],
    error: type[KfsCredentialsError],
    message: str,
) -> None:
    """The validator, too, is called only for what could be done."""
    kfs_settings(MAX_SECRET_BYTES=64)
    before = table_contents()
    with pytest.raises(error) as caught:
        rotate(source, **{"validate": never, **given})
    assert type(caught.value) is error
    assert str(caught.value).startswith(message)
    assert table_contents() == before
    assert len(files()) == 1


def test_a_validator_that_refuses(source: Source, files: Files) -> None:
    def refuse(credentials: Credentials) -> None:
        raise ValueError(f"no access with {credentials.reveal()}")

    before = table_contents()
    with pytest.raises(CredentialsRejected) as caught:
        rotate(source, validate=refuse)
    assert str(caught.value) == "the new credentials were refused by their validator (ValueError)"
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert table_contents() == before
    assert (len(files()), resolve(source)) == (1, OLD)


def test_a_validator_that_accepts_has_seen_the_new_value(source: Source) -> None:
    seen: list[Any] = []
    rotate(source, validate=lambda credentials: seen.append((credentials, states())))
    assert seen == [(NEW, ["active"])]


@pytest.mark.parametrize("deletion", ["of the source", "of the space", "by its status"])
def test_a_deletion_at_work(source: Source, files: Files, deletion: str) -> None:
    if deletion == "by its status":
        execute("UPDATE sources SET status = 'deleting'")
    with being_deleted({"of the source": source, "of the space": source.knowledge_space}.get(deletion, Source())):
        before = table_contents()
        with pytest.raises(BeingDeleted, match=r"^the source or its knowledge space is being deleted$"):
            rotate(source)
        assert (table_contents(), len(files())) == (before, 1)


def test_a_deletion_that_begins_after_the_put(
    source: Source, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_put(store, monkeypatch, lambda: execute("UPDATE sources SET status = 'deleting'"))
    with pytest.raises(BeingDeleted):
        rotate(source)
    assert (states(), resolve(source)) == (["active", "staged"], OLD)


# What fails later: the source is as it was, and the new ref stays reserved for the cleanup to take back.


@pytest.mark.parametrize("is_put", [True, False])
def test_where_the_store_fails_the_source_is_as_it_was(
    source: Source, store: EncryptedStore, files: Files, monkeypatch: pytest.MonkeyPatch, is_put: bool
) -> None:
    real = store._put_many

    def put_many(entries: Any, *, deadline: Any) -> Any:
        if is_put:
            real(entries, deadline=deadline)
        raise StoreUnavailable("down")

    monkeypatch.setattr(store, "_put_many", put_many)
    with pytest.raises(StoreUnavailable, match=r"^down$"):
        rotate(source)
    assert (states(), len(files())) == (["active", "staged"], 1 + is_put)
    assert (Source.objects.get().credential_ref, Source.objects.get().version) == (source.credential_ref, 1)
    assert resolve(source) == OLD


def test_a_version_that_changes_after_the_put(
    source: Source, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_put(store, monkeypatch, lambda: execute("UPDATE sources SET version = 2"))
    with pytest.raises(VersionConflict) as caught:
        rotate(source, expected_version=1)
    assert (caught.value.expected, caught.value.found) == (1, 2)
    assert (states(), resolve(source)) == (["active", "staged"], OLD)


def test_a_source_that_goes_away_after_the_put(
    source: Source, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_put(store, monkeypatch, lambda: execute("DELETE FROM sources"))
    with pytest.raises(SourceNotFound):
        rotate(source)
    assert states() == ["active", "staged"]


@pytest.mark.parametrize("state", ["candidate", "retired", "deleting", "deleted", "gone"])
def test_a_new_ref_that_is_not_reserved_any_more_is_never_used(
    source: Source, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    def take_back() -> None:
        new = SourceSecretLifecycleRef.objects.get(state="staged")
        if state == "gone":
            new.delete()
        else:
            set_state(new.credential_ref, state)

    after_put(store, monkeypatch, take_back)
    with pytest.raises(OperationOver) as caught:
        rotate(source, operation_id="nightly")
    assert str(caught.value) == (
        "operation 'nightly' was not finished in time (KFS_CREDENTIALS['RECOVER_AFTER']), or what it made was replaced "
        "since: begin a new one"
    )
    assert caught.value.code == "SOURCE_CREDENTIAL_MUTATION_FAILED"
    assert resolve(source) == OLD
    assert Source.objects.get().version == 1


@pytest.mark.parametrize("at", ["the statement", "the commit", "a division"])
def test_what_the_database_refuses(source: Source, at: str) -> None:
    body = "RAISE 'canary: %', NEW.metadata;" if at != "a division" else "PERFORM 1 / 0;"
    with trigger("UPDATE", body, deferred=at == "the commit"), pytest.raises(MutationFailed) as caught:
        rotate(source)
    what = "DivisionByZero, SQLSTATE 22012" if at == "a division" else "RaiseException, SQLSTATE P0001"
    assert str(caught.value) == (f"the database refused the change ({what}): a constraint, a trigger or a foreign key")
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert (states(), resolve(source), Source.objects.get().version) == (["active", "staged"], OLD, 1)


def test_a_trigger_that_keeps_the_source_as_it_is(source: Source) -> None:
    message = r"^a trigger of the database left the source as it was$"
    with trigger("UPDATE", "RETURN NULL;"), pytest.raises(MutationFailed, match=message):
        rotate(source)
    assert (states(), resolve(source)) == (["active", "staged"], OLD)


def test_a_version_that_cannot_go_up(source: Source) -> None:
    execute("UPDATE sources SET version = 2147483647")
    with pytest.raises(MutationFailed, match="NumericValueOutOfRange, SQLSTATE 22003"):
        rotate(source)
    assert resolve(source) == OLD


# What it says.


def test_the_log_says_which_refs_a_rotation_moved_and_shows_no_credentials(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    old = source.credential_ref
    with caplog.at_level(logging.DEBUG):
        new = rotate(source).credential_ref
    assert old
    assert new
    moves = [record.getMessage() for record in caplog.records if record.name == "kfs_credentials"]
    assert moves == [
        f"reserved by application: 1 ref: {short_ref(new)}",
        f"activated by application: 1 ref: {short_ref(new)}",
        f"retired by application: 1 ref: {short_ref(old)}",
    ]
    assert NEW["token"] not in caplog.text


def test_what_is_taken_from_one_source_can_be_given_to_another(source: Source, space: KnowledgeSpace) -> None:
    """Credentials as `resolve_credentials` returns them are credentials as any other."""
    other = create(space, None)
    rotate(other, services.resolve_credentials(tenant=TENANT, source_id=source.pk))
    assert resolve(other) == OLD

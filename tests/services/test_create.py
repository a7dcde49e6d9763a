"""Create: the credentials are in the store from the first moment on, and in no other place."""

from __future__ import annotations

import json
import uuid
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest
from django.db import IntegrityError, connection

from kfs_credentials import services
from kfs_credentials.conf import key_ring
from kfs_credentials.crypto import Credentials, Scope, new_ref
from kfs_credentials.errors import (
    BeingDeleted,
    CredentialsRejected,
    CredentialsTooLarge,
    InvalidCredentials,
    InvalidMetadata,
    InvalidOperation,
    InvalidScope,
    KfsCredentialsError,
    MutationFailed,
    OperationOver,
    SecretStoreError,
    SourceExists,
    SpaceNotFound,
    StoreUnavailable,
)
from kfs_credentials.ledger import Operation, reserve
from kfs_credentials.models import (
    KnowledgeSpace,
    Purpose,
    RefState,
    SecretObject,
    Source,
    SourceSecretLifecycleRef,
)
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.transactions import short_transaction
from tests.factories import SourceFactory, SpaceFactory
from tests.invariants import check_invariants
from tests.services.conftest import (
    OLD,
    TENANT,
    Change,
    Files,
    after_put,
    being_deleted,
    create,
    execute,
    row_of,
    set_state,
    states,
    trigger,
)

pytestmark = pytest.mark.django_db(transaction=True)


# What is made.


def test_source_ledger_and_object_are_there_at_once(space: KnowledgeSpace, store: EncryptedStore) -> None:
    made = create(space, metadata={"title": "Handbook"}, permission_scope=["all"], status="paused")
    source = Source.objects.get()
    assert (source.pk, source.credential_ref, source.version) == (made.pk, made.credential_ref, 1)
    assert (source.knowledge_space_id, source.type, source.name) == (space.pk, "drive", "A source")
    assert (source.uri, source.status) == ("https://files.example", "paused")
    assert (source.metadata, source.permission_scope) == ({"title": "Handbook"}, ["all"])
    row = row_of(source.credential_ref)
    assert (row.state, row.purpose, row.source_version, row.row_version) == (RefState.ACTIVE, Purpose.CREATE, 1, 1)
    assert (row.tenant_id, row.knowledge_space_id, row.source_id) == (TENANT, space.pk, source.pk)
    held = SecretObject.objects.get()
    assert (held.credential_ref, held.store, held.key_id) == (row.credential_ref, "default", key_ring().primary.id)
    assert held.size == len(json.dumps(OLD, separators=(",", ":")))
    assert store.get(Scope(TENANT, space.pk, source.pk), row.credential_ref) == OLD
    assert check_invariants("default", store) == []


def test_credentials_may_be_a_member_of_metadata(space: KnowledgeSpace, store: EncryptedStore, files: Files) -> None:
    given = {"title": "Handbook", "credentials": OLD, "nested": {"credentials": "kept"}, "api_key": "kept"}
    source = create(space, None, metadata=MappingProxyType(given))
    # Only that one key leaves; what else looks secret is the caller's, and stays where it was put.
    assert source.metadata == {"title": "Handbook", "nested": {"credentials": "kept"}, "api_key": "kept"}
    assert services.resolve_credentials(tenant=TENANT, source_id=source.pk) == OLD
    assert given["credentials"] == OLD
    with connection.cursor() as cursor:
        cursor.execute("SELECT row_to_json(src)::text FROM sources src")
        assert OLD["token"] not in cursor.fetchone()[0]
    assert OLD["token"].encode() not in files()[0].read_bytes()


@pytest.mark.parametrize("metadata", [None, {}, {"credentials": None}])
def test_a_source_without_credentials(space: KnowledgeSpace, files: Files, metadata: Any) -> None:
    source = create(space, None, metadata=metadata)
    assert (source.credential_ref, source.metadata, source.version) == (None, {}, 1)
    assert (source.permission_scope, source.status) == ({}, "active")
    assert (states(), files()) == ([], [])


def test_empty_credentials_are_credentials(space: KnowledgeSpace, store: EncryptedStore) -> None:
    source = create(space, {})
    assert source.credential_ref is not None
    assert services.resolve_credentials(tenant=TENANT, source_id=source.pk) == {}


def test_the_source_has_the_id_that_the_caller_chose(space: KnowledgeSpace, store: EncryptedStore) -> None:
    first, second = uuid.uuid4(), uuid.uuid4()
    assert create(space, source_id=first).pk == first
    assert create(space, source_id=str(second), credentials=None).pk == second


def test_every_digit_of_metadata_and_credentials_stays(space: KnowledgeSpace, store: EncryptedStore) -> None:
    exact = {"n": 9007199254740993, "d": Decimal("1.000000000000000000001"), "big": Decimal("1e400")}
    source = create(space, exact, metadata=exact, permission_scope=exact)
    assert (source.metadata, source.permission_scope) == (exact, exact)
    assert services.resolve_credentials(tenant=TENANT, source_id=source.pk) == exact


def test_reserved_then_put_then_activated(
    space: KnowledgeSpace, store: EncryptedStore, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is committed before the next begins, and no transaction is open during the put."""
    seen: list[Any] = []

    def look() -> None:
        seen.append((states(), Source.objects.count(), SecretObject.objects.count(), len(files())))
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND backend_type = 'client backend' AND (backend_xid IS NOT NULL OR state ~ 'in trans')"
            )
            seen.append(cursor.fetchone()[0])

    after_put(store, monkeypatch, look)
    create(space)
    assert seen == [(["staged"], 0, 1, 1), 0]
    assert states() == ["active"]


def test_what_is_known_of_the_object_is_what_the_store_says(
    space: KnowledgeSpace, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that is repeated after the key ring was changed puts under the new key what was reserved under the old."""

    def as_reserved_before() -> None:
        SecretObject.objects.update(key_id="0" * 16, size=1)

    after_put(store, monkeypatch, as_reserved_before)
    source = create(space)
    assert SecretObject.objects.get().key_id == key_ring().primary.id
    after_put(store, monkeypatch, as_reserved_before)
    services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials={"a": 1})
    assert SecretObject.objects.get(size=7).key_id == key_ring().primary.id


# What is refused before anything is written.


def never(credentials: Credentials) -> None:
    raise AssertionError("the validator was called")


REFUSED: dict[str, tuple[dict[str, Any], type[KfsCredentialsError], str]] = {
    "an array": (
        {"credentials": [1]},
        InvalidCredentials,
        "Credentials must be a JSON object, not a value of type list.",
    ),
    "a text in metadata": (
        {"credentials": None, "metadata": {"credentials": "x"}},
        InvalidCredentials,
        "Credentials must be a JSON object, not a value of type str.",
    ),
    "NaN": (
        {"credentials": {"a": [1, {"b": float("nan")}]}},
        InvalidCredentials,
        "JSON cannot hold the value at $.a[1].b: ",
    ),
    "an infinity": ({"credentials": {"a": float("-inf")}}, InvalidCredentials, "JSON cannot hold the value at $.a: "),
    "a date": ({"credentials": {"a": object()}}, InvalidCredentials, "JSON cannot hold the value at $.a: "),
    "too large": (
        {"credentials": {"token": "x" * 100}},
        CredentialsTooLarge,
        "the credentials have 112 bytes, and KFS_CREDENTIALS['MAX_SECRET_BYTES'] allows 64",
    ),
    "credentials twice": (
        {"metadata": {"credentials": {"a": 1}}},
        InvalidMetadata,
        "credentials are given twice, as an argument and in metadata: give them once",
    ),
    "metadata that is a list": (
        {"metadata": [1]},
        InvalidMetadata,
        "metadata must be a JSON object, not a value of type list",
    ),
    "NaN in metadata": (
        {"metadata": {"a": float("nan")}},
        InvalidMetadata,
        "metadata cannot be stored: JSON cannot hold the value at $.a: ",
    ),
    "NUL in metadata": (
        {"metadata": {"a": "x\x00"}},
        InvalidMetadata,
        "metadata cannot be stored: jsonb has no place for the character U+0000 and half surrogate pairs",
    ),
    "NUL in a key": ({"metadata": {"\x00": 1}}, InvalidMetadata, "metadata cannot be stored: jsonb has no place"),
    "half a surrogate pair": (
        {"permission_scope": ["\ud800"]},
        InvalidMetadata,
        "permission_scope cannot be stored: jsonb has no place",
    ),
    "NUL in the name": (
        {"name": "x\x00"},
        InvalidMetadata,
        "name must be text, without the character U+0000 and half surrogate pairs",
    ),
    "half a surrogate pair in the URI": ({"uri": "\udfff"}, InvalidMetadata, "uri must be text, without "),
    "a name that is no text": ({"name": None}, InvalidMetadata, "name must be text, without "),
    "an id that is none": ({"source_id": "x"}, InvalidMetadata, "source_id must be a UUID"),
    "an empty operation": (
        {"operation_id": ""},
        InvalidOperation,
        "operation_id must be text of 1 to 255 characters, ",
    ),
    "a long operation": (
        {"operation_id": "x" * 256},
        InvalidOperation,
        "operation_id must be text of 1 to 255 characters, ",
    ),
    "NUL in the operation": (
        {"operation_id": "\x00"},
        InvalidOperation,
        "operation_id must be text of 1 to 255 characters, ",
    ),
}


@pytest.mark.parametrize(("given", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(
    space: KnowledgeSpace,
    files: Files,
    kfs_settings: Change,
    given: dict[str, Any],
    error: type[KfsCredentialsError],
    message: str,
) -> None:
    """The validator, too, sees only what could be stored. The message has the path and never the value."""
    kfs_settings(MAX_SECRET_BYTES=64)
    with pytest.raises(error) as caught:
        create(space, **{"credentials": {"a": "canary"}, "validate": never, **given})
    assert type(caught.value) is error
    assert str(caught.value).startswith(message)
    assert (states(), files(), Source.objects.count()) == ([], [], 0)


def test_nul_and_half_surrogate_pairs_in_credentials_come_back(space: KnowledgeSpace, store: EncryptedStore) -> None:
    odd = {"a\x00b": "x\x00y", "half": "\ud800", "literal": "\\u0000"}
    source = create(space, odd)
    assert services.resolve_credentials(tenant=TENANT, source_id=source.pk) == odd
    rotated = {"again": "\x00"}
    services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=rotated)
    assert services.resolve_credentials(tenant=TENANT, source_id=source.pk) == rotated


def test_a_backslash_before_u0000_is_a_text_like_any_other(space: KnowledgeSpace, files: Files) -> None:
    odd = {"a": "\\u0000", "b": "\\\\u0000", "c": "\\ud800", "emoji": "😀"}
    assert create(space, None, metadata=odd).metadata == odd


def test_the_validator_sees_the_new_value_before_anything_is_written(
    space: KnowledgeSpace, store: EncryptedStore
) -> None:
    seen: list[Any] = []
    create(space, validate=lambda credentials: seen.append((credentials, states(), Source.objects.count())))
    assert seen == [(OLD, [], 0)]
    assert isinstance(seen[0][0], Credentials)


def test_what_the_validator_refuses_is_not_stored(space: KnowledgeSpace, files: Files) -> None:
    def refuse(credentials: Credentials) -> None:
        raise ConnectionError(f"401 for token={credentials['token']}")

    with pytest.raises(CredentialsRejected) as caught:
        create(space, validate=refuse)
    assert str(caught.value) == "the new credentials were refused by their validator (ConnectionError)"
    assert caught.value.code == "SOURCE_CREDENTIAL_TEST_FAILED"
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert (states(), files(), Source.objects.count()) == ([], [], 0)


@pytest.mark.parametrize("credentials", [OLD, None])
@pytest.mark.parametrize("space_id", [uuid.uuid4(), "no-uuid", "", 5])
def test_a_space_that_there_is_not(files: Files, space_id: Any, credentials: Any) -> None:
    with pytest.raises(SpaceNotFound, match=r"^this tenant has no such knowledge space$"):
        create(SpaceFactory.build(pk=space_id), credentials)
    assert (states(), files()) == ([], [])


@pytest.mark.parametrize("tenant", [" ", "x" * 256])
def test_a_tenant_that_can_have_no_secrets(files: Files, tenant: str) -> None:
    with pytest.raises(InvalidScope):
        create(SpaceFactory.create(tenant_id=tenant), tenant=tenant)
    assert (states(), files()) == ([], [])


# What fails later: nothing is undone, and the cleanup finds it.


@pytest.mark.parametrize("credentials", [OLD, None])
def test_an_id_that_is_taken(space: KnowledgeSpace, store: EncryptedStore, credentials: Any) -> None:
    there = SourceFactory.create(knowledge_space=space)
    with pytest.raises(SourceExists) as caught:
        create(space, credentials, source_id=there.pk)
    assert str(caught.value) == (f"there is a source {there.pk} already: give another id, or rotate its credentials")
    assert Source.objects.get().metadata == there.metadata
    assert states() == ["staged"] * (credentials is not None)


@pytest.mark.parametrize("is_put", [True, False])
def test_where_the_store_fails_the_ref_stays_reserved_and_there_is_no_source(
    space: KnowledgeSpace, store: EncryptedStore, files: Files, monkeypatch: pytest.MonkeyPatch, is_put: bool
) -> None:
    """The store's own error is raised, whether or not it wrote something before."""
    real = store._put_many

    def put_many(entries: Any, *, deadline: Any) -> Any:
        if is_put:
            real(entries, deadline=deadline)
        raise StoreUnavailable("down")

    monkeypatch.setattr(store, "_put_many", put_many)
    with pytest.raises(StoreUnavailable, match=r"^down$"):
        create(space)
    assert (states(), len(files()), Source.objects.count()) == (["staged"], is_put, 0)
    assert row_of(SourceSecretLifecycleRef.objects.get().credential_ref).next_delete_at is None


def test_an_unforeseen_failure_of_the_store_quotes_nothing(
    space: KnowledgeSpace, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_many(entries: Any, *, deadline: Any) -> Any:
        raise RuntimeError(f"503 for {entries[0].plaintext.exact!r}")

    monkeypatch.setattr(store, "_put_many", put_many)
    with pytest.raises(SecretStoreError) as caught:
        create(space)
    assert str(caught.value) == "the secret store failed in an unexpected way (RuntimeError)"
    assert caught.value.code == "SOURCE_SECRET_STORE_FAILED"


def test_a_space_that_goes_away_meanwhile(
    space: KnowledgeSpace, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_put(store, monkeypatch, KnowledgeSpace.objects.all().delete)
    with pytest.raises(SpaceNotFound):
        create(space)
    assert (states(), Source.objects.count()) == (["staged"], 0)


@pytest.mark.parametrize("state", ["retired", "deleting", "deleted"])
def test_a_reservation_that_was_taken_back_meanwhile_is_never_used(
    space: KnowledgeSpace, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    after_put(store, monkeypatch, lambda: set_state(SourceSecretLifecycleRef.objects.get().credential_ref, state))
    with pytest.raises(OperationOver) as caught:
        create(space, operation_id="import-7")
    assert str(caught.value) == (
        "operation 'import-7' was not finished in time (KFS_CREDENTIALS['RECOVER_AFTER']), or what it made was "
        "replaced since: begin a new one"
    )
    assert (states(), Source.objects.count()) == ([state], 0)


@pytest.mark.parametrize("what", ["INSERT", "COMMIT"])
@pytest.mark.parametrize("credentials", [OLD, None])
def test_what_the_database_refuses(space: KnowledgeSpace, store: EncryptedStore, what: str, credentials: Any) -> None:
    """Also where it refuses only at the commit. The message has the error's class, and no word of the row."""
    refuse = "RAISE check_violation USING MESSAGE = 'canary: ' || NEW.metadata::text;"
    with trigger("INSERT", refuse, deferred=what == "COMMIT"), pytest.raises(MutationFailed) as caught:
        create(space, credentials)
    assert str(caught.value) == (
        "the database refused the change (CheckViolation, SQLSTATE 23514): a constraint, a trigger or a foreign key"
    )
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert (states(), Source.objects.count()) == (["staged"] * (credentials is not None), 0)


def test_a_trigger_that_lets_no_row_be_made(space: KnowledgeSpace, store: EncryptedStore) -> None:
    message = r"^a trigger of the database kept the source from being made$"
    with trigger("INSERT", "RETURN NULL;"), pytest.raises(MutationFailed, match=message):
        create(space)
    assert (states(), Source.objects.count()) == (["staged"], 0)


# The ledger's own rules.


def test_a_source_that_names_the_reserved_ref_already_is_taken_at_its_version(
    space: KnowledgeSpace, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SourceFactory.create(knowledge_space=space, bare=True, version=6)

    def name_it() -> None:
        execute("UPDATE sources SET credential_ref = %s", SourceSecretLifecycleRef.objects.get().credential_ref)

    after_put(store, monkeypatch, name_it)
    taken = create(space, source_id=source.pk)
    assert (taken.name, taken.version) == (source.name, 6)
    assert (row_of(taken.credential_ref).state, row_of(taken.credential_ref).source_version) == (RefState.ACTIVE, 6)
    assert check_invariants("default", store) == []


def test_a_candidate_of_the_backfill_is_no_reservation_of_a_create(
    space: KnowledgeSpace, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_put(store, monkeypatch, lambda: execute("UPDATE source_secret_lifecycle_refs SET state = 'candidate'"))
    with pytest.raises(OperationOver):
        create(space)
    assert (states(), Source.objects.count()) == (["candidate"], 0)


def test_a_ref_that_is_reserved_is_nobody_elses(space: KnowledgeSpace, store: EncryptedStore) -> None:
    ref = new_ref()
    first, second = (Operation(Purpose.CREATE, TENANT, space.pk, uuid.uuid4(), ref=ref) for _ in range(2))
    with short_transaction("default"):
        assert reserve("default", first, store="default", size=2) == (ref, RefState.STAGED)
    with pytest.raises(IntegrityError), short_transaction("default"):
        reserve("default", second, store="default", size=2)
    assert row_of(ref).operation_id == first.id


def test_a_deletion_at_work_on_the_space(space: KnowledgeSpace, store: EncryptedStore, files: Files) -> None:
    """Later versions of knowledge-fs say so in a table of their own."""
    with being_deleted(space):
        for credentials in (OLD, None):
            with pytest.raises(BeingDeleted, match=r"^the source or its knowledge space is being deleted$"):
                create(space, credentials)
    assert (states(), files(), Source.objects.count()) == ([], [], 0)

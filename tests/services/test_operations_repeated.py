"""The same operation twice, and commits that are not answered: one source, one new version, one object, or an error."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection

from kfs_credentials import services
from kfs_credentials.errors import (
    OperationOver,
    SecretConflict,
    SourceExists,
    SourceNotFound,
    StoreUnavailable,
    VersionConflict,
)
from kfs_credentials.models import KnowledgeSpace, RefState, SecretObject, Source, SourceSecretLifecycleRef
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.transactions import TRIES, pause_before_try
from tests.cuts import Cut, terminate
from tests.factories import SourceFactory, SpaceFactory
from tests.invariants import check_invariants
from tests.services.conftest import (
    NEW,
    OLD,
    TENANT,
    Files,
    after_put,
    create,
    execute,
    meet_after_put,
    resolve,
    rotate,
    row_of,
    set_state,
    states,
    together,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def other_tests_have_a_connection(transactional_db: None) -> Iterator[None]:
    """Close the one of this test at its end, whatever became of it."""
    yield
    connection.close()


# Called again with the same id.


def test_create_repeated_returns_the_source_and_puts_nothing(
    space: KnowledgeSpace, store: EncryptedStore, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = create(space, operation_id="import-7")
    monkeypatch.setattr(store, "_put_many", None)
    again = create(space, operation_id="import-7", name="Another name")
    assert (again.pk, again.name, again.version) == (first.pk, first.name, 1)
    assert (states(), len(files()), Source.objects.count()) == (["active"], 1, 1)
    assert row_of(first.credential_ref).operation_id == "import-7"


def test_create_repeated_without_credentials(space: KnowledgeSpace, store: EncryptedStore) -> None:
    first = create(space, None, operation_id="import-7")
    rotate(first)
    again = create(space, None, operation_id="import-7")
    assert (again.pk, again.version, Source.objects.count()) == (first.pk, 2, 1)


def test_create_repeated_without_credentials_and_with_an_id_of_the_callers(space: KnowledgeSpace) -> None:
    """Nothing tells whose source it is: at least there is no second one."""
    given = {"source_id": uuid.uuid4(), "operation_id": "import-7"}
    create(space, None, **given)
    with pytest.raises(SourceExists):
        create(space, None, **given)
    assert Source.objects.count() == 1


@pytest.mark.parametrize("credentials", [OLD, None])
def test_create_repeated_for_another_space(space: KnowledgeSpace, store: EncryptedStore, credentials: Any) -> None:
    create(space, credentials, operation_id="import-7")
    with pytest.raises(SourceExists if credentials is None else OperationOver):
        create(SpaceFactory.create(), credentials, operation_id="import-7")
    assert Source.objects.count() == 1


def test_an_operation_of_one_tenant_is_none_of_anothers(space: KnowledgeSpace, store: EncryptedStore) -> None:
    other = SpaceFactory.create(tenant_id="tenant-b")
    create(space, operation_id="import-7")
    create(other, NEW, operation_id="import-7", tenant="tenant-b")
    assert (states(), Source.objects.count()) == (["active", "active"], 2)


def test_a_create_and_a_rotate_of_the_same_id_are_two_operations(source: Source, space: KnowledgeSpace) -> None:
    assert rotate(create(space, operation_id="import-7"), operation_id="import-7").version == 2


def test_create_repeated_after_the_store_failed(
    space: KnowledgeSpace, store: EncryptedStore, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with the ref that it has reserved, also if another attempt has put it there already."""
    real = store._put_many

    def put_many(entries: Any, *, deadline: Any) -> Any:
        real(entries, deadline=deadline)
        raise StoreUnavailable("down")

    monkeypatch.setattr(store, "_put_many", put_many)
    with pytest.raises(StoreUnavailable):
        create(space, operation_id="import-7")
    ref = SourceSecretLifecycleRef.objects.get().credential_ref
    monkeypatch.setattr(store, "_put_many", real)
    assert create(space, operation_id="import-7").credential_ref == ref
    assert (states(), len(files())) == (["active"], 1)


def test_create_repeated_with_another_value_before_it_was_done(
    space: KnowledgeSpace, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was put first stands; one id is one value."""
    after_put(store, monkeypatch, lambda: set_state(SourceSecretLifecycleRef.objects.get().credential_ref, "retired"))
    with pytest.raises(OperationOver):
        create(space, operation_id="import-7")
    execute("UPDATE source_secret_lifecycle_refs SET state = 'staged'")
    with pytest.raises(SecretConflict, match=r"^this ref already holds a different secret; the first one stands$"):
        create(space, NEW, operation_id="import-7")
    assert (states(), Source.objects.count()) == (["staged"], 0)


@pytest.mark.parametrize("state", ["candidate", "retired", "deleting", "deleted"])
def test_create_repeated_after_it_was_given_up(
    space: KnowledgeSpace, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    source = create(space, operation_id="import-7")
    execute("DELETE FROM sources")
    set_state(source.credential_ref, state)
    monkeypatch.setattr(store, "_put_many", None)
    with pytest.raises(OperationOver) as caught:
        create(space, operation_id="import-7")
    assert caught.value.code == "SOURCE_CREDENTIAL_MUTATION_FAILED"
    assert (states(), Source.objects.count()) == ([state], 0)


def test_create_repeated_after_the_source_was_deleted(space: KnowledgeSpace, store: EncryptedStore) -> None:
    source = create(space, operation_id="import-7")
    services.delete_source(tenant=TENANT, source_id=source.pk)
    with pytest.raises(OperationOver):
        create(space, operation_id="import-7")
    execute("UPDATE source_secret_lifecycle_refs SET state = 'active'")  # deleted by raw SQL, and not yet swept
    with pytest.raises(SourceNotFound):
        create(space, operation_id="import-7")
    assert Source.objects.count() == 0


def test_rotate_repeated_where_the_source_names_the_ref_already(source: Source) -> None:
    """A program that moves the source first and the ledger next died in between: the ref stays in use."""
    rotated = rotate(source, operation_id="rotation-7")
    set_state(rotated.credential_ref, "staged")
    again = rotate(source, operation_id="rotation-7")
    assert (again.credential_ref, row_of(rotated.credential_ref).state) == (rotated.credential_ref, "active")
    assert resolve(source) == NEW


def test_rotate_repeated_returns_the_source_whatever_version_is_expected(
    source: Source, store: EncryptedStore, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rotate(source, expected_version=1, operation_id="nightly")
    monkeypatch.setattr(store, "_put_many", None)
    again = rotate(source, expected_version=1, operation_id="nightly")
    assert (again.version, again.credential_ref) == (2, first.credential_ref)
    assert (states(), len(files())) == (["active", "retired"], 2)


def test_rotate_repeated_after_another_rotation(source: Source) -> None:
    """What it made was replaced: it must not come back."""
    rotate(source, operation_id="nightly")
    last = rotate(source, {"token": "last"})
    with pytest.raises(OperationOver, match="what it made was replaced since: begin a new one"):
        rotate(source, operation_id="nightly")
    assert (resolve(source), Source.objects.get().version) == ({"token": "last"}, last.version)


def test_rotate_repeated_for_another_source(source: Source, space: KnowledgeSpace) -> None:
    rotate(source, operation_id="nightly")
    other = create(space)
    with pytest.raises(OperationOver) as caught:
        rotate(other, operation_id="nightly")
    assert str(caught.value) == "operation 'nightly' is about another source: give each operation its own id"
    assert resolve(other) == OLD


@pytest.mark.parametrize("length", [1, 255])
def test_ids_of_any_text(source: Source, length: int) -> None:
    assert rotate(source, operation_id="é" * length).version == 2


# The same id from two threads at once.


def test_two_creates_at_once_make_one_source(
    space: KnowledgeSpace, store: EncryptedStore, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet_after_put(store, monkeypatch)
    one, two = together(*[lambda: create(space, operation_id="import-7")] * 2)
    assert (one.pk, one.credential_ref) == (two.pk, two.credential_ref)
    assert (states(), len(files()), Source.objects.count()) == (["active"], 1, 1)
    assert check_invariants("default", store) == []


def test_two_rotates_at_once_make_one_version(
    source: Source, store: EncryptedStore, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet_after_put(store, monkeypatch)
    one, two = together(*[lambda: rotate(source, expected_version=1, operation_id="nightly")] * 2)
    assert one.version == two.version == 2
    assert (states(), len(files())) == (["active", "retired"], 2)
    assert check_invariants("default", store) == []


# A commit that is not answered: number 1 is the reservation's, number 2 the activation's.


@pytest.mark.parametrize("took_place", [True, False])
@pytest.mark.parametrize("number", [1, 2])
def test_create(
    space: KnowledgeSpace, store: EncryptedStore, files: Files, cut_at_commit: Cut, number: int, took_place: bool
) -> None:
    cut_at_commit(number, took_place=took_place)
    source = create(space)
    assert (source.version, resolve(source)) == (1, OLD)
    assert (states(), len(files()), Source.objects.count(), SecretObject.objects.count()) == (["active"], 1, 1, 1)
    assert row_of(source.credential_ref).row_version == 1
    assert check_invariants("default", store) == []


@pytest.mark.parametrize("took_place", [True, False])
@pytest.mark.parametrize("source_id", [None, uuid.uuid4()])
def test_create_without_credentials(
    space: KnowledgeSpace, cut_at_commit: Cut, took_place: bool, source_id: uuid.UUID | None
) -> None:
    cut_at_commit(1, took_place=took_place)
    source = create(space, None, source_id=source_id)
    assert (source.version, Source.objects.count()) == (1, 1)


@pytest.mark.parametrize("credentials", [OLD, None])
def test_create_where_another_source_took_the_id_meanwhile(
    space: KnowledgeSpace, store: EncryptedStore, cut_at_commit: Cut, monkeypatch: pytest.MonkeyPatch, credentials: Any
) -> None:
    """The commit did not take place, and somebody else came first: that source is not taken for this one."""
    taken = uuid.uuid4()
    cut_at_commit(1 if credentials is None else 2, took_place=False)

    def come_first(failures: int) -> float:
        SourceFactory.create(pk=taken, knowledge_space=space, bare=True)
        return pause_before_try(failures)

    monkeypatch.setattr("kfs_credentials.services.pause_before_try", come_first)
    with pytest.raises(SourceExists):
        create(space, credentials, source_id=taken)
    assert Source.objects.count() == 1


@pytest.mark.parametrize("took_place", [True, False])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("expected", [None, 1])
def test_rotate(
    source: Source,
    store: EncryptedStore,
    files: Files,
    cut_at_commit: Cut,
    number: int,
    took_place: bool,
    expected: int | None,
) -> None:
    cut_at_commit(number, took_place=took_place)
    assert rotate(source, expected_version=expected).version == 2
    assert (resolve(source), states(), len(files())) == (NEW, ["active", "retired"], 2)
    assert check_invariants("default", store) == []


@pytest.mark.parametrize("took_place", [True, False])
@pytest.mark.parametrize("expected", [None, 1])
def test_revoke(source: Source, cut_at_commit: Cut, took_place: bool, expected: int | None) -> None:
    cut_at_commit(1, took_place=took_place)
    revoked = services.revoke_credentials(tenant=TENANT, source_id=source.pk, expected_version=expected)
    assert (revoked.version, revoked.credential_ref, states()) == (2, None, ["retired"])
    assert row_of(source.credential_ref).row_version == 2


@pytest.mark.parametrize("took_place", [True, False])
@pytest.mark.parametrize("expected", [None, 1])
def test_delete_a_source(source: Source, cut_at_commit: Cut, took_place: bool, expected: int | None) -> None:
    cut_at_commit(1, took_place=took_place)
    services.delete_source(tenant=TENANT, source_id=source.pk, expected_version=expected)
    assert (states(), Source.objects.count()) == (["retired"], 0)
    assert row_of(source.credential_ref).row_version == 2


@pytest.mark.parametrize("took_place", [True, False])
def test_delete_a_space(source: Source, cut_at_commit: Cut, took_place: bool) -> None:
    cut_at_commit(1, took_place=took_place)
    services.delete_knowledge_space(tenant=TENANT, space_id=source.knowledge_space_id)
    assert (states(), Source.objects.count(), KnowledgeSpace.objects.count()) == (["retired"], 0, 0)


def test_a_version_that_is_another_after_a_commit_that_did_not_take_place(
    source: Source, cut_at_commit: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_at_commit(2, took_place=False)

    def change(failures: int) -> float:
        execute("UPDATE sources SET version = 5")
        return pause_before_try(failures)

    monkeypatch.setattr("kfs_credentials.services.pause_before_try", change)
    with pytest.raises(VersionConflict):
        rotate(source, expected_version=1)
    assert (states(), resolve(source)) == (["active", "staged"], OLD)


def test_an_answer_that_comes_and_a_connection_that_ends_right_after_it(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done is not reported as an error because the source cannot be read in the same moment."""
    real, count = connection._commit, 0  # type: ignore[attr-defined]

    def commit() -> None:
        nonlocal count
        count += 1
        real()
        if count == 2:
            terminate(connection)

    monkeypatch.setattr(connection, "_commit", commit)
    assert rotate(source).version == 2
    assert resolve(source) == NEW


ACTS: dict[str, Callable[[Source], object]] = {
    "create": lambda source: create(source.knowledge_space),
    "rotate": rotate,
    "revoke": lambda source: services.revoke_credentials(tenant=TENANT, source_id=source.pk),
    "delete a source": lambda source: services.delete_source(tenant=TENANT, source_id=source.pk),
    "delete a space": lambda source: services.delete_knowledge_space(tenant=TENANT, space_id=source.knowledge_space_id),
}


@pytest.mark.parametrize("act", [*ACTS.values(), resolve], ids=[*ACTS, "resolve"])
def test_a_connection_that_was_lost_before_is_made_anew(
    source: Source, store: EncryptedStore, act: Callable[[Source], object]
) -> None:
    """As a connection that is kept may be, after the server or a firewall has ended it."""
    source.knowledge_space  # noqa: B018 - loads it
    terminate(connection)
    act(source)
    assert check_invariants("default", store) == []


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_database_that_stays_away_ends_it_after_a_few_tries(
    source: Source, monkeypatch: pytest.MonkeyPatch, act: Callable[[Source], object]
) -> None:
    """The database's own error is raised; nothing was undone, and nothing done by halves."""
    tries = 0

    def commit() -> None:
        nonlocal tries
        tries += 1
        terminate(connection)
        with connection.wrap_database_errors:
            connection.connection.execute("COMMIT")

    monkeypatch.setattr(connection, "_commit", commit)
    monkeypatch.setattr("kfs_credentials.services.pause_before_try", lambda failures: 0.0)
    with pytest.raises(OperationalError) as caught:
        act(source)
    monkeypatch.undo()
    assert tries == TRIES
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert (states(), resolve(source)) == (["active"], OLD)
    assert row_of(source.credential_ref).state == RefState.ACTIVE

"""Inside the caller's transaction: create and rotate refuse, the others join it. Rows that somebody else has locked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from kfs_credentials import services
from kfs_credentials.crypto import Credentials
from kfs_credentials.errors import (
    ImproperlyPrepared,
    MutationFailed,
    NoCredentials,
    SourceBusy,
    SourceNotFound,
    VersionConflict,
)
from kfs_credentials.keys import CLOSING
from kfs_credentials.models import KnowledgeSpace, Source
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.invariants import check_invariants
from tests.management.rows import table_contents
from tests.services.conftest import (
    NEW,
    OLD,
    TENANT,
    Change,
    Files,
    Other,
    before_statement,
    create,
    elsewhere,
    execute,
    resolve,
    rotate,
    states,
    trigger,
)

pytestmark = pytest.mark.django_db(transaction=True)

Act = Callable[[Source], object]


def never(credentials: Credentials) -> None:
    raise AssertionError("the validator was called")


def revoke(source: Source, **more: Any) -> Source:
    return services.revoke_credentials(tenant=TENANT, source_id=source.pk, **more)


def delete(source: Source, **more: Any) -> None:
    services.delete_source(tenant=TENANT, source_id=source.pk, **more)


def delete_space(source: Source) -> None:
    services.delete_knowledge_space(tenant=TENANT, space_id=source.knowledge_space_id)


ALONE: dict[str, Act] = {
    "create": lambda source: create(source.knowledge_space),
    "create without credentials": lambda source: create(source.knowledge_space, None),
    "rotate": rotate,
}
JOINING: dict[str, Act] = {"revoke": revoke, "delete a source": delete, "delete a space": delete_space}


# Refuse, or join.


@contextmanager
def without_autocommit() -> Iterator[None]:
    connection.set_autocommit(False)
    try:
        yield
    finally:
        connection.rollback()
        connection.set_autocommit(True)


@pytest.mark.parametrize("around", [transaction.atomic, without_autocommit])
@pytest.mark.parametrize("act", ALONE.values(), ids=ALONE)
def test_what_needs_commits_of_its_own_refuses(source: Source, files: Files, act: Act, around: Any) -> None:
    """Before anything is written and before the validator is called; the transaction around it goes on."""
    before = table_contents()
    with around():
        with pytest.raises(ImproperlyPrepared) as caught:
            act(source)
        with pytest.raises(ImproperlyPrepared):
            rotate(source, validate=never)
        with pytest.raises(ImproperlyPrepared):
            create(source.knowledge_space, validate=never)
        assert str(caught.value) == (
            "This needs transactions of its own. Call it outside of atomic() and with autocommit on "
            "(DATABASES['default'] must set neither ATOMIC_REQUESTS around it nor AUTOCOMMIT False; in a test, use "
            "TransactionTestCase)."
        )
        assert table_contents() == before
    assert len(files()) == 1


@pytest.mark.parametrize("around", [transaction.atomic, without_autocommit])
@pytest.mark.parametrize("act", JOINING.values(), ids=JOINING)
def test_what_joins_is_undone_with_the_callers_transaction(source: Source, act: Act, around: Any) -> None:
    before = table_contents()
    with around():
        act(source)
        assert states() == ["retired"]
        if around is transaction.atomic:
            transaction.set_rollback(True)
    assert table_contents() == before
    assert resolve(source) == OLD


@pytest.mark.parametrize("act", JOINING.values(), ids=JOINING)
def test_what_joins_is_committed_with_the_callers_transaction(source: Source, store: EncryptedStore, act: Act) -> None:
    def look() -> None:
        assert resolve(source) == OLD
        assert states() == ["active"]

    with transaction.atomic():
        act(source)
        elsewhere(look)
    assert states() == ["retired"]
    assert check_invariants("default", store) == []


FAILURES: dict[str, tuple[Act, type[Exception]]] = {
    "revoke": (lambda source: revoke(source, expected_version=9), VersionConflict),
    "delete": (lambda source: delete(source, expected_version=9), VersionConflict),
    "no source": (lambda source: services.delete_source(tenant="tenant-b", source_id=source.pk), SourceNotFound),
}


@pytest.mark.parametrize(("act", "error"), FAILURES.values(), ids=FAILURES)
def test_a_failure_leaves_the_callers_transaction_usable(source: Source, act: Act, error: type[Exception]) -> None:
    with transaction.atomic():
        execute("UPDATE sources SET name = 'Renamed'")
        with pytest.raises(error):
            act(source)
        execute("UPDATE sources SET status = 'paused'")
    assert Source.objects.values_list("name", "status").get() == ("Renamed", "paused")
    assert resolve(source) == OLD


@pytest.mark.parametrize("act", JOINING.values(), ids=JOINING)
def test_a_refusal_of_the_database_leaves_the_callers_transaction_usable(source: Source, act: Act) -> None:
    with trigger("UPDATE OR DELETE", "RAISE 'no';"), transaction.atomic():
        with pytest.raises(MutationFailed):
            act(source)
        execute("UPDATE knowledge_spaces SET name = 'Renamed'")
    assert KnowledgeSpace.objects.get().name == "Renamed"
    assert resolve(source) == OLD


@pytest.mark.parametrize("act", [*JOINING.values(), resolve], ids=[*JOINING, "resolve"])
def test_a_transaction_that_has_failed_before(source: Source, act: Act) -> None:
    """It says what Django says, and blames neither the tables nor the source."""
    with transaction.atomic():
        with pytest.raises(DatabaseError), transaction.atomic(savepoint=False):
            execute("SELECT 1 / 0")
        with pytest.raises(TransactionManagementError):
            act(source)
        transaction.set_rollback(True)
    assert resolve(source) == OLD


# Isolation levels.


@pytest.fixture(params=["repeatable read", "serializable"])
def default_level(request: pytest.FixtureRequest, transactional_db: None) -> Iterator[str]:
    """The level that the database's sessions have unless they set another."""
    name = connection.settings_dict["NAME"]
    execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{request.param}'")
    connection.close()
    yield request.param
    execute(f"ALTER DATABASE {name} RESET default_transaction_isolation")
    connection.close()


def test_whatever_the_default_level_our_transactions_read_what_is_committed(
    default_level: str, space: KnowledgeSpace, store: EncryptedStore
) -> None:
    execute("CREATE TABLE kfs_tests_levels (level TEXT)")
    note = "INSERT INTO kfs_tests_levels VALUES (current_setting('transaction_isolation')); RETURN COALESCE(NEW, OLD);"
    try:
        with trigger("INSERT OR UPDATE OR DELETE", note):
            source = create(space)
            rotate(source)
            revoke(source)
            rotate(source)
            delete(source)
            create(space)
            services.delete_knowledge_space(tenant=TENANT, space_id=space.pk)
        with connection.cursor() as cursor:
            cursor.execute("SELECT level, count(*) FROM kfs_tests_levels GROUP BY level")
            assert cursor.fetchall() == [("read committed", 7)]
    finally:
        execute("DROP TABLE kfs_tests_levels")


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("act", JOINING.values(), ids=JOINING)
def test_a_callers_snapshot_that_is_older_than_a_rotation(source: Source, act: Act, level: str) -> None:
    """The transaction cannot be gone on with: the caller has to begin it anew. Nothing is lost."""
    with transaction.atomic():
        execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert resolve(source) == OLD
        elsewhere(lambda: rotate(source))
        with pytest.raises(OperationalError, match="could not serialize access"):
            act(source)
        transaction.set_rollback(True)
    assert resolve(source) == NEW


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("act", JOINING.values(), ids=JOINING)
def test_a_callers_snapshot_that_is_not(source: Source, store: EncryptedStore, act: Act, level: str) -> None:
    with transaction.atomic():
        execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        act(source)
    assert states() == ["retired"]
    assert check_invariants("default", store) == []


# Locks of somebody else.

BUSY = (
    "somebody else has held the source or its space for 0.01 s, or was closing a key "
    "(KFS_CREDENTIALS['LOCK_TIMEOUT']): try again"
)
LOCKS = {
    "source": "SELECT FROM sources FOR UPDATE",
    "ledger": "SELECT FROM source_secret_lifecycle_refs FOR UPDATE",
    "space": "SELECT FROM knowledge_spaces FOR UPDATE",
}
HELD_UP: dict[str, tuple[str, Act]] = {
    "create": ("space", lambda source: create(source.knowledge_space)),
    "create without credentials": ("space", lambda source: create(source.knowledge_space, None)),
    "rotate, source": ("source", rotate),
    "rotate, ledger": ("ledger", rotate),
    "revoke, source": ("source", revoke),
    "revoke, ledger": ("ledger", revoke),
    "delete, source": ("source", delete),
    "delete, ledger": ("ledger", delete),
    "delete a space, source": ("source", delete_space),
    "delete a space, space": ("space", delete_space),
}


@pytest.mark.parametrize(("lock", "act"), HELD_UP.values(), ids=HELD_UP)
def test_what_stays_locked_is_busy(source: Source, other: Other, kfs_settings: Change, lock: str, act: Act) -> None:
    kfs_settings(LOCK_TIMEOUT=0.01)
    other.execute(LOCKS[lock])
    check_busy(source, act)
    other.rollback()
    assert resolve(source) == OLD


@pytest.mark.parametrize("act", [rotate, HELD_UP["create"][1]], ids=["rotate", "create"])
def test_a_key_that_is_being_closed_for_too_long_is_busy(
    source: Source, other: Other, kfs_settings: Change, act: Act
) -> None:
    kfs_settings(LOCK_TIMEOUT=0.01)
    other.execute("SELECT pg_advisory_xact_lock(%s, 0)", [CLOSING])
    check_busy(source, act)
    other.rollback()
    assert resolve(source) == OLD


@pytest.mark.parametrize("name", [name for name in HELD_UP if not name.startswith(("create", "rotate"))])
def test_what_stays_locked_leaves_the_callers_transaction_usable(
    source: Source, other: Other, kfs_settings: Change, name: str
) -> None:
    kfs_settings(LOCK_TIMEOUT=0.01)
    lock, act = HELD_UP[name]
    other.execute(LOCKS[lock])
    with transaction.atomic():
        check_busy(source, act)
        execute("CREATE TABLE kfs_tests_usable ()")
        transaction.set_rollback(True)
    other.rollback()
    assert resolve(source) == OLD


def check_busy(source: Source, act: Act) -> None:
    before = table_contents()
    with pytest.raises(SourceBusy) as caught:
        act(source)
    assert (str(caught.value), caught.value.code) == (BUSY, "SOURCE_BUSY")
    after = table_contents()
    for table in ("knowledge_spaces", "sources", "source_credential_backfills"):
        assert after[table] == before[table]
    assert [state for state in states() if state != "staged"] == ["active"]


@pytest.mark.parametrize(("lock", "act"), HELD_UP.values(), ids=HELD_UP)
def test_what_is_let_go_meanwhile_is_no_hindrance(
    source: Source, store: EncryptedStore, other: Other, monkeypatch: pytest.MonkeyPatch, lock: str, act: Act
) -> None:
    other.execute(LOCKS[lock])
    failures: list[int] = []

    def let_go(number: int) -> float:
        failures.append(number)
        other.rollback()
        return 0.0

    monkeypatch.setattr("kfs_credentials.services.pause_before_try", let_go)
    act(source)
    assert failures == [1]
    assert check_invariants("default", store) == []


@pytest.mark.parametrize("act", [item for _, item in HELD_UP.values()], ids=HELD_UP)
def test_no_lock_is_waited_for(source: Source, act: Act) -> None:
    """A DELETE takes a source before its job, against our order, and would be a deadlock for one of us."""
    with CaptureQueriesContext(connection) as queries:
        act(source)
    statements = [re.sub(r"--.*", "", query["sql"]) for query in queries.captured_queries]
    locks = [sql for sql in statements if re.search(r"\bFOR (UPDATE|NO KEY UPDATE|KEY SHARE)\b", sql)]
    assert locks
    assert [sql for sql in locks if not re.search(r"\b(NOWAIT|SKIP LOCKED)\b", sql)] == []


def test_a_reader_waits_for_nobody(source: Source, other: Other, kfs_settings: Change) -> None:
    kfs_settings(LOCK_TIMEOUT=0.01)
    for lock in LOCKS.values():
        other.execute(lock)
    assert resolve(source) == OLD


def test_a_space_that_somebody_changes_is_no_hindrance(source: Source, other: Other, kfs_settings: Change) -> None:
    """FOR KEY SHARE keeps it from being deleted, and from nothing else."""
    kfs_settings(LOCK_TIMEOUT=0.01)
    other.execute("UPDATE knowledge_spaces SET name = 'Renamed'")
    create(source.knowledge_space)
    rotate(source)
    delete(source)


def test_a_space_is_kept_from_being_deleted_until_its_source_is_there(
    space: KnowledgeSpace, store: EncryptedStore, kfs_settings: Change
) -> None:
    kfs_settings(LOCK_TIMEOUT=0.01)

    def delete_it() -> None:
        with pytest.raises(SourceBusy):
            services.delete_knowledge_space(tenant=TENANT, space_id=space.pk)

    with before_statement("INSERT INTO sources", lambda: elsewhere(delete_it)):
        source = create(space)
    assert resolve(source) == OLD


@pytest.mark.parametrize("act", [*ALONE.values(), *JOINING.values(), resolve], ids=[*ALONE, *JOINING, "resolve"])
def test_a_database_that_is_not_prepared(source: Source, act: Act) -> None:
    """It says what to do, and nothing is left behind."""
    source.knowledge_space  # noqa: B018 - loads it
    execute("ALTER TABLE sources RENAME COLUMN id TO hidden")
    try:
        with pytest.raises(ImproperlyPrepared) as caught:
            act(source)
    finally:
        execute("ALTER TABLE sources RENAME COLUMN hidden TO id")
    assert str(caught.value) == (
        "the database refused a statement (UndefinedColumn, SQLSTATE 42703). Check that `manage.py migrate` has run "
        "and that this role may read and write the tables."
    )
    assert resolve(source) == OLD


def test_a_source_whose_ref_moves_all_the_time_is_busy(source: Source, kfs_settings: Change) -> None:
    """Between the look without a lock and the one under it; the ledger's row comes before the source's."""
    kfs_settings(LOCK_TIMEOUT=0.01)
    moves = 0

    def move(execute_it: Callable[..., Any], sql: str, parameters: Any, many: bool, context: Any) -> Any:
        nonlocal moves
        if "FOR NO KEY UPDATE OF src NOWAIT" in sql:
            moves += 1
            elsewhere(lambda: execute("UPDATE sources SET credential_ref = %s", f"moved-{moves}"))
        return execute_it(sql, parameters, many, context)

    with connection.execute_wrapper(move), pytest.raises(SourceBusy, match=re.escape(BUSY)):
        revoke(source)
    assert moves >= 1
    assert Source.objects.get().credential_ref == f"moved-{moves}"


def test_no_credentials_after_a_revocation_in_the_same_transaction(source: Source) -> None:
    with transaction.atomic():
        revoke(source)
        with pytest.raises(NoCredentials):
            resolve(source)

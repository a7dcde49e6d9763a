"""No lock is waited for long, and DDL for what is there already is not issued at all."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, connections

from tests.waiting import until

from .catalog import catalog
from .conftest import CatalogOf, MakeHost
from .hosts import BASE, DEADLINE, MIGRATIONS, OURS, SEED, SOURCE_COLUMNS, STARTS, Host, second_alias

HELD = "SELECT count(*) FROM pg_locks WHERE pid = %s AND relation = 'sources'::regclass AND granted"
# pg_locks tells of all databases of the server, and their tables may have the same numbers.
WAITING = """
SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE datname = current_database() AND locktype = %s AND NOT granted
"""


@contextmanager
def migrating(host: Host) -> Iterator[Future[None]]:
    """Run `migrate` beside the block."""

    def migrate() -> None:
        try:
            host.migrate()
        finally:
            connections[host.alias].close()

    with ThreadPoolExecutor(1) as executor:
        yield executor.submit(migrate)


@contextmanager
def locks_taken(host: Host) -> Iterator[dict[str, set[str]]]:
    """Collect the locks that this thread's connection takes on each relation.

    They are held to the end of a transaction, so looking at them after each statement misses none.
    """
    taken: dict[str, set[str]] = {}

    def look(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        result = execute(sql, params, many, context)
        for relation, mode in context["connection"].connection.execute(
            "SELECT relation::regclass::text, mode FROM pg_locks "
            "WHERE pid = pg_backend_pid() AND relation >= 16384"  # what is not the server's own
        ):
            taken.setdefault(relation, set()).add(mode)
        return result

    with host.connection.execute_wrapper(look):
        yield taken


def test_on_a_prepared_database_nothing_is_locked_but_for_reading(make_host: MakeHost) -> None:
    host = make_host(*STARTS["seeded"], OURS.split(";")[0])
    with locks_taken(host) as taken:
        host.migrate()
    assert host.recorded() == MIGRATIONS
    assert taken["sources"] == taken["knowledge_spaces"] == {"AccessShareLock"}
    # Refs are registered in the ledger.
    assert taken["source_secret_lifecycle_refs"] == {"AccessShareLock", "RowExclusiveLock"}
    assert taken.get("source_credential_backfills", set()) <= {"AccessShareLock"}
    # And none of their indexes was built again.
    indexes = host.rows("SELECT indexname FROM pg_indexes WHERE tablename ~ '^(source|knowledge)'")
    assert len(indexes) == 20
    for (index,) in indexes:
        assert taken.get(index, set()) <= {"AccessShareLock", "RowExclusiveLock"}, index


def test_on_a_seeded_database_only_our_index_is_built(make_host: MakeHost) -> None:
    host = make_host(*STARTS["later"])
    with locks_taken(host) as taken:
        host.migrate()
    assert taken["knowledge_spaces"] == {"AccessShareLock"}
    assert taken["sources"] == {"AccessShareLock", "ShareLock"}


def test_the_capture_sees_ddl_for_what_is_there(make_host: MakeHost) -> None:
    """So that the tests above mean something: the seed's own replay locks the table."""
    host = make_host(*STARTS["seeded"])
    with locks_taken(host) as taken, host.connection.schema_editor():
        host.run(SEED)
    assert "AccessExclusiveLock" in taken["sources"]


def test_a_seeded_database_migrates_beside_a_long_query(make_host: MakeHost) -> None:
    host = make_host(*STARTS["seeded"])
    with host.session() as reader:
        reader.execute("SELECT count(*) FROM sources")
        host.migrate()
        assert host.recorded() == MIGRATIONS
        reader.execute("SELECT pg_backend_pid()")
        assert host.value(HELD, reader.fetchone()) > 0  # it still holds its lock


GAVE_UP = (
    "gave up waiting for a lock on the tables after 1 s (KFS_CREDENTIALS['LOCK_TIMEOUT']): "
    "another session holds it, a long query perhaps. Nothing was changed by this migration; run migrate "
    "again when that session is done."
)


def test_a_long_query_makes_migrate_give_up_and_blocks_nobody(make_host: MakeHost, kfs_settings: Any) -> None:
    kfs_settings(LOCK_TIMEOUT=1)
    host = make_host(*STARTS["base"])
    objects, sources = catalog(host), host.dump("sources")
    with host.session() as reader:
        reader.execute("SELECT count(*) FROM sources")
        reader.execute("SELECT pg_backend_pid()")
        reading = reader.fetchone()
        with migrating(host) as migration:
            until(lambda: host.value(WAITING, ["relation"]) == 1, "migrate waits for the table")
            # Queued behind migrate, it goes on once migrate gives up; the long query is still there.
            with host.session() as third:
                third.execute("SELECT count(*) FROM sources")
                assert third.fetchone() == (24,)
            assert host.value(HELD, reading) > 0
            with pytest.raises(OperationalError) as caught:
                migration.result(DEADLINE)
        assert str(caught.value) == GAVE_UP
        assert host.recorded() == []
        assert catalog(host) == objects
    host.migrate()
    assert host.recorded() == MIGRATIONS
    assert host.dump("sources", SOURCE_COLUMNS) == sources


PREPARED_COLUMN = "ALTER TABLE sources ADD COLUMN credential_ref TEXT;"
PREPARED_INDEXES = SEED[SEED.index("CREATE UNIQUE INDEX") : SEED.index("CREATE TABLE")] + OURS.split(";")[0]


@pytest.mark.parametrize(
    ("prepared", "reached"),
    [
        ([PREPARED_COLUMN], "0002_source_indexes"),
        ([PREPARED_COLUMN, PREPARED_INDEXES], "0003_ledger"),
    ],
)
def test_an_open_writer_makes_migrate_give_up(
    make_host: MakeHost, catalog_of: CatalogOf, kfs_settings: Any, prepared: list[str], reached: str
) -> None:
    """An index that is missing, or a foreign key, needs the table without writers."""
    kfs_settings(LOCK_TIMEOUT=0.1)
    host = make_host(*STARTS["base"], *prepared)
    objects = catalog(host)
    with host.session() as writer:
        writer.execute("UPDATE sources SET name = name")
        with pytest.raises(OperationalError) as caught:
            host.migrate()
        assert str(caught.value) == GAVE_UP.replace("1 s", "0.1 s")
        assert host.recorded() == MIGRATIONS[: MIGRATIONS.index(reached)]
        assert catalog(host) == objects
    host.migrate()
    assert host.recorded() == MIGRATIONS
    assert catalog(host) == catalog_of(BASE, SEED, OURS)


def test_going_back_gives_up_too(make_host: MakeHost, kfs_settings: Any) -> None:
    kfs_settings(LOCK_TIMEOUT=0.1)
    host = make_host(*STARTS["base"])
    host.migrate()
    with host.session() as reader:
        reader.execute("SELECT count(*) FROM sources")
        with pytest.raises(OperationalError) as caught:
            host.migrate("zero")
        assert str(caught.value) == GAVE_UP.replace("1 s", "0.1 s")
        assert host.recorded() == MIGRATIONS[:2]
    host.migrate("zero")
    assert host.recorded() == []


REGISTER = """
INSERT INTO source_secret_lifecycle_refs (id, tenant_id, knowledge_space_id, source_id, credential_ref,
  operation_id, purpose, state, recover_after, delete_attempts, row_version, created_at, updated_at)
SELECT gen_random_uuid(), tenant_id, space.id, src.id, credential_ref, 'of-a-service',
  'rotate', 'active', now(), 0, 0, now(), now()
FROM sources src JOIN knowledge_spaces space ON space.id = knowledge_space_id
WHERE src.id = 'a0000000-0000-4000-8000-000000000005'
"""
OPERATION = """
SELECT operation_id FROM source_secret_lifecycle_refs WHERE source_id = 'a0000000-0000-4000-8000-000000000005'
"""


def test_registration_beside_a_service_that_registers_the_same_ref(make_host: MakeHost) -> None:
    host = make_host(*STARTS["seeded"])
    with ExitStack() as at_end:
        with host.session() as service:
            service.execute(REGISTER)
            migration = at_end.enter_context(migrating(host))
            until(lambda: host.value(WAITING, ["transactionid"]) == 1, "the registration waits for the service")
        migration.result(DEADLINE)
    assert host.recorded() == MIGRATIONS
    assert host.rows(OPERATION) == [("of-a-service",)]


def test_other_errors_of_the_server_pass_as_they_are(make_host: MakeHost) -> None:
    host = make_host(*STARTS["base"])
    hurried = {"options": "-c statement_timeout=100ms"}
    with host.session() as reader, second_alias(host, "hurried", OPTIONS=hurried) as other:
        reader.execute("SELECT count(*) FROM sources")
        with pytest.raises(OperationalError, match="canceling statement due to statement timeout"):
            other.migrate()


def test_what_sqlmigrate_prints_waits_no_longer_either(
    host: Host, kfs_settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    kfs_settings(LOCK_TIMEOUT=2.5)
    for migration in MIGRATIONS:
        call_command("sqlmigrate", "kfs_credentials", migration, database=host.alias)
        assert "SET LOCAL lock_timeout = '2500ms';" in capsys.readouterr().out

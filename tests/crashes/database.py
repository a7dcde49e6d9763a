"""A database for one test: what is in it, who is at work on it, and ways to hold them up or to cut them off."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections, transaction

from example_project import demo_data
from tests.crashes.workers import Worker
from tests.waiting import MOMENT, PATIENCE

ALIAS = "scene"
NUMBER = 240
"""How many sources the demo has here; 75 of them are the awkward ones."""

# A trigger that waits for as long as the test holds the lock.
HOLD_UP = """
CREATE FUNCTION kfs_tests_hold_up() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock_shared(20261130);
  RETURN NULL;
END $$;
CREATE TRIGGER kfs_tests_hold_up AFTER {event} ON {table} FOR EACH ROW {condition} EXECUTE FUNCTION kfs_tests_hold_up()
"""
# One that waits within COMMIT: deferred, and once more when the worker has what is deferred done before.
HOLD_UP_COMMIT = """
CREATE TABLE kfs_tests_commits (id INT);
CREATE FUNCTION kfs_tests_hold_up() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock_shared(20261130);
  RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER kfs_tests_at_commit AFTER INSERT ON kfs_tests_commits DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION kfs_tests_hold_up();
CREATE FUNCTION kfs_tests_defer() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  SET CONSTRAINTS kfs_tests_at_commit DEFERRED;
  INSERT INTO kfs_tests_commits DEFAULT VALUES;
  RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER kfs_tests_hold_up AFTER {event} ON {table} DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW {condition} EXECUTE FUNCTION kfs_tests_defer()
"""
HOLD_UP_NO_MORE = """
DROP TRIGGER kfs_tests_hold_up ON {table};
DROP TABLE IF EXISTS kfs_tests_commits;
DROP FUNCTION IF EXISTS kfs_tests_defer;
DROP FUNCTION kfs_tests_hold_up
"""
SLOW_DOWN = """
CREATE OR REPLACE FUNCTION kfs_tests_slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_sleep(TG_ARGV[0]::float);
  RETURN NEW;
END $$;
CREATE TRIGGER kfs_tests_slow BEFORE {event} ON {table} FOR EACH ROW EXECUTE FUNCTION kfs_tests_slow({seconds})
"""
# pg_locks tells of all databases of the server, and other tests have theirs there.
HELD_UP = """
SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


class Database:
    """The database that Django knows by `ALIAS`. Its workers are known by the names of their connections."""

    def rows(self, query: str, parameters: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        with connections[ALIAS].cursor() as cursor:
            cursor.execute(query, parameters)
            return list(cursor.fetchall())

    def value(self, query: str, parameters: Sequence[Any] | None = None) -> Any:
        """Return the one value that a query finds."""
        ((value,),) = self.rows(query, parameters)
        return value

    def execute(self, statement: str, parameters: Sequence[Any] | None = None) -> None:
        """Execute a statement, committed at once."""
        with connections[ALIAS].cursor() as cursor:
            cursor.execute(statement, parameters)

    def configure(self, change: str) -> None:
        """Change the database's own settings, for sessions that begin from now on: `SET statement_timeout = 100`."""
        self.execute(f"ALTER DATABASE {connections[ALIAS].settings_dict['NAME']} {change}")

    @contextmanager
    def session(self) -> Iterator[psycopg.Connection[Any]]:
        """Give a session of somebody else, in a transaction that is rolled back at the end unless committed before."""
        parameters = connections[ALIAS].get_connection_params()
        names = ("host", "port", "user", "password", "dbname")
        session = psycopg.connect(**{name: parameters[name] for name in names if name in parameters})
        try:
            yield session
            session.rollback()
        finally:
            session.close()

    # Sources and jobs.

    def leave_only(self, number: int) -> None:
        """Delete all sources but so many ordinary ones."""
        self.execute(
            "DELETE FROM sources WHERE id NOT IN (SELECT id FROM sources "
            "WHERE jsonb_typeof(metadata -> 'credentials') = 'object' AND length(metadata::text) < 1000 LIMIT %s)",
            [number],
        )

    def new_spaces(self, tenant: str, number: int) -> list[str]:
        """Add spaces of a tenant; return their ids."""
        return [
            space
            for (space,) in self.rows(
                "INSERT INTO knowledge_spaces (id, tenant_id, slug, name, created_at, updated_at) "
                "SELECT gen_random_uuid(), %s, 'made-up-' || n, 'Made up', now(), now() FROM generate_series(1, %s) n "
                "RETURNING id::text",
                [tenant, number],
            )
        ]

    def new_legacy_sources(self, space: str, number: int) -> list[str]:
        """Add sources with credentials in clear: `{"token": <the source's id>}`; return their ids."""
        return [
            source
            for (source,) in self.rows(
                "INSERT INTO sources (id, knowledge_space_id, type, status, name, uri, metadata, permission_scope, "
                "version, created_at, updated_at) SELECT id, %s, 'online_drive', 'active', 'Made up', '', "
                "jsonb_build_object('credentials', jsonb_build_object('token', id::text)), '[]', 1, now(), now() "
                "FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, %s)) made RETURNING id::text",
                [space, number],
            )
        ]

    def set_aside(self) -> None:
        """Take all sources away, to let them appear later."""
        self.execute("CREATE TABLE kfs_tests_aside AS TABLE sources")
        self.execute("DELETE FROM sources")

    def let_appear(self, number: int) -> None:
        """Let that many sources appear, chosen at random, as far as there are still some."""
        self.execute(
            "WITH appearing AS (DELETE FROM kfs_tests_aside WHERE id IN "
            "(SELECT id FROM kfs_tests_aside ORDER BY random() LIMIT %s) RETURNING *) "
            "INSERT INTO sources TABLE appearing",
            [number],
        )

    def expire_leases(self) -> None:
        """Move every lease into the past, so that nobody has to wait for it."""
        for table in ("source_credential_backfills", "source_secret_lifecycle_refs", "kfs_credentials_round"):
            self.execute(
                f"UPDATE {table} SET lease_expires_at = now() - interval '1 second' WHERE lease_expires_at IS NOT NULL"
            )

    def expire_reservations(self) -> None:
        """Move the time for every reservation into the past: whoever made it is held to be gone."""
        self.execute(
            "UPDATE source_secret_lifecycle_refs SET recover_after = now() - interval '1 second' "
            "WHERE state IN ('staged', 'candidate')"
        )

    def queue_again(self) -> None:
        """Let all leased jobs be as if they had been given back."""
        self.execute(
            "UPDATE source_credential_backfills SET run_state = 'queued', worker_id = NULL, lease_token = NULL, "
            "lease_expires_at = NULL, heartbeat_at = NULL WHERE run_state = 'running'"
        )

    def states(self) -> dict[str, int]:
        """Return how many jobs there are in each state."""
        return dict(self.rows("SELECT run_state, count(*) FROM source_credential_backfills GROUP BY 1"))

    def has_moved(self, number: int) -> bool:
        """Return whether at least that many sources are moved."""
        return self.states().get("succeeded", 0) >= number

    def attempts(self) -> int:
        """Return how many attempts of jobs were counted, in all."""
        return int(self.value("SELECT COALESCE(sum(retry_count), 0) FROM source_credential_backfills"))

    # Waiting until a worker has come somewhere.

    def wait_until(self, condition: Callable[[], Any], what: str, watched: Worker | None = None) -> Any:
        """Wait until a condition holds, and return its value; fail at once if the `watched` worker ends before."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if found := condition():
                return found
            if watched is None:
                time.sleep(MOMENT)
            elif watched.ends_within(MOMENT):
                if found := condition():
                    return found
                break
        printed = f"\n{watched.printed}" if watched else ""
        pytest.fail(f"waited in vain until {what}{printed}")

    def wait_for(self, worker: Worker, what: str, condition: str) -> int:
        """Wait until a condition on its row in pg_stat_activity holds for a worker; return the backend's process id."""
        query = f"SELECT pid FROM pg_stat_activity activity WHERE application_name = %s AND {condition}"
        ((backend,),) = self.wait_until(lambda: self.rows(query, [worker.name]), f"the worker {what}", worker)
        return int(backend)

    def comes_to_work(self, worker: Worker) -> bool:
        """Wait until a worker writes or has written something; False if it found nothing to do, and ended."""
        at_work = (
            "SELECT FROM pg_stat_activity WHERE application_name = %s AND (backend_xid IS NOT NULL OR query = 'COMMIT')"
        )
        deadline = time.monotonic() + PATIENCE
        while not self.rows(at_work, [worker.name]):
            if worker.ends_within(0.001):
                return False
            if time.monotonic() > deadline:
                pytest.fail(f"waited in vain until the worker writes something, or ends\n{worker.printed}")
        return True

    def wait_until_idle(self, worker: Worker) -> None:
        """Wait until a worker has looked for work, and waits: its last transaction, or its tick, is over."""
        over = "(query = 'COMMIT' OR strpos(query, 'kfs_credentials_tick') > 0)"
        self.wait_for(worker, "is idle", f"state = 'idle' AND {over}")

    def wait_until_it_counts(self, worker: Worker) -> None:
        """Wait until a worker has found nothing to take, and has counted what is left."""
        self.wait_for(worker, "counts what is left", "state = 'idle' AND strpos(query, 'COUNT(') > 0")

    def wait_for_lock(self, worker: Worker, table: str | None = None) -> int:
        """Wait until a worker waits for a lock, of that whole table if any; return the process id of its backend."""
        which = f"AND relation = '{table}'::regclass" if table else ""
        waits = f"EXISTS (SELECT FROM pg_locks lock WHERE lock.pid = activity.pid AND NOT granted {which})"
        return self.wait_for(worker, "waits for a lock", waits)

    def wait_for_the_store(self, worker: Worker) -> None:
        """Wait until a worker has two batches at work and no transaction open: it waits for the store."""
        batches = (
            "SELECT count(DISTINCT lease_token) FROM source_credential_backfills "
            f"WHERE split_part(worker_id, ':', 2) = '{worker.pid}'"
        )
        waits = f"state = 'idle' AND query = 'COMMIT' AND ({batches}) = 2"
        self.wait_for(worker, "waits for the store", waits)

    # Holding them up, and cutting them off.

    @contextmanager
    def held_up(self, event: str, table: str, *, commit: bool = False, condition: str = "") -> Iterator[HoldUp]:
        """Hold up whoever writes to a table: in the statement, or in the COMMIT after it, until the block ends.

        `event` and `condition`: those of a trigger, such as INSERT and "NEW.state = 'active'".
        """
        condition = f"WHEN ({condition})" if condition else ""
        hold_up = HOLD_UP_COMMIT if commit else HOLD_UP
        self.execute(hold_up.format(event=event, table=table, condition=condition))
        with self.session() as session:
            session.execute("SELECT pg_advisory_xact_lock(20261130)")
            yield HoldUp(self, session)
        self.execute(HOLD_UP_NO_MORE.format(table=table))

    def slow_down(self, event: str, table: str, *, seconds: float) -> None:
        """Let each row take so long that is written to a table, as on a busy server: an INSERT, or an UPDATE."""
        self.execute(SLOW_DOWN.format(event=event, table=table, seconds=seconds))

    def terminate(self, backend: int) -> None:
        """End a connection on the server's side."""
        self.execute("SELECT pg_terminate_backend(%s)", [backend])

    def terminate_all(self) -> None:
        """End all connections but this one on the server's side."""
        self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    def wait_for_end_of(self, backend: int) -> None:
        """Wait until the server has noticed that a connection is over, and has done what comes of it."""
        gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
        self.wait_until(lambda: self.value(gone, [backend]), "the server has ended a connection")

    @contextmanager
    def out_of_reach(self) -> Iterator[None]:
        """Let nobody else have or make a connection until the block ends."""
        allow = f"ALTER DATABASE {connections[ALIAS].settings_dict['NAME']} ALLOW_CONNECTIONS"
        connections[ALIAS].ensure_connection()  # the tests' own, which stays
        with connections[ALIAS]._nodb_cursor() as elsewhere:
            elsewhere.execute(f"{allow} false")
            self.terminate_all()
            try:
                yield
            finally:
                elsewhere.execute(f"{allow} true")


class HoldUp:
    """Workers are held up as long as this is not over."""

    def __init__(self, database: Database, session: psycopg.Connection[Any]) -> None:
        self.database = database
        self.session = session

    def wait(self, worker: Worker) -> int:
        """Wait until somebody is held up, that worker at first; return the process id of its backend."""
        ((backend,),) = self.database.wait_until(lambda: self.database.rows(HELD_UP), "it is held up", worker)
        return int(backend)

    def let_go(self) -> None:
        """Hold up nobody any more."""
        self.session.rollback()


def fill(alias: str) -> None:
    """Migrate a database, and put the demo's sources into it."""
    call_command("migrate", database=alias, verbosity=0)
    with transaction.atomic(using=alias):
        demo_data.load(connections[alias], NUMBER)


@contextmanager
def new_database(
    alias: str, *, template: str | None = None, server: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Make a database that Django knows by `alias`, and drop it at the end. The value is the entry of DATABASES.

    `template`: the name of the database to copy; nobody may be connected to it. `server`: an entry of DATABASES of
    another server than the tests' own.
    """
    name = f"kfs_crashes_{secrets.token_hex(6)}"
    entry = connections.databases[alias] = {**connections.databases["default"], **(server or {}), "NAME": name}
    copied = f"TEMPLATE {template}" if template else ""
    try:
        with connections[alias]._nodb_cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name} {copied}")
        try:
            yield {key: entry[key] for key in ("ENGINE", "NAME", "HOST", "PORT", "USER", "PASSWORD")}
        finally:
            connections[alias].close()
            with connections[alias]._nodb_cursor() as cursor:
                cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        del connections[alias]
        del connections.databases[alias]

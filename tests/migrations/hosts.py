"""Databases of host applications: each made for one test, from SQL, and dropped after it."""

import copy
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.migrations.recorder import MigrationRecorder

from kfs_credentials import sql

TESTS = Path(__file__).resolve().parent.parent

# The contract, as knowledge-fs runs it.
BASE = (TESTS / "data/seed/base.sql").read_text()
SEED = (TESTS / "data/seed/0014_source_credential_refs.postgres.sql").read_text()
LATER = (TESTS / "data/seed/later.sql").read_text()

# What its guard says: a source without its ledger row, a ledger row without its source.
SEED_MESSAGES = [
    "source credential_ref is missing a matching active lifecycle registry row",
    "active source secret lifecycle row is orphaned or does not match its source",
]

# Rows for a database in each of these states.
LEGACY_ROWS = (TESTS / "migrations/rows/legacy.sql").read_text()
LIVE_REFS = (TESTS / "migrations/rows/live_refs.sql").read_text()
LATER_ROWS = (TESTS / "migrations/rows/later.sql").read_text()

# What we add to the seed's schema.
OURS = """
CREATE INDEX "kfs_credentials_legacy_idx" ON "sources" ("id")
  WHERE "credential_ref" IS NULL AND jsonb_typeof("metadata" -> 'credentials') = 'object';
CREATE TABLE "kfs_credentials_secret_object" (
  "credential_ref" TEXT PRIMARY KEY NOT NULL,
  "store" TEXT NOT NULL,
  "key_id" TEXT,
  "size" INTEGER,
  "created_at" TIMESTAMPTZ NOT NULL,
  "updated_at" TIMESTAMPTZ NOT NULL,
  "first_claimed_at" TIMESTAMPTZ,
  "first_erased_at" TIMESTAMPTZ,
  "receipt" TEXT,
  "attention" TEXT,
  "abandoned_at" TIMESTAMPTZ,
  "abandoned_by" TEXT,
  "abandoned_reason" TEXT
);
CREATE INDEX "kfs_credentials_secret_object_digest_idx"
  ON "kfs_credentials_secret_object" (sha256((replace("credential_ref", '\\', ''))::bytea));
CREATE INDEX "kfs_credentials_secret_object_attention_idx"
  ON "kfs_credentials_secret_object" ("attention") WHERE "attention" IS NOT NULL;
CREATE TABLE "kfs_credentials_round" (
  "name" TEXT PRIMARY KEY NOT NULL,
  "worker_id" TEXT,
  "lease_token" UUID,
  "lease_expires_at" TIMESTAMPTZ,
  "started_at" TIMESTAMPTZ,
  "covers_until" TIMESTAMPTZ,
  "completed_at" TIMESTAMPTZ,
  "found" INTEGER NOT NULL
);
CREATE TABLE "kfs_credentials_acknowledgement" (
  "source_id" UUID PRIMARY KEY NOT NULL,
  "shape" TEXT NOT NULL,
  "acknowledged_by" TEXT NOT NULL,
  "acknowledged_at" TIMESTAMPTZ NOT NULL
);
"""
# Of the newest tables there is one text only; test_models_match compares it with the models.
OURS += sql.read("schema/0007_operations")

# The four databases that `migrate` meets: the statements that made each.
STARTS: dict[str, Sequence[str]] = {
    "empty": (),
    "base": (BASE, LEGACY_ROWS),
    "seeded": (BASE, LEGACY_ROWS, SEED, LIVE_REFS),
    "later": (BASE, LEGACY_ROWS, SEED, LIVE_REFS, LATER, LATER_ROWS),
}

# The columns of the base tables.
SPACE_COLUMNS = ["id", "tenant_id", "slug", "name", "description", "created_at", "updated_at"]
SOURCE_COLUMNS = [
    *("id", "knowledge_space_id", "type", "status", "name", "uri", "metadata", "permission_scope", "version"),
    *("created_at", "updated_at"),
]

# Patience of the tests, for what happens at once on a machine that is not busy.
DEADLINE = 60.0  # seconds

OWN_TABLES = [
    f"kfs_credentials_{name}"
    for name in (
        *("secret_object", "acknowledgement", "round", "binding", "pause", "closed_key", "event", "tick", "refusal"),
        "checkpoint",
    )
]

MIGRATIONS = [
    *("0001_base", "0002_source_indexes", "0003_ledger", "0004_own_tables", "0005_register_refs", "0006_erasure"),
    "0007_operations",
]


class Host:
    """One database, which Django knows by `alias` as long as it lives."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    @property
    def connection(self) -> BaseDatabaseWrapper:
        """This thread's connection."""
        return connections[self.alias]

    @property
    def name(self) -> str:
        """The name that the server knows the database by."""
        return str(self.connection.settings_dict["NAME"])

    def run(self, *scripts: str) -> None:
        """Run each script in a transaction of its own."""
        with self.connection.cursor() as cursor:
            for script in scripts:
                cursor.execute(script)

    def rows(self, query: str, parameters: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        with self.connection.cursor() as cursor:
            cursor.execute(query, parameters)
            return list(cursor.fetchall())

    def value(self, query: str, parameters: Sequence[Any] | None = None) -> Any:
        """Return the one value that a query finds."""
        ((value,),) = self.rows(query, parameters)
        return value

    def dump(self, table: str, columns: Sequence[str] | None = None) -> list[tuple[str, ...]]:
        """Return the rows of a table as PostgreSQL writes them, with the place and transaction of each.

        Two equal dumps mean that no row was changed in between, nor written anew as it was.
        `columns`: only these.
        """
        row = f"ROW({', '.join(columns)})" if columns else "dumped"
        return self.rows(f"SELECT ctid::text, xmin::text, {row}::text FROM {table} AS dumped ORDER BY id")

    def migrate(self, target: str | None = None, **options: Any) -> None:
        """Run `migrate kfs_credentials` on this database, silently."""
        arguments = ["kfs_credentials"] if target is None else ["kfs_credentials", target]
        call_command("migrate", *arguments, database=self.alias, verbosity=0, **options)

    def recorded(self) -> list[str]:
        """Return which of our migrations are recorded as applied."""
        applied = MigrationRecorder(self.connection).applied_migrations()
        return sorted(name for app, name in applied if app == "kfs_credentials")

    @contextmanager
    def session(self) -> Iterator[CursorWrapper]:
        """Give a session of somebody else's, in a transaction that ends with the block."""
        connection = connections.create_connection(self.alias)
        try:
            connection.set_autocommit(False)
            with connection.cursor() as cursor:
                yield cursor
            connection.commit()
        finally:
            connection.close()


@contextmanager
def throw_away(alias: str, *, template: str | None = None, **database: Any) -> Iterator[Host]:
    """Make a database on the tests' server, and drop it at the end.

    `template`: the name of the database to copy; nobody may be connected to it. `database`: more of its DATABASES.
    """
    name = f"kfs_host_{os.getpid()}_{secrets.token_hex(4)}"
    connections.databases[alias] = copy.deepcopy(connections.databases["default"]) | {"NAME": name} | database
    try:
        with connections[alias]._nodb_cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name} {f'TEMPLATE {template}' if template else ''}")
            # Where we are broken and wait for a lock for ever, a test fails.
            cursor.execute(f"ALTER DATABASE {name} SET statement_timeout = '{DEADLINE:.0f}s'")
        try:
            yield Host(alias)
        finally:
            connections[alias].close()
            with connections[alias]._nodb_cursor() as cursor:
                cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        del connections[alias]
        del connections.databases[alias]


@contextmanager
def second_alias(host: Host, alias: str, **database: Any) -> Iterator[Host]:
    """Let Django know a host's database by another alias too, with another DATABASES entry."""
    connections.databases[alias] = copy.deepcopy(connections.databases[host.alias]) | database
    try:
        yield Host(alias)
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.databases[alias]


def server(host: Host) -> dict[str, Any]:
    """Return the host's entry of DATABASES, as far as another process needs it."""
    return {key: host.connection.settings_dict[key] for key in ("ENGINE", "NAME", "HOST", "PORT", "USER", "PASSWORD")}


def manage(
    *arguments: str, directory: Path, settings: Mapping[str, Any], python: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a management command of a host project in a process of its own.

    Its secrets are in `directory`; `settings` go on top of the tests'; `python`: options of the interpreter.
    """
    return subprocess.run(
        [sys.executable, *python, "-m", "django", *arguments],
        cwd=TESTS.parent,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.migrations.host_project.settings",
            "KFS_HOST_SECRETS": str(directory),
            "KFS_HOST_PROJECT": json.dumps(dict(settings)),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )


# What rows hold, and no message may.
VALUES = [
    "source-secret:v1:.",
    "tenant-[a-z]",
    "[0-9a-f]{8}-[0-9a-f]{4}",
    "made-up",
    "access_token",
    "operation-",
]


def refusal(host: Host, target: str | None = None) -> tuple[str, str]:
    """Expect that `migrate` refuses; return PostgreSQL's message and hint."""
    with pytest.raises(DatabaseError) as caught:
        host.migrate(target)
    error = caught.value.__cause__
    assert isinstance(error, psycopg.errors.RaiseException)
    # What an operator reads has both, and nothing of a row.
    shown = str(caught.value)
    assert error.diag.message_primary is not None
    assert error.diag.message_hint is not None
    assert error.diag.message_primary in shown
    assert error.diag.message_hint in shown
    for value in VALUES:
        assert not re.search(value, shown)
    return error.diag.message_primary, error.diag.message_hint

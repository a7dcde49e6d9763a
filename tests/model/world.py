"""The database and the store of one run, and how they are looked at from outside."""

from __future__ import annotations

import json
import random
import shutil
import uuid
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from django.db import connections

from kfs_credentials import services
from kfs_credentials.conf import settings
from kfs_credentials.crypto import Credentials, Scope, object_name
from kfs_credentials.errors import NoCredentials, SecretNotFound, SourceNotFound
from kfs_credentials.stores import secret_stores
from kfs_credentials.stores.encrypted import PROBE_NAME, EncryptedStore
from tests.bound import bind_at_once
from tests.flush import EMPTY
from tests.keys import NEW, OLD
from tests.model.faults import FAULTS, Fault

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ALIAS = "model"
"""The alias of the database whose connection has faults. What looks at it from outside is `default`."""
TENANT = "tenant-a"
SPACES = [uuid.UUID(int=0xA00 + number) for number in range(2)]
SOURCES = [uuid.UUID(int=0x500 + number) for number in range(4)]

NONE, GONE, UNREADABLE = "(no credentials)", "(no source)", "(unreadable)"
"""What an application sees besides a value."""

TABLES = (
    *("sources", "knowledge_spaces", "source_credential_backfills", "source_secret_lifecycle_refs"),
    *("kfs_credentials_secret_object", "kfs_credentials_event", "kfs_credentials_round", "kfs_credentials_pause"),
    *("kfs_credentials_closed_key", "kfs_credentials_binding", "kfs_credentials_acknowledgement", "kfs_tests_history"),
)

LOOK_AT_SOURCES = """
SELECT id, knowledge_space_id, credential_ref, jsonb_typeof(metadata -> 'credentials'),
  CASE jsonb_typeof(metadata -> 'credentials')
    WHEN 'object' THEN metadata -> 'credentials' ->> 'token' ELSE metadata ->> 'credentials' END,
  (metadata ->> 'other')::int, status = 'deleting'
FROM sources
"""
LOOK_AT_REFS = """
SELECT ledger.credential_ref, ledger.id, ledger.source_id, ledger.knowledge_space_id, ledger.state,
  COALESCE(ledger.next_delete_at <= now(), FALSE), ledger.next_delete_at IS NULL,
  ledger.recover_after <= now(), ledger.worker_id, ledger.lease_token,
  COALESCE(ledger.lease_expires_at <= now(), FALSE),
  ledger.row_version, object.first_claimed_at IS NOT NULL OR ledger.delete_attempts > 0, object.attention,
  object.abandoned_at IS NOT NULL, COALESCE(object.first_erased_at <= now() - interval '900 seconds', FALSE)
FROM source_secret_lifecycle_refs ledger
LEFT JOIN kfs_credentials_secret_object object USING (credential_ref)
"""
LOOK_AT_JOBS = """
SELECT id, source_id, run_state, candidate_credential_ref, worker_id, lease_token,
  COALESCE(lease_expires_at <= now(), FALSE), row_version
FROM source_credential_backfills
"""
# By its id: rows that are skipped by OFFSET would be locked, too.
LOCK = {
    f"held {what}": f"SELECT FROM {table} "
    f"WHERE id = (SELECT id FROM {table} ORDER BY {order} OFFSET %s LIMIT 1) FOR UPDATE"
    for what, table, order in (
        ("source", "sources", "id"),
        ("ref", "source_secret_lifecycle_refs", "created_at, id"),
        ("job", "source_credential_backfills", "created_at, id"),
    )
}


@dataclass(frozen=True)
class Row:
    """A source: what its row says, as far as it matters here."""

    space: uuid.UUID
    ref: str | None = None
    shape: str | None = None
    """Of the credentials in clear, in the words of `jsonb_typeof`."""
    clear: str | None = None
    other: int = 0
    """What else there is in the metadata."""
    leaving: bool = False


class Ref(NamedTuple):
    """A row of the ledger, with what our own table has besides."""

    id: uuid.UUID
    source: uuid.UUID
    space: uuid.UUID
    state: str
    due: bool
    undated: bool
    unused: bool
    """The time for the reservation is over."""
    worker: str | None
    token: uuid.UUID | None
    expired: bool
    version: int
    claimed: bool
    """For erasure, at any time."""
    attention: str | None
    abandoned: bool
    horizon_over: bool
    """Since the first erasure."""


class Job(NamedTuple):
    """A job of the backfill."""

    source: uuid.UUID
    state: str
    candidate: str
    worker: str | None
    token: uuid.UUID | None
    expired: bool
    version: int


class Seen(NamedTuple):
    """The database at one moment."""

    rows: dict[uuid.UUID, Row]
    refs: dict[str, Ref]
    jobs: dict[uuid.UUID, Job]

    @property
    def named(self) -> set[str]:
        """The refs that sources name."""
        return {row.ref for row in self.rows.values() if row.ref is not None}


class World:
    """One database, one store and one directory, used for one example after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.random = random.Random()
        self.holder: psycopg.Connection[Any] | None = None

    def reset(self) -> None:
        """Empty everything, and bind the database to the empty store."""
        FAULTS.dead, FAULTS.fault = False, None
        FAULTS.late.clear()
        self.random.seed(0)
        self.reconnect()
        self.empty()
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(mode=0o700)
        bind_at_once("default", self.store)

    def empty(self) -> None:
        """Delete all rows."""
        names = ", ".join(f"'{table}'" for table in TABLES)
        self.execute(EMPTY.format(tables=names))

    def new_uuid(self) -> uuid.UUID:
        """Return the next id: the same ones in each example, since rows are gone through in the order of their ids."""
        return uuid.UUID(int=self.random.getrandbits(128), version=4)

    @property
    def store(self) -> EncryptedStore:
        """The store."""
        made = secret_stores["default"]
        assert isinstance(made, EncryptedStore)
        return made

    def patrolled_at(self) -> Any:
        """Return when the last patrol came to its end."""
        return self.rows("SELECT completed_at FROM kfs_credentials_round WHERE name = 'patrol:default'")

    def reconnect(self) -> None:
        """Let the next process have a new connection."""
        for connection in connections.all(initialized_only=True):
            if connection.alias == ALIAS:
                connection.close()
                del connections[ALIAS]

    # Past the package.

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        with connections["default"].cursor() as cursor:
            cursor.execute(query, parameters or None)
            return list(cursor.fetchall())

    def execute(self, statement: str, *parameters: Any) -> int:
        """Do something as somebody else would, committed at once; return the number of rows."""
        with connections["default"].cursor() as cursor:
            cursor.execute(statement, parameters or None)
            return int(cursor.rowcount)

    def look(self) -> Seen:
        """Return what is in the database."""
        return Seen(
            {source: Row(*row) for source, *row in self.rows(LOOK_AT_SOURCES)},
            {ref: Ref(*row) for ref, *row in self.rows(LOOK_AT_REFS)},
            {job: Job(*row) for job, *row in self.rows(LOOK_AT_JOBS)},
        )

    def visible(self, source: uuid.UUID) -> str:
        """Return what an application sees of a source: a value, or why there is none."""
        try:
            return of_credentials(services.resolve_credentials(tenant=TENANT, source_id=source, using=ALIAS))
        except SourceNotFound:
            return GONE
        except NoCredentials:
            return NONE
        except SecretNotFound:
            return UNREADABLE

    def read(self, ref: str, row: Ref) -> str:
        """Return the value that the store has under a ref; UNREADABLE if it has none."""
        try:
            return of_credentials(self.store.get(Scope(TENANT, row.space, row.source), ref))
        except SecretNotFound:
            return UNREADABLE

    def blob(self, ref: str) -> bytes:
        """Return the bytes of the object under a ref."""
        return (self.directory / self.name(ref)).read_bytes()

    def has(self, ref: str) -> bool:
        """Whether there is an object under a ref."""
        return (self.directory / self.name(ref)).exists()

    def name(self, ref: str) -> str:
        """Return the name of the object under a ref."""
        return object_name(ref, prefix=self.store.prefix)

    def probe(self) -> bytes:
        """Return the bytes of the probe."""
        return (self.directory / (self.store.prefix + PROBE_NAME)).read_bytes()

    # Who has a row locked, and which keys somebody has.

    @contextmanager
    def held(self, fault: Fault | None) -> Iterator[None]:
        """Let somebody have a row locked in this block, if that is what goes wrong."""
        if fault is None or fault.how not in LOCK:
            yield
            return
        session = self._session()
        session.execute("BEGIN")
        FAULTS.spent = session.execute(LOCK[fault.how], [fault.at]).fetchone() is not None
        try:
            yield
        finally:
            session.rollback()

    def _session(self) -> psycopg.Connection[Any]:
        if self.holder is None:
            parameters = connections["default"].get_connection_params()
            names = ("host", "port", "user", "password", "dbname")
            self.holder = psycopg.connect(**{name: parameters[name] for name in names if name in parameters})
        return self.holder

    def close(self) -> None:
        """Leave nothing behind."""
        self.reconnect()
        self.empty()
        if self.holder is not None:
            self.holder.close()

    # Time.

    def expire_leases(self, worker: str | None = None) -> None:
        """Let the leases of one worker run out, or all."""
        for table in ("source_credential_backfills", "source_secret_lifecycle_refs"):
            self.execute(
                f"UPDATE {table} SET lease_expires_at = now() - interval '1 second' WHERE lease_expires_at IS NOT NULL "
                "AND (%s::text IS NULL OR split_part(worker_id, '#', 1) = %s)",
                worker,
                worker,
            )
        for table in ("kfs_credentials_round", "kfs_credentials_binding"):
            self.execute(
                f"UPDATE {table} SET lease_expires_at = now() - interval '1 second' WHERE lease_expires_at IS NOT NULL "
                "AND (%s::text IS NULL OR split_part(worker_id, '#', 1) = %s)",
                worker,
                worker,
            )

    def expire_reservations(self) -> None:
        """Let the time for all reservations be over."""
        self.execute(
            "UPDATE source_secret_lifecycle_refs SET recover_after = now() - interval '1 second' "
            "WHERE state IN ('staged', 'candidate')"
        )

    def pass_grace(self, source: uuid.UUID | None = None) -> None:
        """Let everything that is to be erased, or erased again, be due; of one source, or all."""
        self.execute(
            "UPDATE source_secret_lifecycle_refs SET next_delete_at = now() - interval '1 second' "
            "WHERE next_delete_at IS NOT NULL AND (%s::uuid IS NULL OR source_id = %s)",
            source,
            source,
        )

    def pass_horizon(self) -> None:
        """Let the horizon of all erasures be over."""
        self.execute(
            "UPDATE kfs_credentials_secret_object SET first_erased_at = now() - interval '1 day' "
            "WHERE first_erased_at IS NOT NULL"
        )
        self.pass_grace()

    def pass_retention(self) -> None:
        """Let all final rows be old enough to be forgotten, and what a patrol has passed be as long ago."""
        self.execute(
            "UPDATE source_secret_lifecycle_refs SET updated_at = updated_at - interval '91 days' "
            "WHERE state = 'deleted' AND next_delete_at IS NULL"
        )
        self.execute(
            "UPDATE kfs_credentials_round SET started_at = started_at - interval '91 days', "
            "covers_until = covers_until - interval '91 days'"
        )


def of_credentials(credentials: Credentials | Mapping[str, Any]) -> str:
    """Return the value that these credentials are."""
    (value,) = credentials.values()
    return str(value)


def metadata_of(row: Row) -> str:
    """Return the metadata of a source, as JSON."""
    value: Any = {"token": row.clear} if row.shape == "object" else row.clear
    return json.dumps({"other": row.other} | ({"credentials": value} if row.shape else {}))


@contextmanager
def ring(new_first: bool) -> Iterator[None]:
    """Be a process that has both keys, in this order."""
    with settings.overridden({"KEYS": [NEW, OLD] if new_first else [OLD, NEW]}):
        yield


def shown(values: Sequence[Any]) -> str:
    """Return a text for a message."""
    return ", ".join(map(str, values))

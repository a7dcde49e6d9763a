"""An old application: it writes rows as it has them in mind, by SQL, and has read some of them long ago.

It knows nothing of the services, and touches no space that another application has to itself at that moment.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from uuid import uuid4

from django.db import OperationalError, transaction

from tests.crashes.application import answer
from tests.crashes.database import ALIAS, Database
from tests.torture.applications import TRY_AGAIN
from tests.torture.memory import REVOKED, TENANT, UNREADABLE, Known, Memory, Value, new_value

PATIENCE = "100ms"
"""How long it waits for a row that a worker holds. The worker may be frozen: then it is left alone."""

MAKE_SPACE = """
INSERT INTO knowledge_spaces (id, tenant_id, slug, name, created_at, updated_at)
VALUES (%s, %s, %s, 'Made up', now(), now())
"""
MAKE = """
INSERT INTO sources (
  id, knowledge_space_id, type, status, name, uri, metadata, permission_scope, version, created_at, updated_at
)
VALUES (%s, %s, 'online_drive', 'active', 'Made up', '', %s, '[]', 1, now(), now())
"""
NOT_CLAIMED = """
SELECT FROM source_secret_lifecycle_refs ledger
JOIN kfs_credentials_secret_object object ON object.credential_ref = ledger.credential_ref
WHERE ledger.credential_ref = %s AND ledger.state IN ('retired', 'active')
  AND ledger.delete_attempts = 0 AND object.first_claimed_at IS NULL
"""
IN_USE = "SELECT FROM source_secret_lifecycle_refs WHERE credential_ref = %s AND state = 'active'"
AT_WORK = "SELECT source_id::text FROM source_credential_backfills WHERE run_state = 'running'"
"""Where a backfill has read the credentials, and has not removed them yet: a write is most dangerous then."""
LOOKS = 0.4
"""How often it looks before it writes."""
MOST_READ = 200
"""How many rows it has in mind at most."""


class Row(NamedTuple):
    """A row as it was read, and what an application was to be answered then."""

    metadata: dict[str, Any]
    ref: str | None
    may_be: set[Value]


class OldApplication:
    """`acts`: how much it has written."""

    def __init__(self, database: Database, memory: Memory) -> None:
        self.database = database
        self.memory = memory
        self.read: dict[str, Row] = {}
        self.acts = 0
        self._brought_back: tuple[str, str] | None = None

    def add_space(self, sources: int, *, shared: bool = False) -> str:
        """Make a space, with so many sources in clear; return its id."""
        space = str(uuid4())
        self.database.execute(MAKE_SPACE, [space, TENANT, f"made-up-{space}"])
        self.memory.add_space(space, shared=shared)
        for _ in range(sources):
            source = str(uuid4())
            self.memory.add(source, space, self._make(source, space))
        return space

    def act(self) -> None:
        """Do one thing, if nobody holds the row."""
        source = self._any()
        if source is None:
            return
        acts = [self.look, self.change, self.rename, self.save_metadata, self.save_row, self.delete, self.make_anew]
        act = random.choices([*acts, self.take_away, self.delete_space], [30, 25, 10, 10, 12, 4, 6, 2, 0.5])[0]
        self._brought_back = None
        if random.random() < LOOKS:
            self._see(source)
        with self.briefly():
            act(source)
            self.acts += 1
        self._look_at_what_was_brought_back()

    # What it does; each with the row's lock, in a transaction.

    def _see(self, source: str) -> None:
        """Ask what an application gets, before the next write hides what has come of the last one."""
        answered = answer("resolve_credentials", {"tenant": TENANT, "source_id": source, "using": ALIAS})
        if answered.get("error") not in TRY_AGAIN:
            self.memory.saw(source, answered.get("error") or answered["credentials"]["token"])

    def look(self, source: str) -> None:
        """Keep a row in mind."""
        known = self.memory.sources[source]
        metadata, ref = self._lock(source)
        if len(self.read) >= MOST_READ:
            del self.read[random.choice(list(self.read))]
        self.read[source] = Row(metadata, ref, set(known.may_be))

    def change(self, source: str) -> None:
        """Write new credentials in clear."""
        metadata, ref = self._lock(source)
        self._write(source, {**metadata, "credentials": {"token": new_value()}}, ref, before=ref)

    def rename(self, source: str) -> None:
        """Change something else."""
        metadata, ref = self._lock(source)
        self._write(source, {**metadata, "title": random.random()}, ref, before=ref)

    def take_away(self, source: str) -> None:
        """Remove what lies in clear, and the ref."""
        metadata, ref = self._lock(source)
        metadata.pop("credentials", None)
        self._write(source, metadata, None, before=ref)

    def save_metadata(self, source: str) -> None:
        """Save metadata as it was read: what has been moved since is back in clear."""
        if source in self.read:
            _, ref = self._lock(source)
            self._write(source, {**self.read[source].metadata, "title": random.random()}, ref, before=ref)

    def save_row(self, source: str) -> None:
        """Save a whole row as it was read, as an ORM does: the ref of then is back, or none."""
        if source in self.read:
            _, ref = self._lock(source)
            self._write(source, self.read[source].metadata, self.read[source].ref, before=ref)

    def delete(self, source: str) -> None:
        """Delete a source."""
        self.database.execute("DELETE FROM sources WHERE id = %s", [source])
        self.memory.forget(source)

    def make_anew(self, source: str) -> None:
        """Delete a source, and make another one under its id."""
        space = self.memory.sources[source].space
        self.database.execute("DELETE FROM sources WHERE id = %s", [source])
        value = self._make(source, space)  # may meet with a lock: then nothing has taken place
        self.memory.forget(source)
        self.memory.add(source, space, value)

    def delete_space(self, source: str) -> None:
        """Delete a space with all that is in it."""
        space = self.memory.sources[source].space
        if space not in self.memory.shared:
            self.database.execute("DELETE FROM knowledge_spaces WHERE id = %s", [space])
            self.memory.forget_space(space)

    def _any(self) -> str | None:
        spaces = self.memory.free | self.memory.shared
        free = [source for space in spaces for source in self.memory.spaces[space]]
        if random.random() < 0.3:
            at_work = {source for (source,) in self.database.rows(AT_WORK)}.intersection(free)
        else:
            at_work = set()
        known = [source for source in self.read if source in free] if random.random() < 0.4 else []
        some = sorted(at_work) or known or free
        return random.choice(some) if some else None

    @contextmanager
    def briefly(self) -> Iterator[None]:
        """Do what is in the block in a transaction, or nothing of it where somebody holds a row."""
        with suppress(OperationalError), transaction.atomic(using=ALIAS):
            self.database.execute(f"SET LOCAL lock_timeout = '{PATIENCE}'")
            yield

    def _lock(self, source: str) -> tuple[dict[str, Any], str | None]:
        found = self.database.rows(
            "SELECT metadata::text, credential_ref FROM sources WHERE id = %s FOR UPDATE", [source]
        )
        if not found:
            self.memory.vanished(source)
            raise OperationalError("nothing is left to act on")
        ((metadata, ref),) = found
        return json.loads(metadata), ref

    def _write(self, source: str, metadata: dict[str, Any], ref: str | None, *, before: str | None) -> None:
        self.database.execute(
            "UPDATE sources SET metadata = %s, credential_ref = %s, version = version + 1 WHERE id = %s",
            [json.dumps(metadata), ref, source],
        )
        known = self.memory.sources[source]
        if ref is None:
            in_clear = metadata.get("credentials")
            known.becomes(in_clear["token"] if in_clear else REVOKED)
        elif ref != before:
            self._bring_back(known, self.read[source], displacing=before)
            self._brought_back = source, ref

    def _bring_back(self, known: Known, row: Row, *, displacing: str | None) -> None:
        """Note that an older ref is back, whose object may be gone by now; the one in its place must be kept.

        Unless that one was brought back itself, and nobody has noticed yet: then it is the one before that is kept.
        """
        displaced, kept = known.may_be, known.must_keep
        known.becomes(*row.may_be, UNREADABLE)
        if known.shared:
            return
        if displacing is not None and not self.database.rows(IN_USE, [displacing]):
            known.must_keep = kept if kept not in row.may_be else None
        elif displacing is not None and len(displaced) == 1:
            (known.must_keep,) = displaced

    def _look_at_what_was_brought_back(self) -> None:
        """Note if it must be readable: its erasure was not begun when this was committed, and now it never may be."""
        if self._brought_back is not None:
            source, ref = self._brought_back
            if not self.memory.sources[source].shared and self.database.rows(NOT_CLAIMED, [ref]):
                self.memory.sources[source].may_be.discard(UNREADABLE)
        self._brought_back = None

    def _make(self, source: str, space: str) -> Value:
        value = new_value()
        self.database.execute(MAKE, [source, space, json.dumps({"title": 0, "credentials": {"token": value}})])
        return value

"""The rules of applications: new ones, which call the services, and old ones, which know nothing of them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any

from kfs_credentials import services
from kfs_credentials.errors import (
    BeingDeleted,
    KeyClosed,
    OperationOver,
    SourceExists,
    SourceNotFound,
    SpaceNotFound,
    VersionConflict,
)
from kfs_credentials.ledger import Operation
from kfs_credentials.models import Purpose
from tests.model.base import Base, Errors, Outcome, pick
from tests.model.faults import Fault
from tests.model.world import ALIAS, SOURCES, SPACES, TENANT, Row, metadata_of

INSERT = """
INSERT INTO sources (
  id, knowledge_space_id, type, status, name, uri, metadata, permission_scope, version, created_at, updated_at,
  credential_ref
) VALUES (%s, %s, 'web', 'active', 'n', 'u', %s, '{}', 1, now(), now(), %s)
"""
UPDATE = "UPDATE sources SET metadata = %s, credential_ref = %s, version = version + 1 WHERE id = %s"


@dataclass(frozen=True)
class Unanswered:
    """A rotation whose caller does not know what became of it, and may repeat it."""

    source: uuid.UUID
    space: uuid.UUID
    operation: str
    value: str


class Applications(Base):
    """Those who have the credentials."""

    def __init__(self) -> None:
        super().__init__()
        self.unanswered: list[Unanswered] = []
        self.copies: list[tuple[uuid.UUID, Row]] = []

    # By the services.

    def call(
        self, function: str, *, fault: Fault | None, new_first: bool, must: Errors, may: Errors = (), **arguments: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return what `step` needs for a call of a service."""
        service = getattr(services, function)
        options = {"fault": fault, "new_first": new_first, "must": must, "may": may}
        return lambda: service(tenant=TENANT, using=ALIAS, **arguments), options

    def create(self, source: int, space: int, has_value: bool, new_first: bool, fault: Fault | None) -> None:
        """Create a source, with credentials or without."""
        source_id, space_id, value = SOURCES[source], SPACES[space], self.new_value()
        must: Errors = ()
        if space_id not in self.book.spaces:
            must += (SpaceNotFound,)
        if source_id in self.book.rows:
            must += (SourceExists,)
        if has_value and self.is_closed(new_first):
            must += (KeyClosed,)
        arguments: dict[str, Any] = {"source_id": source_id, "space_id": space_id, "metadata": {"other": 0}}
        if has_value:
            arguments["credentials"] = {"token": value}
        arguments |= {"type": "web", "name": "n", "uri": "u"}
        work, options = self.call("create_source", fault=fault, new_first=new_first, must=must, **arguments)

        def then(outcome: Outcome) -> None:
            if outcome.done or (outcome.killed and not must and source_id in self.seen.rows):
                row = self.seen.rows[source_id]
                assert (row.ref is not None) == has_value
                self.book.point(source_id, Row(space_id, row.ref), value, self.seen)

        self.step(work, then=then, **options)

    def rotate(self, source: int, right: bool | None, new_first: bool, fault: Fault | None) -> None:
        """Give a source new credentials, whatever version it has, or only if it has that one."""
        source_id, value = SOURCES[source], self.new_value()
        row = self.book.rows.get(source_id)
        must = self._refused(source_id, right)
        if self.is_closed(new_first):
            must += (KeyClosed,)
        operation = self.new_name("rotation")
        self._rotate(
            Unanswered(source_id, row.space if row else SPACES[0], operation, value),
            fault=fault,
            new_first=new_first,
            must=must,
            expected_version=self._version(source_id, right),
        )

    def rotate_again(self, number: int, new_first: bool, fault: Fault | None) -> None:
        """Repeat a rotation that was not answered."""
        call = pick(self.unanswered, number)
        before = [
            ref
            for ref in self.seen.refs.values()
            if ref.id == Operation(Purpose.ROTATE, TENANT, call.space, call.source, call.operation).row_id
        ]
        state = before[0].state if before else None
        row = self.book.rows.get(call.source)
        elsewhere = state is not None and row is not None and row.space != call.space
        is_over = elsewhere or state not in (None, "staged", "active")
        if row is None:
            must: Errors = (SourceNotFound,)
        elif state == "active" and not is_over:
            must = ()
        else:
            must = self._refused(call.source, None)
            if is_over:
                must += (OperationOver,)
            if self.is_closed(new_first):
                must += (KeyClosed,)
        # A key may be closed, and this process may have another one.
        self._rotate(call, fault=fault, new_first=new_first, must=must, is_done=state == "active")

    def _rotate(self, call: Unanswered, *, is_done: bool = False, **options: Any) -> None:
        work, options = self.call(
            "rotate_credentials",
            source_id=call.source,
            credentials={"token": call.value},
            operation_id=call.operation,
            **options,
        )

        def then(outcome: Outcome) -> None:
            if call in self.unanswered:
                self.unanswered.remove(call)
            if is_done:
                return
            if not outcome.done:
                self.unanswered.append(call)
            row = self.book.rows.get(call.source)
            now = self.seen.rows.get(call.source)
            if outcome.done or (outcome.killed and row is not None and now is not None and now.ref != row.ref):
                assert row is not None
                assert now is not None
                assert now.ref is not None
                assert now.ref == row.ref or now.ref not in self.book.value_of, "an old ref is in use again"
                pointed = replace(row, ref=now.ref, shape=None, clear=None)
                self.book.point(call.source, pointed, call.value, self.seen)
                self.keep_a_copy(call.source, row)  # an old writer may have read it right before

        self.step(work, then=then, **options)

    def _refused(self, source: uuid.UUID, right: bool | None) -> Errors:
        row = self.book.rows.get(source)
        if row is None:
            return (SourceNotFound,)
        refusals: Errors = (BeingDeleted,) if row.leaving else ()
        return (*refusals, VersionConflict) if right is False else refusals

    def _version(self, source: uuid.UUID, right: bool | None) -> int | None:
        if right is None:
            return None
        found = self.world.rows("SELECT version FROM sources WHERE id = %s", source)
        return int(found[0][0] if found else 1) + (0 if right else 7)

    def revoke(self, source: int, right: bool | None, fault: Fault | None) -> None:
        """Take the credentials of a source away."""
        source_id = SOURCES[source]
        row = self.book.rows.get(source_id)
        must: Errors = self._refused(source_id, right)
        may: Errors = ()
        if VersionConflict in must and row is not None and row.ref is None and row.shape is None:
            must, may = (BeingDeleted,) if row.leaving else (), (VersionConflict,)  # nothing to take away, most likely
        work, options = self.call(
            "revoke_credentials",
            fault=fault,
            new_first=True,
            must=must,
            may=may,
            source_id=source_id,
            expected_version=self._version(source_id, right),
        )

        def then(outcome: Outcome) -> None:
            bare = None if row is None else replace(row, ref=None, shape=None, clear=None)
            if bare is not None and (outcome.done or (outcome.killed and self.seen.rows.get(source_id) == bare)):
                self.book.point(source_id, bare, None, self.seen)
                own = [ref for ref in self.seen.refs.values() if (ref.source, ref.space) == (source_id, bare.space)]
                assert outcome.faulty or not any(ref.attention == "displaced" for ref in own), "it is not let go"

        self.step(work, then=then, **options)

    def delete(self, source: int, right: bool | None, fault: Fault | None) -> None:
        """Delete a source."""
        source_id = SOURCES[source]
        work, options = self.call(
            "delete_source",
            fault=fault,
            new_first=True,
            must=self._refused(source_id, right),
            source_id=source_id,
            expected_version=self._version(source_id, right),
        )

        def then(outcome: Outcome) -> None:
            if outcome.done or (outcome.killed and source_id not in self.seen.rows and source_id in self.book.rows):
                self.book.delete(source_id)

        self.step(work, then=then, **options)

    def delete_space(self, space: int, fault: Fault | None) -> None:
        """Delete a space with all that is in it."""
        space_id = SPACES[space]
        must: Errors = () if space_id in self.book.spaces else (SpaceNotFound,)
        work, options = self.call("delete_knowledge_space", fault=fault, new_first=True, must=must, space_id=space_id)
        named = {row.ref for row in self.book.rows.values() if row.space == space_id}

        def then(outcome: Outcome) -> None:
            gone = not self.world.rows("SELECT FROM knowledge_spaces WHERE id = %s", space_id)
            assert gone or not outcome.done
            if gone and space_id in self.book.spaces:
                self.book.spaces.discard(space_id)
                for source in [source for source, row in self.book.rows.items() if row.space == space_id]:
                    self.book.forsake(source, self.seen)
                    self.book.delete(source)
                if fault is not None and fault.how.startswith("held"):
                    # What somebody had locked is the sweep's.
                    self.book.left |= {ref: self.book.moment for ref in named if ref is not None}

        self.step(work, then=then, **options)

    # By an old application.

    def save(self, source: uuid.UUID, row: Row) -> None:
        """Write a whole row, as it is to be."""
        if source in self.book.rows:
            self.world.execute(UPDATE, metadata_of(row), row.ref, source)
            row = replace(row, space=self.book.rows[source].space, leaving=self.book.rows[source].leaving)
        else:
            self.world.execute(INSERT, source, row.space, metadata_of(row), row.ref)
            row = replace(row, leaving=False)
        self.book.write(source, row, self.seen)

    def add_old(self, source: int, space: int, shape: str | None) -> None:
        """Add a source with credentials in clear, with some that are not supported, or with none."""
        if SOURCES[source] in self.book.rows:
            return
        with self.past():
            self.save(SOURCES[source], self._in_clear(Row(self.need_space(space)), shape))

    def need_space(self, space: int) -> uuid.UUID:
        """Return the id of a space, which is made if it is not there."""
        space_id = SPACES[space]
        if space_id not in self.book.spaces:
            self.world.execute(
                "INSERT INTO knowledge_spaces (id, tenant_id, slug, name, created_at, updated_at) "
                "VALUES (%s, %s, %s, 'Made up', now(), now())",
                *(space_id, TENANT, str(space_id)),
            )
            self.book.spaces.add(space_id)
        return space_id

    def _in_clear(self, row: Row, shape: str | None) -> Row:
        return replace(row, shape=shape, clear=self.new_value() if shape else None)

    def write_in_clear(self, source_id: uuid.UUID, shape: str | None) -> None:
        """Write other credentials into the metadata, beside a ref or not."""
        with self.past():
            row = self._in_clear(self.book.rows[source_id], shape)
            self.world.execute("UPDATE sources SET metadata = %s WHERE id = %s", metadata_of(row), source_id)
            self.book.write(source_id, row, self.seen)

    def write_back(self, source_id: uuid.UUID) -> None:
        """Write into the metadata what the source's ref resolves to."""
        row = self.book.rows[source_id]
        if row.ref is None:
            return
        with self.past():
            row = replace(row, shape="object", clear=self.book.value_of[row.ref])
            self.world.execute("UPDATE sources SET metadata = %s WHERE id = %s", metadata_of(row), source_id)
            self.book.write(source_id, row, self.seen)

    def read_a_row(self, source_id: uuid.UUID) -> None:
        """Read a whole row, to save it later."""
        self.keep_a_copy(source_id, self.book.rows[source_id])

    def keep_a_copy(self, source: uuid.UUID, row: Row) -> None:
        """Have a row in memory, as it is now."""
        self.copies = [(source, row), *self.copies[:5]]

    def save_a_row(self, number: int, with_ref: bool, of: uuid.UUID | None = None) -> None:
        """Save a row as it was read, with its ref or without; one that was deleted since is made anew."""
        mine = [copy for copy in self.copies if of in (None, copy[0])] or self.copies
        old = [copy for copy in mine if copy[0] in self.book.rows and copy[1] != self.book.rows[copy[0]]]
        source, copy = pick(old if old and number % 4 else mine, number)
        now = self.book.rows.get(source)
        with self.past():
            if now is None:
                self.need_space(SPACES.index(copy.space))
            # A ref that belongs to another space is another's: nobody reads that with a source's own scope.
            ref = copy.ref if now is None or (with_ref and now.space == copy.space) else now.ref
            self.save(source, replace(copy, ref=ref, other=copy.other + 1))

    def some(self, number: int) -> uuid.UUID:
        """Return a source; rather one that a worker is at work on."""
        hot = sorted({job.source for job in self.seen.jobs.values() if job.state == "running"} & self.book.rows.keys())
        return pick(hot if hot and number % 3 else self.sources(there=True), number)

    def reserved(self) -> list[tuple[uuid.UUID, str]]:
        """Return the sources that could name a reserved ref of their own, whose object is there, with that ref."""
        return sorted(
            (row.source, ref)
            for ref, row in self.seen.refs.items()
            if row.state in ("staged", "candidate")
            and row.source in self.book.rows
            and row.space == self.book.rows[row.source].space
            and self.book.rows[row.source].ref != ref
            and self.world.has(ref)
        )

    def name_a_reservation(self, number: int, clears: bool) -> None:
        """Let a source name what is reserved for it, as a service does that does not move the ledger with it."""
        source, ref = pick(self.reserved(), number)
        row = replace(self.book.rows[source], ref=ref)
        row = replace(row, shape=None, clear=None) if clears else row
        with self.past():
            self.book.value_of[ref] = self.world.read(ref, self.seen.refs[ref])
            self.save(source, row)

    def name_none(self, source_id: uuid.UUID) -> None:
        """Set a source's ref to NULL."""
        with self.past():
            self.world.execute("UPDATE sources SET credential_ref = NULL WHERE id = %s", source_id)
            self.book.write(source_id, replace(self.book.rows[source_id], ref=None), self.seen)

    def drop(self, source_id: uuid.UUID) -> None:
        """Delete a source by SQL."""
        with self.past():
            self.world.execute("DELETE FROM sources WHERE id = %s", source_id)
            self.book.write(source_id, None, self.seen)

    def lose_all(self) -> None:
        """Lose all sources, as by TRUNCATE."""
        with self.past():
            self.world.execute("DELETE FROM sources")
            for source in list(self.book.rows):
                self.book.write(source, None, self.seen)

    def mark_as_leaving(self, source_id: uuid.UUID) -> None:
        """Say that a source is being deleted, or that it is not any more."""
        row = self.book.rows[source_id]
        with self.past():
            status = "active" if row.leaving else "deleting"
            self.world.execute("UPDATE sources SET status = %s WHERE id = %s", status, source_id)
            self.book.write(source_id, replace(row, leaving=not row.leaving), self.seen)

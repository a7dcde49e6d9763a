"""What really became of the ledger's rows, told by a trigger of the test's own, to compare with the events."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from django.db import connection

from kfs_credentials.models import EventKind

TABLES = ("source_secret_lifecycle_refs", "kfs_credentials_event")

SET_UP = """
CREATE TABLE kfs_tests_history (
  id BIGINT GENERATED ALWAYS AS IDENTITY, place TEXT, transaction TEXT, before JSONB, after JSONB
);
CREATE FUNCTION kfs_tests_note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO kfs_tests_history (place, transaction, before, after) VALUES (
    TG_TABLE_NAME, pg_current_xact_id()::text,
    CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) END, CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) END
  );
  RETURN NULL;
END $$;
"""

TO_ACTIVE = {EventKind.ACTIVATED, EventKind.RESCUED, EventKind.REINSTATED, EventKind.RESTORED}
OUT_OF_USE = {EventKind.RETIRED, EventKind.DISCARDED, EventKind.DISPLACED}
TRIED = {EventKind.ERASURE_FAILED, EventKind.PARKED, EventKind.RETAINED}
ALLOWED: dict[tuple[str | None, str | None], set[EventKind]] = {
    (None, "staged"): {EventKind.RESERVED, EventKind.ADOPTED},
    (None, "candidate"): {EventKind.RESERVED},
    (None, "active"): {EventKind.ADOPTED},
    ("staged", "active"): TO_ACTIVE,
    ("candidate", "active"): TO_ACTIVE,
    ("retired", "active"): TO_ACTIVE,
    ("active", "active"): {EventKind.RESTORED},
    ("staged", "retired"): OUT_OF_USE,
    ("candidate", "retired"): OUT_OF_USE,
    ("active", "retired"): OUT_OF_USE,
    ("retired", "retired"): {
        *OUT_OF_USE,
        *TRIED,
        EventKind.HELD,
        EventKind.UNREADABLE,
        EventKind.ABANDONED,
        EventKind.ERASE_AGAIN,
    },
    ("deleting", "retired"): {*TRIED, EventKind.HELD},
    ("deleted", "retired"): {EventKind.HELD, EventKind.UNREADABLE},
    ("deleting", "deleted"): {EventKind.ERASED, EventKind.CONFIRMED},
    ("deleted", "deleted"): {EventKind.LATE_WRITE},
    ("deleted", None): {EventKind.FORGOTTEN},
}
"""Which events tell of a change from one state to another."""
OF_REFS = set[EventKind]().union(*ALLOWED.values())
"""The events that tell of a move of a ref."""
ERRORS = {EventKind.UNREADABLE, EventKind.DISPLACED, EventKind.ABANDONED, *TRIED}
"""Their detail is what the row has as its last error."""


class Change(NamedTuple):
    """One change of one ledger row."""

    before: dict[str, Any] | None
    after: dict[str, Any] | None

    @property
    def states(self) -> tuple[str | None, str | None]:
        """From which state to which."""
        before, after = ((row or {}).get("state") for row in self)
        return before, after

    @property
    def is_move(self) -> bool:
        """Whether it is more than the claim, renewal or release of a lease, or a look that is put off."""
        if self.before is None or self.after is None:
            return True
        if self.after["state"] == "deleting":
            return False
        same = ("delete_attempts", "last_error_code")
        if all(self.before[name] == self.after[name] for name in same):
            if self.states == ("deleting", "retired"):
                return self.after["next_delete_at"] is None  # held
            if self.states in {("staged", "staged"), ("candidate", "candidate")}:
                return False
        return True


class History:
    """Notes what becomes of the ledger, and which events are written, while it is `watching`."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note everything that the package does in this block."""
        self._triggers("ENABLE")
        try:
            yield
        finally:
            self._triggers("DISABLE")

    def problems(self) -> list[str]:
        """Return in which transactions changes and events are not the same; empty if every move has its event."""
        moves: dict[tuple[str, str], list[Change]] = defaultdict(list)
        events: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for place, transaction, before, after in self._noted():
            if place == TABLES[0]:
                change = Change(before, after)
                if change.is_move:
                    moves[transaction, (after or before)["credential_ref"]].append(change)
            else:
                assert before is None, "an event was changed"
                if after["kind"] in OF_REFS:
                    events[transaction, after["credential_ref"]].append(after)
        return [
            f"{[change.states for change in moves[key]]} has {[event['kind'] for event in events[key]]}"
            for key in sorted(moves.keys() | events.keys())
            if not _same(moves[key], events[key])
        ]

    def kinds(self) -> Counter[EventKind]:
        """Return how many events of each kind were written."""
        return Counter(EventKind(after["kind"]) for place, _, _, after in self._noted() if place == TABLES[1])

    def _noted(self) -> list[tuple[str, str, Any, Any]]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT place, transaction, before::jsonb, after::jsonb FROM kfs_tests_history ORDER BY id")
            return [
                (place, transaction, before and json.loads(before), after and json.loads(after))
                for place, transaction, before, after in cursor.fetchall()
            ]

    def _triggers(self, what: str) -> None:
        with connection.cursor() as cursor:
            for table in TABLES:
                cursor.execute(f"ALTER TABLE {table} {what} TRIGGER kfs_tests_note")


def _same(moves: list[Change], events: list[dict[str, Any]]) -> bool:
    if len(moves) != len(events):
        return False
    for change, event in zip(moves, events, strict=True):
        kind = EventKind(event["kind"])
        row = change.after or change.before
        assert row is not None
        if kind not in ALLOWED.get(change.states, ()):
            return False
        if any(event[name] != row[name] for name in ("tenant_id", "knowledge_space_id", "source_id")):
            return False
        if kind in ERRORS and event["detail"] != row["last_error_code"]:
            return False
    return True


@contextmanager
def noted() -> Iterator[History]:
    """Yield a history that notes nothing yet."""
    with connection.cursor() as cursor:
        cursor.execute(SET_UP)
        for table in TABLES:
            cursor.execute(
                f"CREATE TRIGGER kfs_tests_note AFTER INSERT OR UPDATE OR DELETE ON {table} "
                "FOR EACH ROW EXECUTE FUNCTION kfs_tests_note()"
            )
            cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER kfs_tests_note")
    try:
        yield History()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION kfs_tests_note CASCADE")
            cursor.execute("DROP TABLE kfs_tests_history")

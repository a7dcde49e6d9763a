"""Where old plaintext still is, after it was moved: in dead rows until the table is rewritten, WAL, copies, backups.

Whether `sources` was rewritten is told by its file: each look notes which one it is, and the database's time. What was
removed before a file was last seen is not in the one that came after it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.db import DatabaseError, connections
from django.utils.dateparse import parse_datetime
from psycopg import sql as composed

from kfs_credentials import sql
from kfs_credentials.models import Checkpoint
from kfs_credentials.transactions import describe, short_transaction
from kfs_credentials.verification.findings import Finding, FindingClass
from kfs_credentials.verification.reading import Pages, reading

NOTED = "rewrite:sources"
"""The name of the checkpoint that says which file `sources` was in, and when that was seen."""
SAMPLED_PAGES = 2000
"""Pages of another table that are read, at the most."""
PATIENCE = "5s"
"""How long a look at another table may take."""


@dataclass(frozen=True)
class Leftovers:
    """What still holds old plaintext."""

    table: str
    size: str
    clean_before: datetime | None
    """What was removed from `sources` before this moment is out of its heap and its TOAST. None: not rewritten yet."""
    last_removed_at: datetime | None
    """When something was last removed; None if that is not known."""
    moved: bool
    """Whether a ref may ever have been in use."""
    noted_at: datetime
    archives: bool
    slots: int
    standbys: int

    @property
    def rewritten(self) -> bool | None:
        """Nothing that was removed is left in the table's own files; None if that is not known."""
        if self.last_removed_at is None:
            return None if self.moved else True
        return self.clean_before is not None and self.last_removed_at < self.clean_before

    @property
    def statements(self) -> list[str]:
        """What rewrites the table, where that is needed."""
        if self.rewritten is not False:
            return []
        return [f"VACUUM (FULL, ANALYZE) {self.table};", f"pg_repack --no-order --table={self.table}"]

    def lines(self) -> list[str]:
        """Return it in sentences."""
        if not self.moved and self.last_removed_at is None:
            return ["Old plaintext: nothing was moved yet."]
        first = f"Old plaintext in {self.table} ({self.size} with TOAST and indexes): "
        if self.last_removed_at is None:
            first += "no job and no event tells that any was removed (there was none, or they are gone), "
        if self.clean_before is None:
            first += f"not rewritten yet, as far as is known (first noted: {_shown(self.noted_at)})."
        else:
            first += (
                f"rewritten since {_shown(self.clean_before)}: what was removed before that is out of its heap and "
            )
            first += "TOAST, unless a transaction or a replication slot older than that was open then."
            if self.last_removed_at is not None and not self.rewritten:
                first += f" What was removed later (last: {_shown(self.last_removed_at)}) is still there."
        lines = [first]
        if self.statements:
            vacuum, repack = self.statements
            lines += [
                f"  {vacuum}  -- locks the table for as long as it takes, and needs its size once more",
                f"  {repack}  -- the same without the lock, where the extension is installed",
                "  Run verify_credentials before and after it: it tells whether the table was rewritten.",
            ]
        archive = "archive_mode is on: the archive keeps it" if self.archives else "archive_mode is off"
        lines.append(
            f"What was removed is also in WAL until that is recycled ({archive}; {self.slots} replication slots), on "
            f"replicas until they have replayed the rewrite ({self.standbys} connected), and in backups and dumps for "
            "as long as these are kept. Nothing here can look there."
        )
        return lines

    def as_json(self) -> dict[str, Any]:
        """Return it for `--format json`."""
        return {
            "table": self.table,
            "rewritten": self.rewritten,
            "clean_before": None if self.clean_before is None else self.clean_before.isoformat(),
            "last_removed_at": None if self.last_removed_at is None else self.last_removed_at.isoformat(),
            "statements": self.statements,
            "archive_mode": self.archives,
            "replication_slots": self.slots,
            "standbys": self.standbys,
        }


def look_at_heap(using: str) -> Leftovers:
    """Return what still holds old plaintext, and note which file `sources` lies in now. Raises a database error.

    One short transaction, which writes a row of `kfs_credentials_checkpoint` and locks nothing else.
    """
    with short_transaction(using):
        (row,) = sql.query(using, "verification/heap")
        filenode, now, table, size, archive, slots, standbys, removed, moved = row
        now, removed = now.replace(tzinfo=UTC), removed and removed.replace(tzinfo=UTC)
        noted = Checkpoint.objects.using(using).filter(pk=NOTED).select_for_update(no_key=True).first()
        data = {} if noted is None else noted.data
        clean_before = data.get("clean_before")
        first = data.get("first_noted_at", now.isoformat())
        if noted is not None and noted.position != filenode:
            # It was this file's turn to be seen for the last time: what was removed before is not in the next one.
            clean_before = data["seen_at"]
        # What told of it may be gone by the next look.
        known = [one for one in (removed, parse_datetime(data.get("last_removed_at") or "")) if one is not None]
        removed = max(known, default=None)
        data = {
            "seen_at": now.isoformat(),
            "first_noted_at": first,
            "clean_before": clean_before,
            "last_removed_at": None if removed is None else removed.isoformat(),
        }
        sql.query(using, "verification/checkpoint", name=NOTED, position=filenode, data=json.dumps(data))
    return Leftovers(
        table=table,
        size=size,
        clean_before=None if clean_before is None else parse_datetime(clean_before),
        last_removed_at=removed,
        moved=moved,
        noted_at=parse_datetime(first) or now,
        archives=archive != "off",
        slots=slots,
        standbys=standbys,
    )


def look_at_history(using: str) -> list[Finding]:
    """Return the other tables on the search_path whose `metadata` has credentials, with an estimate of their rows.

    Reads SAMPLED_PAGES pages of each at the most, and gives up on one after PATIENCE. Raises a database error if the
    catalog cannot be read.
    """
    tables = Pages(using).read(lambda _: sql.query(using, "verification/history_tables"))
    return [finding for row in tables if (finding := _looked_at(using, *row)) is not None]


def _looked_at(
    using: str,
    schema: str,
    name: str,
    jsonb: bool,  # noqa: FBT001
    pages: int,
) -> Finding | None:
    sample = min(100.0, 100.0 * SAMPLED_PAGES / max(pages, 1))
    problem = ""
    try:
        with reading(using), connections[using].cursor() as cursor:
            cursor.execute("SELECT set_config('statement_timeout', %s, true)", [PATIENCE])
            table = composed.Identifier(schema, name)
            cursor.execute(_statement(table), {"sample": sample, "jsonb": jsonb})
            (count,) = cursor.fetchone()
    except DatabaseError as error:
        problem = describe(error)
    where = f"{schema}.{name}"
    if problem:
        return Finding(FindingClass.HISTORY_COPY, detail=f"{where}: could not be looked at ({problem})")
    if not count:
        return None
    if sample == 100.0:
        return Finding(FindingClass.HISTORY_COPY, detail=f"{where}: {count:,} rows")
    estimate = round(count * 100 / sample)
    return Finding(FindingClass.HISTORY_COPY, detail=f"{where}: about {estimate:,} rows, by a sample of its pages")


def _statement(table: composed.Identifier) -> composed.Composed:
    text: Any = sql.read("verification/history")
    return composed.SQL(text).format(table=table)


def _shown(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds", sep=" ")

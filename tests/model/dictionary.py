"""What must be true: what an application sees of each source, and what may become of each value."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.crashes.scene import BOTH, DANGLING, LATE, ORPHANED, UNDATED, UNREGISTERED
from tests.model.world import GONE, NONE, UNREADABLE, Job, Ref, Row, Seen

STUCK = "a job is not over, and not to be claimed now or at a known time"
PURGED = "a job is over, and its candidate is neither in use nor given up"


@dataclass
class Dictionary:
    """What is known without a look at the package: by what applications and operators have done."""

    rows: dict[uuid.UUID, Row] = field(default_factory=dict)
    spaces: set[uuid.UUID] = field(default_factory=set)
    value_of: dict[str, str] = field(default_factory=dict)
    """Of every ref that a source has ever named."""
    doubtful: set[str] = field(default_factory=set)
    """Refs that an old writer brought back when they had been claimed for erasure: they may be gone."""
    dangling: set[str] = field(default_factory=set)
    """Refs that an old writer brought back when they were not in use, and that are not repaired yet."""
    kept: dict[str, uuid.UUID] = field(default_factory=dict)
    """Refs that were in use when an old writer brought back another one, with their sources: a person has to choose."""
    left: dict[str, int] = field(default_factory=dict)
    """Refs that lost their source by a write past the package, and when."""
    forsaken: set[str] = field(default_factory=set)
    """Reserved refs whose source was deleted past the package, with the job that was to use them."""
    changed: dict[uuid.UUID, int] = field(default_factory=dict)
    """When a source has come to name another ref, or none."""
    late: dict[str, int] = field(default_factory=dict)
    """Names of objects that were written late, and when."""
    final: dict[str, int] = field(default_factory=dict)
    """Refs whose erasure is confirmed, and since when."""
    purged: set[str] = field(default_factory=set)
    moment: int = 0
    swept: int = -1
    """When the last sweep that came to its end had begun."""
    patrolled: int = -1
    """When the last patrol that came to its end had begun."""

    def sees(self, source: uuid.UUID) -> set[str]:
        """Return what an application may see of a source."""
        row = self.rows.get(source)
        if row is None:
            return {GONE}
        if row.ref is not None:
            return {self.value_of[row.ref], *([UNREADABLE] if row.ref in self.doubtful else [])}
        return {row.clear or NONE} if row.shape == "object" else {NONE}

    # What others do past the package.

    def write(self, source: uuid.UUID, row: Row | None, seen: Seen) -> None:
        """Note that somebody else has written a row, or deleted it."""
        before = self.rows.pop(source, None)
        if row is not None:
            self.rows[source] = row
        old, new = (None if one is None else one.ref for one in (before, row))
        if row is None:
            self.forsake(source, seen)
        if old == new:
            return
        self.changed[source] = self.moment
        if old is not None:
            self.left[old] = self.moment
            self.doubtful.discard(old)
            state, next_state = (seen.refs[one].state if one in seen.refs else None for one in (old, new))
            # To come to name what was reserved for it is a rotation, by whoever made it.
            if new is not None and state == "active" and next_state not in ("staged", "candidate"):
                self.kept[old] = source
        if new is None:
            self.let_go(source)
            return
        known = seen.refs.get(new)
        self.kept.pop(new, None)
        if known is None or known.claimed:
            self.doubtful.add(new)
        if known is None or known.state != "active":
            self.dangling.add(new)

    def forsake(self, source: uuid.UUID, seen: Seen) -> None:
        """Note that nobody is at work on what was reserved for a source."""
        self.forsaken |= {ref for ref, row in seen.refs.items() if row.source == source and row.state == "candidate"}

    def let_go(self, source: uuid.UUID, *, but: set[str] | None = None) -> None:
        """Note that nobody has to keep what a source has had."""
        self.kept = {ref: owner for ref, owner in self.kept.items() if owner != source or ref in (but or ())}

    # What is done by way of the package.

    def point(self, source: uuid.UUID, row: Row, value: str | None, seen: Seen) -> None:
        """Note that a source has this ref with this value, or none."""
        if row.ref is None:
            self.let_go(source)
        else:
            assert value is not None
            assert self.value_of.setdefault(row.ref, value) == value
            # What a sweep has put aside stays there until a person chooses.
            self.let_go(source, but={ref for ref, one in seen.refs.items() if one.attention == "displaced"} - {row.ref})
        self.rows[source] = row
        self.changed[source] = self.moment

    def delete(self, source: uuid.UUID) -> None:
        """Note that a source was deleted."""
        self.rows.pop(source)
        self.let_go(source)
        self.changed[source] = self.moment

    def accept(self, seen: Seen, *, moves: bool = False, rescues: bool = False) -> None:
        """Compare with what is there, and note what a worker has done that no application sees."""
        assert self.rows.keys() == seen.rows.keys()
        final = {ref for ref, row in seen.refs.items() if row.state == "deleted" and row.undated}
        self.final = {ref: self.final.get(ref, self.moment) for ref in final}
        for source, old in self.rows.items():
            new = seen.rows[source]
            if new == old:
                continue
            assert new.ref is not None, (source, old, new)
            assert new.ref not in self.value_of, "an old ref is in use again"
            if moves and old.ref is None and old.shape == "object":
                assert new == replace(old, ref=new.ref, shape=None, clear=None), (source, old, new)
                self.value_of[new.ref] = old.clear or ""
            else:
                assert rescues, (source, old, new)
                assert old.ref in self.dangling, (source, old, new)
                assert new == replace(old, ref=new.ref), (source, old, new)
                self.value_of[new.ref] = self.value_of[old.ref]
                self.left[old.ref] = self.moment
            self.rows[source] = new
            self.changed[source] = self.moment

    # What may be found.

    def unexpected(self, findings: Mapping[str, list[tuple[Any, ...]]], seen: Seen) -> dict[str, Any]:
        """Return what is found and should not be, by what has happened since the last sweep and the last patrol."""
        allowed: dict[str, Callable[..., bool]] = {
            ORPHANED: lambda source, ref: self._waits_for_sweep(ref, source),
            UNDATED: lambda ref, state: state == "retired" and self._waits_for_sweep(ref, seen.refs[ref].source),
            DANGLING: lambda source, *_: self.rows[source].ref in self.dangling,
            BOTH: lambda source: self.rows[source].ref is not None and self.rows[source].shape == "object",
            LATE: lambda name: self.late.get(name, -1) >= self.patrolled,
            UNREGISTERED: lambda name: name in self.late,
            # What a source has named before its job was over is in use, or was: the job finds out once it is claimed.
            STUCK: lambda job, *_: seen.jobs[job].candidate in self.value_of,
            PURGED: lambda job, _: seen.jobs[job].candidate in self.purged,
        }
        wrong = {}
        for finding, rows in findings.items():
            may_be = next((rule for start, rule in allowed.items() if finding.startswith(start)), None)
            if rest := [row for row in rows if may_be is None or not may_be(*row)]:
                wrong[finding] = rest
        return wrong

    def _waits_for_sweep(self, ref: str, source: uuid.UUID) -> bool:
        if ref not in self.left:
            return False
        row = self.rows.get(source)
        is_broken = row is not None and row.ref in self.dangling
        return is_broken or max(self.left[ref], self.changed.get(source, -1)) >= self.swept


def check_leases(before: Seen, now: Seen, *, worker: str, tokens: set[uuid.UUID] | None, claims: bool) -> None:
    """Nobody has touched what another worker has leased.

    `worker`: who has made this step. `tokens`: the leases that it may write under; None: any of its own. `claims`:
    whether it may take over what a dead worker held.
    """
    leased: list[tuple[Ref | Job, Ref | Job | None]] = [
        *((row, now.refs.get(ref)) for ref, row in before.refs.items() if row.state == "deleting"),
        *((job, now.jobs.get(one)) for one, job in before.jobs.items() if job.state == "running"),
    ]
    for old, new in leased:
        assert old.worker is not None
        if new is None or new.version == old.version:
            continue  # with its source, by whoever deleted that
        mine = old.worker.split("#")[0] == worker and (tokens is None or old.token in tokens) and not old.expired
        assert mine or (claims and old.expired), f"{worker} has written what is another's: {old} -> {new}"


def check_moves(before: Seen, now: Seen) -> None:
    """No ref has moved that should not, by what was there before."""
    live = {job.candidate for job in before.jobs.values() if job.state in ("queued", "running")}
    for ref, new in now.refs.items():
        old = before.refs.get(ref)
        if old is None or old.state == new.state:
            continue
        if new.state == "deleting":
            assert old.due, f"{ref} was not due"
            assert old.state in ("retired", "deleted"), f"{ref} was {old.state}"
            assert ref not in before.named | live, f"{ref} is in use, and is being erased"
        if new.state in ("retired", "deleting", "deleted") and old.state in ("staged", "candidate", "active"):
            assert ref not in now.named, f"{ref} was retired, and a source names it"
        if new.state == "deleted" and new.undated:
            assert old.horizon_over, f"{ref} is final, and was erased only once"
        if new.state == "active":
            assert not old.claimed, f"{ref} was claimed for erasure, and is in use again"
            assert ref in now.named, f"{ref} is in use, and no source names it"


def check_values(dictionary: Dictionary, seen: Seen, read: Callable[[str, Ref], str]) -> None:
    """What is in use has a value of its own, and what a person has to choose from can be read."""
    owners: dict[str, str] = {}
    for ref in sorted(seen.named):
        row = seen.refs.get(ref)
        if row is not None and row.state == "active":
            other = owners.setdefault(dictionary.value_of[ref], ref)
            assert other == ref, f"{ref} and {other} have the same value"
    for ref in dictionary.kept:
        assert seen.refs[ref].undated, f"{ref} was kept for a person to choose, and is to be erased"
        assert read(ref, seen.refs[ref]) == dictionary.value_of[ref], f"{ref} was kept for a person to choose"


def check_candidates(dictionary: Dictionary, seen: Seen) -> None:
    """What was reserved for a job has that job: else nobody gives it back before its time."""
    live = {job.candidate for job in seen.jobs.values() if job.state in ("queued", "running")}
    alone = {ref for ref, row in seen.refs.items() if row.state == "candidate"} - live - dictionary.forsaken
    assert alone == set(), "reserved for no job"

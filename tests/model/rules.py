"""The rules: who acts next, and what of what is possible then is done.

There is one rule with many acts, and not a rule for each act: Hypothesis takes all rules equally often, and most acts
lead nowhere most of the time. What a worker does next is most often what its loop would have done.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.keys import OLD_ID
from tests.model.applications import Applications
from tests.model.backfills import ANSWERED, LOST, STARTED, TAKEN, Worker
from tests.model.base import pick
from tests.model.cleanups import Cleaner, Going
from tests.model.faults import FAULT, FAULTS, Fault
from tests.model.operators import Operators, Reencryptions, Time
from tests.model.world import SOURCES

NUMBER = st.integers(0, 11)
LIMITS = (1, 2, 10)
PAGES = (100, 3, 1)
SHAPES = ("object", "object", "string", None)
GROUPS = {
    "backfill_race": 14,
    "cleanup_race": 14,
    "operator_race": 4,
    "cleanup": 12,
    "backfill": 12,
    "rounds": 10,
    "old_application": 16,
    "application": 16,
    "operator": 8,
    "trouble": 6,
}
"""Who acts, and how often beside the others."""
OPTIONAL = (
    *("create", "rotate", "revoke", "delete", "delete a space", "add an old source", "write in clear", "save a row"),
    *("name none", "drop", "lose all", "mark as leaving", "die", "lose leases", "settle early", "release", "pause"),
    *("begin a run", "pass grace", "expire reservations", "purge", "choose", "settle a conflict", "deploy"),
)
"""Acts of which an example may do without some: what they hide is seen then."""


@dataclass(frozen=True)
class Act:
    """What may be done: how often beside the others, whether it can be done now, and how."""

    name: str
    weight: int
    possible: bool
    do: Callable[[], object]


class Rules(Applications, Operators, Reencryptions, Time):
    """Who acts."""

    without: ClassVar[set[str]] = set()

    @initialize(without=st.sets(st.sampled_from(OPTIONAL), max_size=8))
    def choose_acts(self, without: set[str]) -> None:
        """Do without some acts in this example."""
        self.without = without  # type: ignore[misc]

    @rule(who=st.integers(0, 99), kind=st.integers(0, 99), one=NUMBER, two=NUMBER, flag=st.booleans(), fault=FAULT)
    def act(self, who: int, kind: int, one: int, two: int, flag: bool, fault: Fault | None) -> None:
        """Let somebody act."""
        possible = {
            "cleanup": any(worker.held for worker in self.cleanups)
            or any(row.state != "active" and not row.undated for row in self.seen.refs.values()),
            "backfill": any(worker.held for worker in self.backfills)
            or self._is_new()
            or any(job.state in ("queued", "running") for job in self.seen.jobs.values()),
        }
        groups = [group for group, weight in GROUPS.items() if possible.get(group, True) for _ in range(weight)]
        group = pick(groups, who)
        note(f"{group}:")
        getattr(self, group)(kind, one, two, flag, fault)

    def _act(self, number: int, *acts: Act) -> None:
        there = [act for act in acts if act.possible and act.name not in self.without for _ in range(act.weight)]
        if there:
            act = pick(there, number)
            note(f"    {act.name}")
            self.reached[f"act: {act.name}"] += 1
            act.do()

    def _ring(self, number: int) -> bool:
        """Return whether a process has the new key first; rarely one whose first key is closed."""
        right = self.closed == OLD_ID or (self.closed is None and self.deployed)
        return right if number % 12 else not right

    def application(self, kind: int, one: int, two: int, flag: bool, fault: Fault | None) -> None:
        """An application calls a service."""
        ring = self._ring(two)
        right = (None, None, True, None, True, False)[two % 6]
        there, gone = self.sources(there=True), self.sources(there=False)
        source = SOURCES.index(self.some(one)) if there and two != 11 else one % 4
        free = SOURCES.index(pick(gone, one)) if gone and two != 11 else one % 4
        self._act(
            kind,
            Act("rotate", 5, True, lambda: self.rotate(source, right, ring, fault)),
            Act("create", 3, bool(gone) or two == 11, lambda: self._create(free, two, flag, ring, fault)),
            Act("rotate again", 3, bool(self.unanswered), lambda: self.rotate_again(one, ring, fault)),
            Act("revoke", 1, True, lambda: self.revoke(source, right, fault)),
            Act("delete", 1, True, lambda: self.delete(source, right, fault)),
            Act("delete a space", 1, kind % 3 == 0, lambda: self.delete_space(one % 2, fault)),
        )

    def _create(self, source: int, two: int, flag: bool, ring: bool, fault: Fault | None) -> None:
        if two != 10:
            with self.past():
                self.need_space(two % 2)
        self.create(source, two % 2, flag or two % 4 > 0, ring, fault)

    def old_application(self, kind: int, one: int, two: int, flag: bool, _: Fault | None) -> None:
        """An application writes that knows nothing of all this."""
        there, gone = self.sources(there=True), self.sources(there=False)
        refs = [source for source in there if self.book.rows[source].ref]
        some = self.some(one) if there else SOURCES[0]
        with_ref = pick(refs or [SOURCES[0]], one)
        shape = pick(SHAPES, two)
        rows = bool(there)
        self._act(
            kind,
            Act("save a row", 4, bool(self.copies), lambda: self.save_a_row(one, flag or two % 3 > 0)),
            Act("read a row", 3, rows, lambda: self.read_a_row(some)),
            Act("write in clear", 3, rows, lambda: self.write_in_clear(some, shape)),
            Act("add an old source", 3, bool(gone), lambda: self._add_old(one, two)),
            Act("write back", 1, bool(refs), lambda: self.write_back(with_ref)),
            Act("name none", 1, bool(refs), lambda: self.name_none(with_ref)),
            Act("displace", 2, bool(refs), lambda: self._displace(with_ref, flag)),
            Act("drop", 1, rows, lambda: self.drop(some)),
            Act("mark as leaving", 1, rows, lambda: self.mark_as_leaving(some)),
            Act("name a reservation", 2, bool(self.reserved()), lambda: self.name_a_reservation(one, flag)),
            Act("lose all", 1, rows and kind % 5 == 0, self.lose_all),
        )

    def _displace(self, source: uuid.UUID, swept: bool) -> None:
        """Set a source to NULL, let it be given new credentials, and save the row as it was; `swept`: sweep then."""
        self.read_a_row(source)
        self.name_none(source)
        self.rotate(SOURCES.index(source), None, self._ring(1), None)
        self.save_a_row(1, True, of=source)
        if swept:
            self._sweep(0, 100, 9, None)

    def _add_old(self, one: int, two: int) -> None:
        self.add_old(SOURCES.index(pick(self.sources(there=False), one)), two % 2, pick(SHAPES, two))

    def backfill(self, kind: int, one: int, two: int, flag: bool, fault: Fault | None) -> None:
        """A worker of the backfill makes one step, or some."""
        number, limit = one % 2, pick(LIMITS, two)
        worker = self.backfills[number]
        self._act(
            kind,
            Act("move", 14, True, lambda: self._move(number, limit, 1 + two % 2, fault)),
            Act("restart", 30, self.is_closed(worker.new_first), lambda: self.start_backfill_anew(number)),
            Act("settle early", 1, self._has(TAKEN), lambda: self.settle_early(one, fault)),
            Act("settle in halves", 1, self._has(ANSWERED), lambda: self.settle(one, True, fault)),
            Act("renew", 1, bool(worker.held), lambda: self.renew(one, fault)),
            Act("release", 1, bool(worker.held), lambda: self.release(one, fault)),
            Act("discover", 1, True, lambda: self.discover(number, limit, fault)),
            Act("claim", 2, True, lambda: self.claim_jobs(number, limit, fault)),
            Act("die", 1, bool(worker.held), lambda: self.start_backfill_anew(number)),
        )

    def _move(self, number: int, limit: int, times: int, fault: Fault | None) -> None:
        """Make so many steps as the worker's loop makes them; the fault comes with the last."""
        for left in reversed(range(times)):
            worker, now = self.backfills[number], None if left else fault
            if worker.at(LOST):
                self.release(self._index(self.backfills, worker, TAKEN, STARTED, ANSWERED, LOST), now)
            elif worker.at(ANSWERED):
                self.settle(self._index(self.backfills, worker, ANSWERED), False, now)
            elif worker.at(STARTED):
                self.finish_putting(self._index(self.backfills, worker, STARTED), now)
            elif worker.at(TAKEN):
                self.start_to_put(self._index(self.backfills, worker, TAKEN), now)
            elif any(job.state == "queued" or job.expired for job in self.seen.jobs.values()):
                self.claim_jobs(number, limit, now)
            elif self._is_new():
                self.discover(number, limit, now)
            else:
                break

    def _is_new(self) -> bool:
        """Whether there is something to discover."""
        busy = {job.source for job in self.seen.jobs.values() if job.state != "succeeded"}
        legacy = [one for one, row in self.book.rows.items() if row.shape == "object" and row.ref is None]
        return any(source not in busy for source in legacy)

    def _index(self, workers: Sequence[Worker], worker: Worker, *stages: str) -> int:
        """Return the number of a worker's oldest batch at one of these stages, among all of them."""
        there = [one for one in workers for held in one.held if held.stage in stages]
        return there.index(worker)

    def cleanup(self, kind: int, one: int, two: int, flag: bool, fault: Fault | None) -> None:
        """A worker of the cleanup erases, or takes back what was reserved: one step, or some."""
        number, limit = one % 2, pick(LIMITS, two)
        worker = self.cleanups[number]
        self._act(
            kind,
            Act("erase", 14, True, lambda: self._erase(number, limit, 1 + two % 2, flag, fault)),
            Act("restart", 30, self.is_closed(worker.new_first), lambda: self.start_cleanup_anew(number)),
            Act("settle early", 1, self._erasing(TAKEN), lambda: self.settle_erasure(one, False, fault)),
            Act("settle in halves", 1, self._erasing(ANSWERED), lambda: self.settle_erasure(one, True, fault)),
            Act("reconcile", 2, True, lambda: self.reconcile(number, limit, fault)),
            Act("renew", 1, bool(worker.held), lambda: self.renew_erasure(one, fault)),
            Act("release", 1, bool(worker.held), lambda: self.release_erasure(one, fault)),
            Act("claim for erasure", 2, True, lambda: self.claim_refs(number, limit, fault)),
            Act("die", 1, bool(worker.held), lambda: self.start_cleanup_anew(number)),
        )

    def _erase(self, number: int, limit: int, times: int, waits: bool, fault: Fault | None) -> None:
        """Make so many steps as the worker's loop makes them; `waits`: until something is due."""
        for left in reversed(range(times)):
            worker, now, refs = self.cleanups[number], None if left else fault, self.seen.refs.values()
            if worker.at(LOST):
                self.release_erasure(self._index(self.cleanups, worker, TAKEN, STARTED, ANSWERED, LOST), now)
            elif worker.at(ANSWERED):
                self.settle_erasure(self._index(self.cleanups, worker, ANSWERED), False, now)
            elif worker.at(STARTED):
                self.finish_erasing(self._index(self.cleanups, worker, STARTED))
            elif worker.at(TAKEN):
                self.start_to_erase(self._index(self.cleanups, worker, TAKEN), now)
            elif any((row.due and row.state != "deleting") or row.expired for row in refs):
                self.claim_refs(number, limit, now)
            elif waits and limit == 1 and any(not row.undated for row in refs if row.state == "deleted"):
                self.pass_horizon()
            elif waits and any(not row.undated for row in refs if row.state == "retired"):
                self.pass_grace(None)
            elif waits and any(not row.undated for row in refs if row.state == "deleted"):
                self.pass_horizon()
            elif any(row.unused and row.state in ("staged", "candidate") for row in refs):
                self.reconcile(number, limit, now)
            elif waits and any(row.state in ("staged", "candidate") for row in refs):
                self.expire_reservations()
            else:
                break

    def rounds(self, kind: int, one: int, two: int, flag: bool, fault: Fault | None) -> None:
        """A worker of the cleanup sweeps, repairs, patrols or forgets: one step, or some."""
        number, limit = one % 2, pick(PAGES, two)
        final = any(row.state == "deleted" and row.undated for row in self.seen.refs.values())
        broken = bool(self.book.dangling & self.seen.named)
        self._act(
            kind,
            Act("sweep", 6, True, lambda: self._sweep(number, limit, 1 + two % 6, fault)),
            Act("repair", 4, broken, lambda: self.repair(number, two, fault)),
            Act("patrol", 2, True, lambda: self._patrol(number, limit, 1 + two % 2, fault)),
            Act("purge", 4, final, lambda: self._purge(number, flag, fault)),
        )

    def _sweep(self, number: int, limit: int, times: int, fault: Fault | None) -> None:
        """Make so many steps of a sweep; the fault comes with the last."""
        for left in reversed(range(times)):
            worker, now = self.cleanups[number], None if left else fault
            if worker.sweep is None:
                self.begin_sweep(number, now)
            elif worker.sweep.to_repair:
                self.repair_what_was_found(self._sweeping(worker, lambda going: bool(going.to_repair)), now)
            elif worker.sweep.over:
                self.complete_sweep(self._sweeping(worker, lambda going: going.over and not going.to_repair), now)
            else:
                self.sweep(self._sweeping(worker, lambda going: not going.over), limit, now)

    def _sweeping(self, worker: Cleaner, is_there: Callable[[Going], bool]) -> int:
        there = [one for one in self.cleanups if one.sweep is not None and is_there(one.sweep)]
        return there.index(worker)

    def _patrol(self, number: int, limit: int, times: int, fault: Fault | None) -> None:
        """Make so many steps of a patrol; the fault comes with the last."""
        for left in reversed(range(times)):
            worker, now = self.cleanups[number], None if left else fault
            if worker.patrol is None:
                self.begin_patrol(number, now)
            else:
                self.patrol([one for one in self.cleanups if one.patrol is not None].index(worker), limit, now)

    def _purge(self, number: int, patrolled: bool, fault: Fault | None) -> None:
        if patrolled:
            self._patrol(number, pick(PAGES, 0), 3, None)
        self.pass_retention()
        self.purge(number, fault)

    def trouble(self, kind: int, one: int, _: int, flag: bool, fault: Fault | None) -> None:
        """Leases run out, time passes, somebody pauses, keys are put into another order."""
        self._act(
            kind,
            Act("act late", 6, bool(FAULTS.late), lambda: self.act_late(one)),
            Act("write late", 3, bool(self.erased()), lambda: self.write_late(one)),
            Act("write late and confirm", 9, bool(self._unconfirmed()), lambda: self._confirm_late(one)),
            Act("lose leases", 2, True, lambda: self.lose_leases(one, flag)),
            Act("lose all leases", 1, True, self.lose_all_leases),
            Act("pass grace", 2, True, lambda: self.pass_grace(pick((*SOURCES, None), one))),
            Act("expire reservations", 2, True, self.expire_reservations),
            Act("pause", 1, not self.paused, lambda: self.pause_or_resume(fault)),
            Act("resume", 4, self.paused, lambda: self.pause_or_resume(fault)),
            Act("deploy", 1, True, self.deploy),
            Act("die", 1, True, lambda: self.start_cleanup_anew(one % 2)),
            Act("die", 1, True, lambda: self.start_backfill_anew(one % 2)),
        )

    def _unconfirmed(self) -> list[str]:
        return [ref for ref in self.erased() if not self.seen.refs[ref].undated]

    def _confirm_late(self, one: int) -> None:
        """Let somebody write what was erased, right before it is looked whether it is gone."""
        self.write_late(self.erased().index(pick(self._unconfirmed(), one)))
        self.pass_horizon()
        self._erase(one % 2, 10, 8, False, None)

    def operator(self, kind: int, one: int, two: int, flag: bool, fault: Fault | None) -> None:
        """A person decides, or seals everything anew."""
        ring = self._ring(two)
        rows, refs = self.book.rows.values(), self.seen.refs.values()
        keep = ("ref", "plaintext", "same")[two % 3]
        parked = any(row.attention in ("erasure_fails", "retained") for row in refs)
        self._act(
            kind,
            Act("choose", 3, any(row.attention == "displaced" for row in refs), lambda: self.choose(one, flag, fault)),
            Act("restore", 1, bool(self.book.kept), lambda: self.restore(one, fault)),
            Act(
                "settle a conflict",
                4,
                any(row.ref and row.shape for row in rows),
                lambda: self.settle_conflict(one, keep, ring, fault),
            ),
            Act(
                "settle what is unsupported",
                2,
                any(row.shape == "string" and not row.ref for row in rows),
                lambda: self.settle_unsupported(one, flag, ring, fault),
            ),
            Act("decide about a parked ref", 4, parked, lambda: self.decide_about_parked(one, flag, fault)),
            Act(
                "retry",
                3,
                any(job.state == "failed" for job in self.seen.jobs.values()),
                lambda: self.retry_failed_jobs(fault, ring),
            ),
            Act("go on with a run", 9, bool(self.runs), lambda: self._run_on(one, two, fault)),
            Act("begin a run", 1, kind % 4 == 0, lambda: self._begin_run(flag, fault)),
        )

    def _run_on(self, one: int, two: int, fault: Fault | None) -> None:
        for left in reversed(range(1 + two % 5)):
            if self.runs:
                self.go_on_with_run(one, pick(PAGES, two), None if left else fault)

    def _begin_run(self, flag: bool, fault: Fault | None) -> None:
        if flag:
            self.lose_all_leases()
        if self.moved_to is not None or not self.deployed:
            self.deploy()
        self.begin_run(fault)

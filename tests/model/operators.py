"""The rules of time, of operators, and of what happens late; and the re-encryption of everything."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kfs_credentials import in_clear, operations, ref_operations
from kfs_credentials.crypto import Scope
from kfs_credentials.errors import ImproperlyPrepared, KeyClosed, LeaseLost
from kfs_credentials.in_clear import Settled
from kfs_credentials.pause import pause_workers, resume_workers
from kfs_credentials.reencryption import Batch, Object, Reencryption
from kfs_credentials.reencryption import Outcome as Sealed
from tests.keys import NEW_ID, OLD_ID
from tests.model.backfills import ANSWERED, LEASE, STARTED, TAKEN, Backfills, wait_for
from tests.model.base import Base, Outcome, pick
from tests.model.cleanups import Cleanups
from tests.model.faults import FAULTS, Fault
from tests.model.world import ALIAS, TENANT, ring


class Operators(Base):
    """Persons, who decide what nobody else may."""

    def retry_failed_jobs(self, fault: Fault | None, new_first: bool) -> None:
        """Queue failed jobs again."""
        failed = [job for job, row in sorted(self.seen.jobs.items()) if row.state == "failed"]
        may = (KeyClosed,) if self.is_closed(new_first) else ()
        if failed:
            rows = [(job, None) for job in failed]
            self.step(lambda: operations.retry_failed_jobs(ALIAS, rows), new_first=new_first, fault=fault, may=may)

    def settle_conflict(self, number: int, keep: str, new_first: bool, fault: Fault | None) -> None:
        """Decide about a source that has both a ref and credentials in clear."""
        source = pick([one for one, row in sorted(self.book.rows.items()) if row.ref and row.shape], number)
        self.decide(source, keep, new_first, fault)

    def settle_unsupported(self, number: int, wrap: bool, new_first: bool, fault: Fault | None) -> None:
        """Move credentials of another shape as the value of a key, or leave them where they are."""
        there = [one for one, row in sorted(self.book.rows.items()) if row.shape == "string" and not row.ref]
        self.decide(pick(there, number), "wrapped" if wrap else "as it is", new_first, fault)

    def decide(
        self,
        source: uuid.UUID,
        keep: str,
        new_first: bool,
        fault: Fault | None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Look at what lies in clear, and decide about it: what was changed `meanwhile` stays as it is."""
        looked_at = self.book.rows[source]
        with ring(new_first):
            (found,) = [one for part in in_clear.read(ALIAS, [source]) for one in part]
            compared = list(in_clear.compared(ALIAS, [source]))
        meanwhile()
        row = self.book.rows.get(source)
        is_same = row is not None and replace(looked_at, other=row.other, leaving=row.leaving) == row
        moves = (keep == "plaintext" and looked_at.shape == "object") or keep == "wrapped"

        def work() -> Any:
            if keep == "as it is":
                waiting = [one for one in operations.unsettled(ALIAS) if one.source_id == source]
                return operations.acknowledge(ALIAS, waiting, by="somebody")
            if keep == "same":
                both = [one for one, verdict in compared if verdict is in_clear.Verdict.SAME]
                return Settled.DONE if in_clear.scrub_same(ALIAS, both) else Settled.CHANGED
            if keep == "wrapped":
                return in_clear.wrap(ALIAS, found, "wrapped")
            return in_clear.keep_plaintext(ALIAS, found) if moves else in_clear.keep_ref(ALIAS, found)

        def then(outcome: Outcome) -> None:
            if not is_same:
                alone = row is not None and (row.ref, row.shape) == (looked_at.ref, None) and not moves
                assert outcome.value is not Settled.DONE or alone, "it is not what was looked at"
                return
            now = self.seen.rows[source]
            bare = replace(row or looked_at, shape=None, clear=None)
            if moves and now == replace(bare, ref=now.ref) and now.ref not in (None, bare.ref):
                assert now.ref not in self.book.value_of, "an old ref is in use again"
                self.book.point(source, now, looked_at.clear, self.seen)
            elif not moves and keep != "as it is" and now == bare:
                assert bare.ref not in (None, *self.book.dangling), "the ref is not in use"
                assert keep != "same" or looked_at.clear == self.book.value_of[bare.ref or ""], "it was not the same"
                self.book.rows[source] = now
            else:
                assert outcome.value is not Settled.DONE

        may = (KeyClosed,) if self.is_closed(new_first) else ()
        self.step(work, new_first=new_first, fault=fault, may=may, then=then)

    def choose(self, number: int, back: bool, fault: Fault | None) -> None:
        """Let a source name a displaced ref again, or let that one go."""
        there = sorted(ref for ref, row in self.seen.refs.items() if row.attention == "displaced")
        self._choose(pick(there, number), back, fault)

    def restore(self, number: int, fault: Fault | None) -> None:
        """Let a source name a ref again that an old writer has displaced, whether or not a sweep has found it."""
        self._choose(pick(sorted(self.book.kept), number), True, fault)

    def _choose(self, ref: str, back: bool, fault: Fault | None) -> None:
        row = self.seen.refs[ref]
        act = ref_operations.restore if back else ref_operations.discard

        def then(outcome: Outcome) -> None:
            source = self.book.rows.get(row.source)
            now = self.seen.rows.get(row.source)
            if back and source is not None and now is not None and now.ref == ref:
                self.book.point(row.source, replace(source, ref=ref), self.book.value_of[ref], self.seen)
            elif not back and self.seen.refs[ref].attention != "displaced":
                self.book.kept.pop(ref, None)

        self.step(lambda: act(ALIAS, [(row.id, None)]), fault=fault, then=then)

    def decide_about_parked(self, number: int, give_up: bool, fault: Fault | None) -> None:
        """Try an erasure again that has failed too often, or give it up."""
        there = sorted(ref for ref, row in self.seen.refs.items() if row.attention in ("erasure_fails", "retained"))
        rows = [(self.seen.refs[pick(there, number)].id, None)]
        if give_up:
            self.step(lambda: ref_operations.abandon(ALIAS, rows, by="somebody", reason="made up"), fault=fault)
        else:
            self.step(lambda: ref_operations.erase_again(ALIAS, rows), fault=fault)

    def pause_or_resume(self, fault: Fault | None) -> None:
        """Pause all workers, or let them go on."""

        def work() -> bool:
            return resume_workers(ALIAS) if self.paused else pause_workers(ALIAS, by="somebody", reason="made up")

        def then(_: Outcome) -> None:
            self.paused = bool(self.world.rows("SELECT FROM kfs_credentials_pause"))

        self.step(work, fault=fault, then=then)

    def deploy(self) -> None:
        """Let processes that start from here on have the keys in the other order."""
        self.deployed = not self.deployed


class Time(Cleanups, Backfills):
    """What time brings, and what happens late."""

    def lose_leases(self, number: int, knows: bool) -> None:
        """Let the leases of one worker run out; it may know, by its own watch."""
        worker = pick([*self.backfills, *self.cleanups], number)
        with self.past():
            self.world.expire_leases(worker.name)
            for held in worker.held if knows else ():
                held.batch.lease.confirmed(time.monotonic() - 2 * LEASE)

    def lose_all_leases(self) -> None:
        """Let all leases run out."""
        with self.past():
            self.world.expire_leases()

    def expire_reservations(self) -> None:
        """Let the time for all reservations be over."""
        with self.past():
            self.world.expire_reservations()

    def pass_grace(self, source: Any) -> None:
        """Let what is to be erased be due."""
        with self.past():
            self.world.pass_grace(source)

    def pass_horizon(self) -> None:
        """Let the horizon of all erasures be over."""
        with self.past():
            self.world.pass_horizon()

    def pass_retention(self) -> None:
        """Let final rows be old enough to be forgotten."""
        with self.past():
            self.world.pass_retention()

    def act_late(self, number: int) -> None:
        """Let the store carry out what its caller has given up."""
        with self.past():
            self.carry_out(number)

    def write_late(self, number: int) -> None:
        """Let a writer that was frozen since before an erasure write what was erased."""
        ref = pick(self.erased(), number)
        row = self.seen.refs[ref]
        with self.past(), ring(self.closed == OLD_ID):
            value = {"token": self.book.value_of.get(ref, "late")}
            self.world.store.put(Scope(TENANT, row.space, row.source), ref, value)
            self.book.late[self.world.name(ref)] = self.book.moment

    def erased(self) -> list[str]:
        """Return the refs whose objects are erased."""
        return sorted(ref for ref, row in self.seen.refs.items() if row.state == "deleted" and not self.world.has(ref))

    def carry_out(self, number: int) -> None:
        """Do it."""
        late = FAULTS.late.pop(number % len(FAULTS.late))
        late.act()
        self.book.late |= dict.fromkeys(late.names, self.book.moment)


@dataclass
class Run:
    """A re-encryption of everything."""

    name: str
    steps: Reencryption
    new_first: bool
    after: str = ""
    begun: bool = False
    through: bool = False
    clean: bool = True
    """Everything that it has looked at was sealed anew."""
    left: list[Object] | None = None
    batch: Any = None
    stage: str = TAKEN
    faulty: bool = False


class Reencryptions(Base):
    """One run, or two of which one has been overtaken."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Run] = []

    def run_step(self, run: Run, work: Callable[[], Any], fault: Fault | None, **options: Any) -> Outcome:
        """Make a step of a run; it is over if it is killed, or if another one has begun."""
        outcome = self.step(work, worker=run.name, new_first=run.new_first, fault=fault, tokens=set(), **options)
        if outcome.killed or isinstance(outcome.error, LeaseLost):
            self.runs.remove(run)
        return outcome

    def begin_run(self, fault: Fault | None) -> None:
        """Begin a run, with the deployed order of the keys, and close the other key."""
        new_first, name = self.deployed, self.new_name("run")

        def begin() -> Run:
            steps = Reencryption(using=ALIAS, worker=name, lease=LEASE, by="somebody")
            steps.begin()
            return Run(name, steps, new_first, begun=True)

        def then(outcome: Outcome) -> None:
            closed = [key for (key,) in self.world.rows("SELECT key_id FROM kfs_credentials_closed_key")]
            assert len(closed) <= 1
            self.closed = closed[0] if closed else None
            if self.moved_to == self.closed:
                self.moved_to = None
            if outcome.done:
                assert self.closed == (OLD_ID if new_first else NEW_ID)
                self.runs = [*self.runs[-1:], outcome.value]

        may = (ImproperlyPrepared,)
        self.step(begin, worker=name, new_first=new_first, fault=fault, must=self.refusals(), may=may, then=then)

    def go_on_with_run(self, number: int, limit: int, fault: Fault | None) -> None:
        """Make the next step of a run: a page, a batch, and in the end the probe and the completion."""
        run = pick(self.runs, number)
        if run.batch is None and run.left:
            run.batch, run.left, run.stage = Batch(run.left[:limit]), run.left[limit:], TAKEN
        if run.batch is not None:
            self._go_on(run, fault)
        elif not run.through:
            self._turn_page(run, limit, fault)
        else:
            self._complete(run, fault)

    def _turn_page(self, run: Run, limit: int, fault: Fault | None) -> None:
        outcome = self.run_step(run, lambda: run.steps.page(run.after, limit), fault)
        if outcome.done:
            run.left = outcome.value.objects
            run.through = outcome.value.after is None
            run.after = outcome.value.after or run.after

    def _go_on(self, run: Run, fault: Fault | None) -> None:
        batch = run.batch

        def start() -> bool:
            try:
                return run.steps.start_replace(batch, len(batch.items))
            finally:
                wait_for(batch)

        if run.stage == TAKEN:
            outcome = self.run_step(run, start, fault, must=self.refusals())
            run.faulty = outcome.faulty
            if outcome.done:
                run.stage = STARTED if outcome.value else ANSWERED
        elif run.stage == STARTED:
            may = (Exception,) if run.faulty else (LeaseLost,)
            self.run_step(run, lambda: run.steps.finish_replace(batch), None, may=may)
            run.stage = TAKEN  # until all are asked
        else:
            self._settle_run(run, batch, fault)

    def _settle_run(self, run: Run, batch: Batch, fault: Fault | None) -> None:
        outcome = self.run_step(run, lambda: run.steps.settle(batch), fault, may=(LeaseLost,))
        if outcome.killed:
            return
        if batch.back:
            # The step of a worker that follows whatever comes of this one.
            late = {self.world.name(item.ref) for item in batch.back}
            again = self.step(
                lambda: run.steps.erase_again(batch, len(batch.items)),
                worker=run.name,
                new_first=run.new_first,
                tokens=set(),
            )
            assert again.done
            assert not late & set(self.world.store.list()) - {self.world.name(ref) for ref in self.seen.named}
        if outcome.done:
            run.clean &= outcome.value[Sealed.FAILED] == 0 and outcome.value.total() == len(batch.items)
            run.batch = None

    def _complete(self, run: Run, fault: Fault | None) -> None:
        def work() -> int:
            run.steps.reseal_probes()
            return run.steps.complete(0)

        def then(outcome: Outcome) -> None:
            primary = NEW_ID if run.new_first else OLD_ID
            if outcome.done and run.clean and self.closed not in (None, primary):
                self.moved_to = primary

        outcome = self.run_step(run, work, fault, may=(LeaseLost, KeyClosed), then=then)
        if outcome.done:
            self.runs.remove(run)

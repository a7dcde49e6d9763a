"""The rules of the cleanup's workers: erasures, reservations, the sweep, repairs, the patrol, what can be forgotten."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kfs_credentials.cleanup import Cleanup
from kfs_credentials.errors import KeyClosed, LeaseLost, SecretStoreError, StoreUnavailable, WorkersPaused
from kfs_credentials.repairs import Repair
from tests.model.backfills import ANSWERED, LEASE, LOST, STARTED, TAKEN, Held, Worker, believes, wait_for
from tests.model.base import Base, Outcome
from tests.model.faults import Fault
from tests.model.world import ALIAS


@dataclass
class Going:
    """A round that a worker makes."""

    position: Any
    begun: int
    to_repair: list[str] = field(default_factory=list)
    over: bool = False
    tainted: bool = False
    """Somebody had a row locked that it would have looked at."""


@dataclass
class Cleaner(Worker):
    """A process that cleans up."""

    sweep: Going | None = None
    patrol: Going | None = None


class Cleanups(Base):
    """Two workers that erase, and look after everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.cleanups = [self.new_cleanup(), self.new_cleanup()]

    def new_cleanup(self) -> Cleaner:
        """Return a worker that starts now."""
        name = self.new_name("cleanup")
        return Cleaner(name, Cleanup(using=ALIAS, worker=name, lease=LEASE), self.deployed)

    def cleanup_step(self, worker: Cleaner, work: Callable[[], Any], fault: Fault | None, **options: Any) -> Outcome:
        """Make a step of a worker; it is forgotten if it is killed."""
        outcome = self.step(work, worker=worker.name, new_first=worker.new_first, fault=fault, **options)
        if outcome.killed:
            self.cleanups[self.cleanups.index(worker)] = self.new_cleanup()
        return outcome

    def _erasing(self, *stages: str) -> bool:
        return any(worker.at(*stages) for worker in self.cleanups)

    def _erasure(self, number: int, *stages: str) -> tuple[Cleaner, Held]:
        there = [(worker, held) for worker in self.cleanups for held in worker.held if held.stage in stages]
        return there[number % len(there)]

    # Erase.

    def claim_refs(self, number: int, limit: int, fault: Fault | None) -> None:
        """Lease refs whose erasure is due."""
        worker = self.cleanups[number]
        if len(worker.held) == 2:
            return
        outcome = self.cleanup_step(
            worker,
            lambda: worker.steps.claim(limit, beside=bool(worker.held)),
            fault,
            must=self.refusals(),
            claims=True,
        )
        if outcome.done and outcome.value is not None and outcome.value.items:
            worker.held.append(Held(outcome.value))

    def start_to_erase(self, number: int, fault: Fault | None) -> None:
        """Begin an epoch, and let the store begin with a batch."""
        worker, held = self._erasure(number, TAKEN)

        def work() -> None:
            worker.steps.start_delete(held.batch)
            wait_for(held.batch)

        must = (KeyClosed,) if self.is_closed(worker.new_first) else ()
        outcome = self.cleanup_step(worker, work, fault, must=must, tokens=set())
        held.faulty = outcome.faulty
        if outcome.done:
            held.stage = STARTED

    def finish_erasing(self, number: int) -> None:
        """Hear what the store has answered."""
        worker, held = self._erasure(number, STARTED)
        may = (*((Exception,) if held.faulty else ()), *(() if believes(held) else (LeaseLost,)))
        self.cleanup_step(worker, lambda: worker.steps.finish_delete(held.batch), None, may=may, tokens=set())
        held.stage = ANSWERED

    def renew_erasure(self, number: int, fault: Fault | None) -> None:
        """Extend a lease, as if it were time for it."""
        worker, held = self._erasure(number, TAKEN, STARTED, ANSWERED, LOST)
        believed = believes(held)
        if believed:
            held.batch.lease.confirmed(time.monotonic() - LEASE / 2)
        may = () if believed else (LeaseLost,)
        tokens = {held.batch.lease.token}
        self.cleanup_step(worker, lambda: worker.steps.renew(held.batch), fault, may=may, tokens=tokens)

    def settle_erasure(self, number: int, in_halves: bool, fault: Fault | None) -> None:
        """Write what the store has said."""
        worker, held = self._erasure(number, *((ANSWERED,) if self._erasing(ANSWERED) else (TAKEN,)))
        items = held.batch.items
        middle = len(items) // 2 if in_halves else len(items)

        def work() -> Counter[Any]:
            parts = [part for part in (items[:middle], items[middle:]) if part]
            return sum((worker.steps.settle(replace(held.batch, items=part)) for part in parts), Counter())

        def then(_: Outcome) -> None:
            found = {item.ref for item in items if item.result is True}
            final = {ref for ref, row in self.seen.refs.items() if row.state == "deleted" and row.undated}
            assert not found & final - before, "what was there when it was to be gone is confirmed to be gone"

        before = {ref for ref, row in self.seen.refs.items() if row.state == "deleted" and row.undated}
        must = () if believes(held) else (LeaseLost,)
        tokens = {held.batch.lease.token}
        outcome = self.cleanup_step(worker, work, fault, must=must, tokens=tokens, then=then)
        if outcome.done:
            worker.held.remove(held)
        elif isinstance(outcome.error, LeaseLost):
            held.stage = LOST

    def release_erasure(self, number: int, fault: Fault | None) -> None:
        """Give back what will not be settled, or what is settled already."""
        worker, held = self._erasure(number, TAKEN, STARTED, ANSWERED, LOST)
        outcome = self.cleanup_step(worker, lambda: worker.steps.release(held.batch), fault)
        if held in worker.held and (outcome.done or outcome.error):
            worker.held.remove(held)

    # Reservations, the sweep, repairs.

    def reconcile(self, number: int, limit: int, fault: Fault | None) -> None:
        """Take back what was reserved and never used."""
        worker, before = self.cleanups[number], self.seen
        self.cleanup_step(worker, lambda: worker.steps.reconcile(limit), fault, tokens=set())
        for ref, row in self.seen.refs.items():
            old = before.refs.get(ref)
            if old is not None and old.state in ("staged", "candidate") and row.state == "retired":
                assert old.unused, f"{ref} was taken back before its time"

    def begin_sweep(self, number: int, fault: Fault | None) -> None:
        """Begin a round through all refs."""
        worker = self.cleanups[number]
        if worker.sweep is None:
            outcome = self.cleanup_step(worker, lambda: worker.steps.begin_sweep(every=0), fault, tokens=set())
            if outcome.done and outcome.value is not None:
                worker.sweep = Going(outcome.value, self.book.moment)

    def sweep(self, number: int, limit: int, fault: Fault | None) -> None:
        """Look at the next page."""
        there = [worker for worker in self.cleanups if worker.sweep is not None and not worker.sweep.over]
        worker = there[number % len(there)]
        going = worker.sweep
        assert going is not None
        outcome = self.cleanup_step(
            worker, lambda: worker.steps.sweep(going.position, limit), fault, may=(LeaseLost,), tokens=set()
        )
        going.tainted |= outcome.faulty and fault is not None and fault.how.startswith("held")
        if isinstance(outcome.error, LeaseLost):
            worker.sweep = None
        elif outcome.done:
            going.to_repair += outcome.value.to_repair
            going.over = not outcome.value.more

    def repair_what_was_found(self, number: int, fault: Fault | None) -> None:
        """Look after a source that the sweep has found."""
        there = [worker for worker in self.cleanups if worker.sweep is not None and worker.sweep.to_repair]
        worker = there[number % len(there)]
        assert worker.sweep is not None
        outcome = self._repair(worker, worker.sweep.to_repair[0], fault)
        if not outcome.killed and not isinstance(outcome.error, (StoreUnavailable, WorkersPaused)):
            worker.sweep.to_repair.pop(0)

    def repair(self, number: int, ref: int, fault: Fault | None) -> None:
        """Look after a source that names a ref which is not in use."""
        refs = sorted(self.book.dangling & self.seen.named)
        self._repair(self.cleanups[number], refs[ref % len(refs)], fault)

    def _repair(self, worker: Cleaner, ref: str, fault: Fault | None) -> Outcome:
        may = (KeyClosed,) if self.is_closed(worker.new_first) else ()
        old_row = next((row for row in self.book.rows.values() if row.ref == ref), None)

        def then(outcome: Outcome) -> None:
            row = self.seen.refs.get(ref)
            is_reserved = row is not None and row.state in ("staged", "candidate")
            if not outcome.done or outcome.faulty:
                return
            if outcome.value is Repair.UNREADABLE:
                assert ref in self.book.doubtful, "what was never claimed cannot be read"
            if old_row is not None and not old_row.leaving and not is_reserved:
                assert outcome.value is not Repair.LATER, "nobody is in the way"

        return self.cleanup_step(
            worker,
            lambda: worker.steps.repair(ref),
            fault,
            must=self.refusals(),
            may=may,
            tokens=set(),
            rescues=True,
            then=then,
        )

    def complete_sweep(self, number: int, fault: Fault | None) -> None:
        """Note that the round was made to the end."""
        there = [w for w in self.cleanups if w.sweep is not None and w.sweep.over and not w.sweep.to_repair]
        worker = there[number % len(there)]
        going = worker.sweep
        assert going is not None

        def then(outcome: Outcome) -> None:
            if outcome.done and not going.tainted:
                self.book.swept = max(self.book.swept, going.begun)

        self.cleanup_step(
            worker,
            lambda: worker.steps.complete(going.position),
            fault,
            may=(LeaseLost,),
            tokens=set(),
            then=then,
        )
        worker.sweep = None

    # The patrol, and what can be forgotten.

    def begin_patrol(self, number: int, fault: Fault | None) -> None:
        """Begin a round through the store."""
        worker = self.cleanups[number]
        if worker.patrol is None:
            outcome = self.cleanup_step(
                worker, lambda: worker.steps.begin_patrol("default", every=0), fault, tokens=set()
            )
            if outcome.done and outcome.value is not None:
                worker.patrol = Going(outcome.value, self.book.moment)

    def patrol(self, number: int, limit: int, fault: Fault | None) -> None:
        """Look at the next objects; complete the round after the last."""
        there = [worker for worker in self.cleanups if worker.patrol is not None]
        worker = there[number % len(there)]
        going = worker.patrol
        assert going is not None

        def work() -> bool:
            if worker.steps.patrol(going.position, limit):
                return True
            worker.steps.complete(going.position)
            return False

        def then(_: Outcome) -> None:
            if self.world.patrolled_at() != before:  # not by the outcome: a commit that was not answered counts
                self.book.patrolled = max(self.book.patrolled, going.begun)

        before = self.world.patrolled_at()
        outcome = self.cleanup_step(worker, work, fault, may=(LeaseLost, SecretStoreError), tokens=set(), then=then)
        if not outcome.done or not outcome.value:
            worker.patrol = None

    def purge(self, number: int, fault: Fault | None) -> None:
        """Forget final rows that are old enough."""
        before = self.seen
        worker = self.cleanups[number]

        def then(outcome: Outcome) -> None:
            gone = before.refs.keys() - self.seen.refs.keys()
            assert not {ref for ref in gone if self.book.final.get(ref, self.book.moment) >= self.book.patrolled}
            assert not gone & self.seen.named
            self.book.purged |= gone

        self.cleanup_step(worker, lambda: worker.steps.purge(10), fault, tokens=set(), then=then)

    def start_cleanup_anew(self, number: int) -> None:
        """Let a worker die, and start another one, with the key ring that is deployed by now."""
        self.cleanups[number] = self.new_cleanup()

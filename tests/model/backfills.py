"""The rules of the backfill's workers: each step is a rule, so that those of several workers interleave freely."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Batch
from kfs_credentials.errors import KeyClosed, LeaseLost, StoreUnavailable
from tests.model.base import Base, Outcome
from tests.model.faults import Fault
from tests.model.world import ALIAS

LEASE = 3600.0
TAKEN, STARTED, ANSWERED, LOST = "taken", "started", "answered", "lost"


@dataclass
class Held:
    """A batch in the hands of a worker, and how far it has come with it."""

    batch: Any
    stage: str = TAKEN
    faulty: bool = False
    """Its call to the store has met with a fault."""


@dataclass
class Worker:
    """A process, with what it holds."""

    name: str
    steps: Any
    new_first: bool
    held: list[Held] = field(default_factory=list)

    def at(self, *stages: str) -> Held | None:
        """Return the oldest batch at one of these stages."""
        return next((held for held in self.held if held.stage in stages), None)


def believes(held: Held) -> bool:
    """Whether the worker takes its lease for its own, by its own watch."""
    return bool(held.batch.lease.remaining > 0)


class Backfills(Base):
    """Two workers that move credentials."""

    def __init__(self) -> None:
        super().__init__()
        self.backfills = [self.new_backfill(), self.new_backfill()]

    def new_backfill(self) -> Worker:
        """Return a worker that starts now."""
        name = self.new_name("backfill")
        steps = Backfill(using=ALIAS, store=self.world.store, worker=name, lease=LEASE)
        return Worker(name, steps, self.deployed)

    def backfill_step(self, worker: Worker, work: Callable[[], Any], fault: Fault | None, **options: Any) -> Outcome:
        """Make a step of a worker; it is forgotten if it is killed."""
        outcome = self.step(work, worker=worker.name, new_first=worker.new_first, fault=fault, **options)
        if outcome.killed:
            self.backfills[self.backfills.index(worker)] = self.new_backfill()
        return outcome

    def _has(self, *stages: str) -> bool:
        return any(worker.at(*stages) for worker in self.backfills)

    def _one(self, number: int, *stages: str) -> tuple[Worker, Held]:
        there = [(worker, held) for worker in self.backfills for held in worker.held if held.stage in stages]
        return there[number % len(there)]

    def claim_jobs(self, number: int, limit: int, fault: Fault | None) -> None:
        """Lease jobs that wait, or whose worker died."""
        self._take(self.backfills[number], lambda steps, **options: steps.claim(limit, **options), fault)

    def discover(self, number: int, limit: int, fault: Fault | None) -> None:
        """Lease sources that have no job."""
        self._take(self.backfills[number], lambda steps, **options: steps.discover(limit, **options), fault)

    def _take(self, worker: Worker, take: Callable[..., Batch | None], fault: Fault | None) -> None:
        if len(worker.held) == 2:
            return
        outcome = self.backfill_step(
            worker,
            lambda: take(worker.steps, beside=bool(worker.held)),
            fault,
            must=self.refusals(worker.new_first),
            claims=True,
        )
        if outcome.done and outcome.value is not None:
            worker.held.append(Held(outcome.value))

    def start_to_put(self, number: int, fault: Fault | None) -> None:
        """Let the store begin with a batch."""
        worker, held = self._one(number, TAKEN)

        def work() -> None:
            worker.steps.start_put(held.batch)
            wait_for(held.batch)

        outcome = self.backfill_step(worker, work, fault, tokens=set())
        held.stage, held.faulty = STARTED, outcome.faulty

    def finish_putting(self, number: int, fault: Fault | None) -> None:
        """Hear what the store has answered."""
        worker, held = self._one(number, STARTED)
        may = (StoreUnavailable, *((Exception,) if held.faulty else ()), *(() if believes(held) else (LeaseLost,)))
        self.backfill_step(worker, lambda: worker.steps.finish_put(held.batch), fault, may=may, tokens=set())
        held.stage = ANSWERED

    def renew(self, number: int, fault: Fault | None) -> None:
        """Extend a lease, as if it were time for it."""
        worker, held = self._one(number, TAKEN, STARTED, ANSWERED, LOST)
        believed = believes(held)
        if believed:
            held.batch.lease.confirmed(time.monotonic() - LEASE / 2)
        may = () if believed else (LeaseLost,)
        tokens = {held.batch.lease.token}
        self.backfill_step(worker, lambda: worker.steps.renew(held.batch), fault, may=may, tokens=tokens)

    def settle(self, number: int, in_halves: bool, fault: Fault | None) -> None:
        """Look again, and write; in halves, if statements take too long."""
        self._settle(*self._one(number, ANSWERED), in_halves, fault)

    def settle_early(self, number: int, fault: Fault | None) -> None:
        """Do that without having put anything."""
        self._settle(*self._one(number, TAKEN), False, fault)

    def _settle(self, worker: Worker, held: Held, in_halves: bool, fault: Fault | None) -> None:
        items = held.batch.items
        middle = len(items) // 2 if in_halves else len(items)

        def work() -> Counter[Any]:
            parts = [part for part in (items[:middle], items[middle:]) if part]
            return sum((worker.steps.settle(replace(held.batch, items=part)) for part in parts), Counter())

        outcome = self.backfill_step(
            worker,
            work,
            fault,
            must=() if believes(held) else (KeyClosed, LeaseLost),
            may=(KeyClosed,) if self.is_closed(worker.new_first) else (),
            tokens={held.batch.lease.token},
            moves=True,
        )
        if self.is_closed(worker.new_first):
            assert not outcome.done, "something was settled under a closed key"
        if outcome.done:
            worker.held.remove(held)
        elif isinstance(outcome.error, (LeaseLost, KeyClosed)):
            held.stage = LOST

    def release(self, number: int, fault: Fault | None) -> None:
        """Give back what will not be settled, or what is settled already."""
        worker, held = self._one(number, TAKEN, STARTED, ANSWERED, LOST)
        outcome = self.backfill_step(worker, lambda: worker.steps.release(held.batch), fault)
        if held in worker.held and (outcome.done or outcome.error):
            worker.held.remove(held)

    def start_backfill_anew(self, number: int) -> None:
        """Let a worker die, and start another one, with the key ring that is deployed by now."""
        self.backfills[number] = self.new_backfill()


def wait_for(batch: Any) -> None:
    """Wait until the store is done with it, so that nothing happens between two steps."""
    if batch.call is not None:
        while not batch.call.wait(60):
            pass

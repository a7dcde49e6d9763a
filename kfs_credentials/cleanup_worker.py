"""The loop around the cleanup's steps: which step next, and when it is done.

While the store erases one batch, the database settles the one before it and claims the next; between two batches the
worker looks after one page of whatever else there is to do.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from django.db import DatabaseError, InterfaceError

from kfs_credentials.cleanup import PAGE, PARKED_FOR, Cleanup, Erasure, Outcome, PatrolPosition, SweepPosition
from kfs_credentials.conf import settings
from kfs_credentials.errors import (
    KfsCredentialsError,
    LeaseLost,
    SecretStoreError,
    StoreDenied,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
    WorkersPaused,
)
from kfs_credentials.models import WorkerRole
from kfs_credentials.repairs import FINDINGS, Repair
from kfs_credentials.stores import secret_stores
from kfs_credentials.transactions import describe
from kfs_credentials.worker import LOOK_UP_EVERY, End, Summary, Worker, hurried

logger = logging.getLogger(__name__)

T = TypeVar("T")

COUNTING = 0.05
"""The share of the time that may go into counting what is left: a million refs may wait for their horizon."""
DONE = (Outcome.ERASED, Outcome.CONFIRMED, Outcome.PARKED, Outcome.RETAINED)
"""The outcomes that bring a drain nearer to its end."""


class Look(NamedTuple):
    """What was left: how many refs, and when the next of them is due; when it is to be looked at again."""

    left: int
    due_at: float | None
    again_at: float


@dataclass
class CleanupSummary(Summary):
    """What became of refs, besides: `outcomes` of erasures, `repairs` of sources, and counts of the other steps."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    repairs: Counter[Repair] = field(default_factory=Counter)
    retired: int = 0
    kept: int = 0
    """Refs that the sweep kept for a person, since an older one has displaced them."""
    purged: int = 0
    events_purged: int = 0
    unknown: int = 0
    """Objects that the patrol found and no ledger row accounts for."""

    @property
    def findings(self) -> int:
        """What a person has to look at."""
        return sum(self.repairs[what] for what in FINDINGS) + self.unknown + self.outcomes[Outcome.PARKED]


class CleanupWorker(Worker):
    """Runs the cleanup until all rows are final (`watch=False`), or until it is stopped.

    `store`: the alias of the store that is patrolled. `next_move_in` returns how many refs are not final and the
    seconds until the next of them is due, None if there is none: a drain waits for grace, horizon, delays and other
    workers' leases, unless `due_only`. `limit`: the most refs to erase. `progress` is called after each batch.
    """

    what = "refs"
    role = WorkerRole.CLEANUP

    def __init__(
        self,
        steps: Cleanup,
        *,
        next_move_in: Callable[[], tuple[int, float | None]],
        batch_size: int,
        store: str = "default",
        limit: int | None = None,
        watch: bool = False,
        due_only: bool = False,
        progress: Callable[[CleanupSummary], None] = lambda _: None,
    ) -> None:
        super().__init__(steps, batch_size=batch_size, watch=watch)
        self.steps = steps
        self.next_move_in = next_move_in
        self.store = store
        self.limit = limit
        self.due_only = due_only
        self.progress = progress
        self.summary: CleanupSummary = CleanupSummary()
        self.taken = 0
        self._sweep: SweepPosition | None = None
        self._patrol: PatrolPosition | None = None
        self._sweep_at = self._patrol_at = 0.0
        # Whether a drain has made its one sweep and its one patrol, or needs none.
        self._sweep_over = self._patrol_over = False
        self._reconcile_at = 0.0
        self._in_flight: Erasure | None = None
        self._found: dict[str, tuple[Repair, float]] = {}
        self._later: set[str] = set()
        self._purging = False
        self._purge_events_at = 0.0
        self._looked: Look | None = None
        self._left_before = -1

    def run(self) -> CleanupSummary:
        """Work until there is an end; return what was done and why it ended."""
        self._work()
        return self.summary

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            if self._in_flight is not None:
                self._give_back(self._in_flight)
            for position in (self._sweep, self._patrol):
                if position is not None:
                    self._abandon_round(position)
            self._in_flight = self._sweep = self._patrol = None

    def _loop(self) -> None:
        while not self.stop:
            if self.limit is not None and self.taken >= self.limit and self._in_flight is None:
                self._end(End.LIMIT, f"the limit of {self.limit} is reached")
                return
            try:
                erased = self._erase()
                if self._pause is not None:
                    if not erased and not self._wait_for_resume():
                        return
                    continue
                swept = self._look_after()
                # A patrol reads the whole store: while there is something to erase, that comes first. A drain sweeps
                # before it; who watches does both at a time, since the next sweep may be due when one is over.
                busy = erased or swept
                if not erased and (self.watch or not swept):
                    busy = self._go_round() or busy
                self._tick()
                if busy:
                    self._looked = None
                elif not self._wait():
                    return
            except StoreUnavailable as error:
                self._looked = None
                self._wait_for_store(error, self._renew_in_flight)
            except WorkersPaused as pause:
                self._pause = pause
        self._end(End.INTERRUPTED, "interrupted by a signal")
        if self._in_flight is not None:
            erasure, self._in_flight = self._in_flight, None
            with suppress(StoreUnavailable):  # then it was given back
                self._finish(erasure)

    # Erase.

    def _erase(self) -> bool:
        """Claim a batch and start the store on it, then settle the one before; return whether there was either."""
        previous, self._in_flight = self._in_flight, None
        taken = None
        try:
            # A row that is leased alone is at work alone: if this process dies, it is held responsible.
            if previous is None or previous.lease.size > 1:
                taken = self._take(previous)
        finally:
            # Whatever ended the claim, the batch before it is settled or given back.
            if previous is not None:
                self._finish(previous)
        if self._in_flight is not None and self._in_flight.lease.size == 1:
            alone, self._in_flight = self._in_flight, None
            self._finish(alone)
        for ref in taken.in_use if taken is not None else ():
            if self.stop:
                break  # the next sweep finds them
            self._repair(ref)
        return previous is not None or taken is not None

    def _take(self, previous: Erasure | None) -> Erasure | None:
        """Claim the next batch, and start the store on it. `previous`: what is at work besides."""
        if self.stop or self._pace.delay():
            return None
        size = self._at_once
        if self.limit is not None:
            size = min(size, self.limit - self.taken)
        if size <= 0:
            return None
        self._pause = None
        try:
            erasure = self._in_database(lambda: self.steps.claim(size, beside=previous is not None))
        except WorkersPaused as pause:
            self._pause = pause
            return None
        self._was_paused = False
        if erasure is not None:
            self._later.update(erasure.in_use)  # whatever keeps this worker from it now
        if erasure is not None and erasure.items:
            self.taken += len(erasure.items)
            self._pace.spend(len(erasure.items))
            self._in_flight = erasure
            try:
                self._start_delete(erasure, previous)
            except KfsCredentialsError as error:
                # No store is at work on it: nobody has to wait for it, and it must not look as if it had killed us.
                self._in_flight = None
                # Some answers there may be, if there was no room: of what could not be erased to make some.
                if not (isinstance(error, StoreFull) and self._settle(erasure)):
                    self._give_back(erasure)
                if not isinstance(error, LeaseLost):  # while room was made: whoever has it by now goes on with it
                    raise
        return erasure

    def _finish(self, erasure: Erasure) -> None:
        settled = False
        try:
            trouble = self._delete(erasure)
            settled = self._settle(erasure)
        finally:
            if not settled:
                # Whatever ended this, no ref of it must look as if its worker had died.
                self._give_back(erasure)
        self.progress(self.summary)
        if trouble is not None:
            raise trouble
        self._grow()

    def _delete(self, erasure: Erasure) -> StoreUnavailable | StoreDenied | StoreMisconfigured | None:
        """Wait for the stores, renewing leases meanwhile; return what is wrong with one of them, if anything."""
        try:
            while erasure.call is not None or self._start_delete(erasure):
                while erasure.call is not None and not erasure.call.wait(
                    min(erasure.lease.duration / 6, LOOK_UP_EVERY)
                ):
                    if self.stop.overdue or erasure.lease.is_ending:
                        return None  # given back; what is erased by then is found absent next time
                    self._renew(erasure)
                    self._renew_in_flight()
                if trouble := self._finish_delete(erasure):
                    self._less_at_once(trouble, len(erasure.items))
                    return trouble
                self._store_answered()
        except (StoreUnavailable, StoreDenied, StoreMisconfigured) as error:
            return error
        except LeaseLost:
            pass
        return None

    def _finish_delete(self, erasure: Erasure) -> StoreUnavailable | None:
        """Note what a store answered; return what is wrong with it for now, if anything."""
        try:
            self.steps.finish_delete(erasure)
        except StoreUnavailable as error:
            return error
        # Of some refs only: they are given back, and would be due again at once.
        return next((item.result for item in erasure.items if isinstance(item.result, StoreUnavailable)), None)

    def _start_delete(self, erasure: Erasure, previous: Erasure | None = None) -> bool:
        """Start the next store; return False if none is left to ask, or if the database is out of reach.

        Renews leases while that takes long. Raises `StoreUnavailable` if this worker is to stop meanwhile.
        """

        def meanwhile() -> None:
            if self.stop.overdue or erasure.lease.is_ending:
                raise StoreUnavailable("this worker stops before the secret store has answered")
            for waiting in (previous, erasure, self._in_flight):
                if waiting is not None:
                    self._renew(waiting)

        return bool(self._in_database(lambda: self.steps.start_delete(erasure, meanwhile)))

    def _renew_in_flight(self) -> None:
        if self._in_flight is not None:
            self._renew(self._in_flight)

    def _settle(self, erasure: Erasure) -> bool:
        tries = 0

        def settle() -> Counter[Outcome]:
            nonlocal tries
            tries += 1
            outcomes = self._settled(erasure)
            if tries > 1 and outcomes.total() < len(erasure.items):
                # The answer to a commit may have been lost, not the commit: then these are erased, and not "lost".
                outcomes[Outcome.ERASED] = max(outcomes[Outcome.ERASED], self.steps.erased(erasure))
            return outcomes

        try:
            outcomes = self._in_database(settle)
        except LeaseLost:
            outcomes = None
        if outcomes is None:
            return False
        self.taken -= outcomes[Outcome.RELEASED]
        self.summary.outcomes += outcomes
        self.summary.lost += len(erasure.items) - outcomes.total()
        if any(outcomes[outcome] for outcome in DONE):
            self._moved_at = time.monotonic()
        return True

    def _give_back(self, erasure: Erasure) -> int:
        """Release what is in flight, and count it."""
        released = super()._give_back(erasure)
        self.taken -= released
        self.summary.outcomes[Outcome.RELEASED] += released
        return released

    # Everything else, a page at a time.

    def _look_after(self) -> bool:
        """Reconcile, sweep and purge a page; return whether there may be more."""
        return self._reconcile() | self._go_sweeping()

    def _reconcile(self) -> bool:
        if time.monotonic() < self._reconcile_at:
            return False
        counts = self._in_database(lambda: self.steps.reconcile(self._size))
        if not counts:
            self._reconcile_at = time.monotonic() + settings.POLL_INTERVAL
            return False
        self.summary.retired += counts["retired"]
        if counts["retired"] or counts["activated"]:
            self._moved_at = time.monotonic()
        return True

    def _go_sweeping(self) -> bool:
        if self._sweep is None:
            if self._sweep_over or time.monotonic() < self._sweep_at:
                return False
            every = self._every(settings.RECOVER_AFTER)
            self._sweep_at = time.monotonic() + max(every, settings.POLL_INTERVAL)
            self._sweep = self._in_database(lambda: self.steps.begin_sweep(every=every))
            if self._sweep is None:
                return False
        position = self._sweep
        try:
            page = self._in_database(lambda: self.steps.sweep(position, self._page()))
        except LeaseLost:
            self._sweep = None
            return False
        if page is None:
            return False
        self.summary.retired += page.retired
        self.summary.kept += page.kept
        try:
            for ref in page.to_repair:
                if self.stop:
                    return True  # not to the end: `run` gives the round up
                self._in_database(lambda: self.steps.renew_round(position))
                position.found += self._repair(ref) in FINDINGS
        except LeaseLost:
            self._sweep = None
            return False
        except (StoreUnavailable, WorkersPaused):
            # The refs of this page that were not repaired yet are found by a sweep from the start.
            self._abandon_round(position)
            self._sweep, self._sweep_at = None, 0.0
            raise
        if page.retired or page.kept or not page.more:
            self._moved_at = time.monotonic()  # a page that moved nothing is no move: it may be looked at for ever
        if not page.more:
            self._sweep = None
            if self._narrow:
                self._abandon_round(position)  # others have not been looked at
            if self._narrow or self._completed(position):
                self._sweep_over = not self.watch
        return True

    def _repair(self, ref: str) -> Repair | None:
        if ref in self._found and self._is_known(ref):
            self._later.discard(ref)
            return self._found[ref][0]
        self._renew_in_flight()
        repair = self._in_database(lambda: self.steps.repair(ref))
        # A finding stays until a person has been there, and each sweep comes across it.
        if repair is not None and ref not in self._found:
            self.summary.repairs[repair] += 1
        if repair is not None and repair in FINDINGS:
            self._found[ref] = repair, time.monotonic()
        if repair in (Repair.RESCUED, Repair.REGISTERED):
            self._store_answered()
        if repair is None or repair is Repair.LATER:
            self._later.add(ref)
        else:
            self._later.discard(ref)
        return repair

    def _is_known(self, ref: str) -> bool:
        """Return whether looking again would tell nothing new.

        A run that ends does not look twice; and one that stays would make a copy each time, of what the database
        refuses, for nothing.
        """
        repair, seen_at = self._found[ref]
        return not self.watch or (repair is Repair.REFUSED and time.monotonic() - seen_at < PARKED_FOR)

    def _go_round(self) -> bool:
        """Patrol a page of the store, or purge a batch after it; return whether there may be more."""
        if self._purge_events():
            return True
        if self._purging:
            purged = self._in_database(lambda: self.steps.purge(self._size))
            if purged is not None:
                self._purging = purged > 0
                self.summary.purged += purged
            return bool(purged)
        if self._patrol is None:
            if self._narrow or not secret_stores[self.store].can_list:
                self._patrol_over = True
            if self._patrol_over or time.monotonic() < self._patrol_at or not self._quiet():
                return False
            every = self._every(settings.LATE_WRITE_HORIZON)
            self._patrol_at = time.monotonic() + max(every, settings.POLL_INTERVAL)
            self._patrol = self._in_database(lambda: self.steps.begin_patrol(self.store, every=every))
            if self._patrol is None:
                return False
        position = self._patrol
        try:
            more = self._in_database(lambda: self.steps.patrol(position))
        except LeaseLost:
            self._patrol = None
            return False
        except (StoreDenied, StoreMisconfigured):
            raise
        except SecretStoreError as error:
            self._abandon_round(position)
            self._patrol, self._patrol_at = None, 0.0
            trouble = error if isinstance(error, StoreUnavailable) else StoreUnavailable(str(error))
            raise trouble from None
        if more is None:
            return False
        self._store_answered()
        if not more:
            self._moved_at = time.monotonic()
            self._patrol = None
            self.summary.unknown = position.found
            if self._completed(position):
                self._patrol_over, self._purging = not self.watch, True
                self._purge_events_at = 0.0
        return True

    def _purge_events(self) -> bool:
        """Delete a batch of old events; return whether there may be more. They are nobody's alone."""
        if self._narrow or time.monotonic() < self._purge_events_at:
            return False
        purged = self._in_database(lambda: self.steps.purge_events(self._size))
        self.summary.events_purged += purged or 0
        if not purged:
            pause = max(settings.RECOVER_AFTER, settings.POLL_INTERVAL) if self.watch else math.inf
            self._purge_events_at = time.monotonic() + pause
        return bool(purged)

    def _completed(self, position: SweepPosition | PatrolPosition) -> bool:
        """Note that a round was made to the end; False if another worker has begun anew, or nobody could be told."""
        try:
            return bool(self._in_database(lambda: self.steps.complete(position)))
        except LeaseLost:
            return False

    def _every(self, seconds: float) -> float:
        """Return how often a round is made: a drain makes one, whenever the last one was."""
        return seconds if self.watch else 0.0

    def _page(self) -> int:
        """Return how many rows a sweep looks at in one step: fewer where statements take too long."""
        return max(1, PAGE * self._size // self.batch_size)

    @property
    def _narrow(self) -> bool:
        """Whether this worker looks at the refs of one tenant or space only."""
        return self.steps.tenant is not None or self.steps.space is not None

    def _quiet(self) -> bool:
        """Return whether it is time for a drain's patrol: when nothing is left that it will wait for."""
        if self.watch or self.due_only:
            return True
        look = self._look()
        return look is not None and (look.left == 0 or self._is_too_far(look))

    def _abandon_round(self, position: SweepPosition | PatrolPosition) -> None:
        try:
            with hurried():
                self.steps.give_up(position)
        except (DatabaseError, InterfaceError) as error:
            logger.info("a round could not be given up (%s); its lease runs out", describe(error))

    # When to wait, when to stop.

    def _look(self) -> Look | None:
        """Return what is left, None if the database is out of reach. Looks anew after each move, and now and then."""
        if self._looked is None or time.monotonic() >= self._looked.again_at:
            asked_at = time.monotonic()
            left = self._in_database(self.next_move_in)
            now = time.monotonic()
            if left is None:
                return None
            count, seconds = left
            due_at = None if seconds is None else now + seconds
            self._looked = Look(count, due_at, again_at=now + (now - asked_at) / COUNTING)
        return self._looked

    def _wait(self) -> bool:
        """Nothing is due: return False if that is the end, else wait a little and return True."""
        if self.stop:
            return True  # the loop ends
        if delay := self._pace.delay():
            self.stop.wait(delay)
            return True
        if self.watch:
            self._idle(settings.POLL_INTERVAL)
            return True
        look = self._look()
        wait = settings.POLL_INTERVAL
        if look is not None:
            seconds = None if look.due_at is None else look.due_at - time.monotonic()
            if self.due_only and (seconds is None or seconds > 0):
                return self._again()
            if look.left == 0 and self._sweep_over and self._patrol_over:
                return self._again()
            if look.left != self._left_before:
                self._left_before, self._moved_at = look.left, time.monotonic()
            if self._is_too_far(look):
                self._end(End.STUCK, f"nothing of {look.left:,} is due for {seconds:.0f} s")
                return False
            if seconds is not None and seconds > 0:
                wait = min(wait, seconds)
            # Else it is due, and somebody has it locked.
        if self._out_of_patience(database=look is not None):
            return False
        self._reconcile_at = 0.0
        self.progress(self.summary)  # a drain may wait for grace and horizon
        self._idle(wait)
        return True

    def _again(self) -> bool:
        """Before the end, look once more after the sources whose rows somebody held; return whether there were any."""
        later = set(self._later)
        for ref in later:
            self._repair(ref)
        # Once: what is held still is left to the next run.
        again, self._later = bool(later - self._later), set()
        return again

    def _is_too_far(self, look: Look) -> bool:
        """Return whether a drain will not wait for what is left, since nothing of it is due for too long."""
        return look.due_at is not None and look.due_at - time.monotonic() > self._patience

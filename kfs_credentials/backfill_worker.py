"""The loop around the backfill's steps: which step next.

While the store makes one batch durable, the database settles the one before it and leases the next.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Batch, Move, Put
from kfs_credentials.conf import settings
from kfs_credentials.errors import LeaseLost, StoreDenied, StoreMisconfigured, StoreUnavailable, WorkersPaused
from kfs_credentials.models import WorkerRole
from kfs_credentials.worker import LOOK_UP_EVERY, NAMED, End, Summary, Worker

logger = logging.getLogger(__name__)

MOVED = (Move.ACTIVATE, Move.ADOPT, Move.REFRESH, Move.ABANDON, Move.FAIL)
"""The moves that bring a drain nearer to its end."""


@dataclass
class BackfillSummary(Summary):
    """How many of each move a run made, besides."""

    moves: Counter[Move] = field(default_factory=Counter)
    rejected: int = 0
    empty_claims: int = 0


class BackfillWorker(Worker):
    """Runs the backfill until nothing is left (`watch=False`), or until it is stopped.

    `remaining` returns how many sources and jobs are left to move, as a tuple: a drain waits for delayed retries, for
    other workers' leases and for locked rows, and gives up when it has stayed the same for too long. `limit`: the
    most sources to take. `progress` is called with the moves so far after each batch.
    """

    what = "jobs"
    role = WorkerRole.BACKFILL

    def __init__(
        self,
        steps: Backfill,
        *,
        remaining: Callable[[], tuple[int, ...]],
        batch_size: int,
        limit: int | None = None,
        watch: bool = False,
        progress: Callable[[BackfillSummary], None] = lambda _: None,
    ) -> None:
        super().__init__(steps, batch_size=batch_size, watch=watch)
        self.steps = steps
        self.remaining = remaining
        self.limit = limit
        self.progress = progress
        self.summary: BackfillSummary = BackfillSummary()
        self.taken = 0
        self._claim_after = 0.0
        self._left_before: tuple[int, ...] = ()

    def run(self) -> BackfillSummary:
        """Work until there is an end; return what was done and why it ended."""
        self._work()
        if self.steps.rejected:
            self.summary.rejected = len(self.steps.rejected)
            some = ", ".join(sorted(map(str, self.steps.rejected))[:NAMED])
            logger.warning("the database rejects the job of %d sources: %s", len(self.steps.rejected), some)
        return self.summary

    def _run(self) -> None:
        previous: Batch | None = None
        in_flight: Batch | None = None
        try:
            while True:
                previous, in_flight = in_flight, None
                # A row that is leased alone is at work alone: if this process dies now, it is held responsible.
                alone = previous is not None and previous.lease.size == 1
                if not alone:
                    in_flight = self._take(beside=previous is not None)
                if in_flight is not None:
                    self.steps.start_put(in_flight)
                if previous is not None:
                    self._settle(previous, also=in_flight)
                    previous = None
                self._tick()
                if in_flight is None and not alone and not self._wait():
                    return
        finally:
            # Whatever ended this run, no job of it must look as if its worker had died. What is settled is not held.
            for batch in (previous, in_flight):
                if batch is not None:
                    self._give_back(batch)

    # Which step next.

    def _take(self, *, beside: bool) -> Batch | None:
        """Lease the next batch: jobs that wait before sources that have none yet. `beside`: another one is at work."""
        if self.stop or self._pace.delay():
            return None
        size = self._at_once
        if self.limit is not None:
            size = min(size, self.limit - self.taken)
        if size <= 0:
            return None
        self._pause = None
        try:
            batch = self._in_database(lambda: self._claim(size, beside=beside))
            if batch is None and not self.stop:
                batch = self._in_database(lambda: self.steps.discover(size, beside=beside))
        except WorkersPaused as pause:
            self._pause = pause
            return None
        except StoreUnavailable as error:  # it is being bound at this moment
            self._wait_for_store(error, lambda: None)
            return None
        self._was_paused = False
        if batch is not None:
            self.taken += len(batch.items)
            self._pace.spend(len(batch.items))
        return batch

    def _claim(self, size: int, *, beside: bool) -> Batch | None:
        # While sources are being discovered nothing waits, as a rule: looking each time would be a statement in vain.
        if time.monotonic() < self._claim_after:
            return None
        batch = self.steps.claim(size, beside=beside)
        if batch is None:
            self.summary.empty_claims += 1
            self._claim_after = time.monotonic() + settings.POLL_INTERVAL
        else:
            self._claim_after = 0.0
        return batch

    def _settle(self, batch: Batch, also: Batch | None) -> None:
        trouble = self._finish_put(batch, also)
        if trouble is None and any(item.put is Put.STORED for item in batch.items):
            self._store_answered()
        tries = 0

        def settle() -> Counter[Move]:
            nonlocal tries
            tries += 1
            moves = self._settled(batch)
            if tries > 1:
                # The answer to a commit may have been lost, not the commit: then these rows are done, and not "lost".
                moves[Move.ACTIVATE] = max(moves[Move.ACTIVATE], self.steps.moved(batch))
            return moves

        try:
            settled = self._in_database(settle)
        except LeaseLost:
            settled = Counter()
        moves = Counter({Move.RELEASE: len(batch.items)}) if settled is None else settled
        if settled is None or moves.total() < len(batch.items):
            # Not settled, or passed over since somebody held the rows: those that are still this lease's.
            self._give_back(batch)
        self.summary.moves += moves
        self.summary.lost += len(batch.items) - moves.total()
        if any(moves[move] for move in MOVED):
            self._moved_at = time.monotonic()
        if moves[Move.RELEASE]:
            # What was just given back is due at once, and would be claimed again and again: others first.
            self._claim_after = time.monotonic() + settings.POLL_INTERVAL
        elif moves[Move.REFRESH]:
            self._claim_after = 0.0
        if trouble is None:
            self._grow()
        self._less_at_once(trouble, len(batch.items))
        self.progress(self.summary)
        if isinstance(trouble, StoreUnavailable):
            self._wait_for_store(trouble, lambda: None if also is None else self._renew(also))
        elif trouble is not None:
            raise trouble

    def _finish_put(
        self, batch: Batch, also: Batch | None
    ) -> StoreUnavailable | StoreDenied | StoreMisconfigured | None:
        """Wait for the store, renewing the leases of both batches; return what is wrong with the store, if anything."""
        try:
            while batch.call is not None and not batch.call.wait(min(batch.lease.duration / 6, LOOK_UP_EVERY)):
                if self.stop.overdue or batch.lease.is_ending:
                    return None  # given back; if the store still finishes, the next worker finds its secrets there
                self._renew(batch)
                if also is not None:
                    self._renew(also)
            self.steps.finish_put(batch)
        except (StoreUnavailable, StoreDenied, StoreMisconfigured) as error:
            return error
        except LeaseLost:
            pass
        return None

    # When to wait, when to stop.

    def _wait(self) -> bool:
        """Nothing is at hand: return False if that is the end, else wait a little and return True."""
        if self.stop:
            self._end(End.INTERRUPTED, "interrupted by a signal")
            return False
        if self.limit is not None and self.taken >= self.limit:
            self._end(End.LIMIT, f"the limit of {self.limit} is reached")
            return False
        if self._pause is not None:
            return self._wait_for_resume()
        if delay := self._pace.delay():
            self.stop.wait(delay)
            return True
        self._claim_after = 0.0
        if not self.watch:
            left = self._in_database(self.remaining)
            if left is not None:
                if not any(left):
                    return False
                if left != self._left_before:
                    self._left_before, self._moved_at = left, time.monotonic()
            if self._out_of_patience(database=left is not None):
                return False
        self._idle(settings.POLL_INTERVAL)
        return True

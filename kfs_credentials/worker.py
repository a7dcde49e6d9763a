"""The loop around the backfill's steps: which step next, when to wait, when to stop, what a fault means.

One thread. While the store makes one batch durable, the database settles the one before it and leases the next; the
worker renews leases between its steps, so that it needs one connection and no heartbeat of its own.
"""

from __future__ import annotations

import enum
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar

from django.db import DatabaseError, InterfaceError, connections

from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Batch, Move, Put
from kfs_credentials.conf import settings
from kfs_credentials.errors import (
    ImproperlyPrepared,
    LeaseLost,
    StoreDenied,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.transactions import TRIES, Fault, describe, fault, jittered, pause_before_try

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_WITHIN = 6.0
"""Seconds that a stopping worker waits for a batch before it gives it back; process managers allow ten."""
HURRIED_LOCK_TIMEOUT = 1.0
"""Seconds that a stopping worker waits for a lock at most, and any worker that gives back a batch."""
LOOK_UP_EVERY = 0.25
"""Seconds after which a worker that waits looks at its leases and at whether it should stop."""
NAMED = 20
"""How many rejected sources the log names."""
MOVED = (Move.ACTIVATE, Move.ADOPT, Move.REFRESH, Move.ABANDON, Move.FAIL)
"""The moves that bring a drain nearer to its end."""


class End(enum.Enum):
    """Why a run ended."""

    DRAINED = "drained"
    LIMIT = "limit"
    INTERRUPTED = "interrupted"
    STUCK = "stuck"
    DENIED = "denied"
    UNREACHABLE = "unreachable"


@dataclass
class Summary:
    """What a run did: how many of each move, why it ended, and what an operator should know besides."""

    moves: Counter[Move] = field(default_factory=Counter)
    lost: int = 0
    rejected: int = 0
    empty_claims: int = 0
    end: End = End.DRAINED
    reason: str = ""


class Stop:
    """Asked to stop by SIGTERM or SIGINT. A second signal leaves at once, as if there were no handler."""

    def __init__(self) -> None:
        # No lock and no event: a signal's handler runs on the thread that waits, and could wait for itself.
        self._deadline: float | None = None

    def __bool__(self) -> bool:
        return self._deadline is not None

    def ask(self) -> None:
        """Ask the worker to stop."""
        if self._deadline is None:
            self._deadline = time.monotonic() + STOP_WITHIN

    def wait(self, seconds: float) -> bool:
        """Wait, for less if asked to stop meanwhile; return whether asked."""
        until = time.monotonic() + seconds
        while not self and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_UP_EVERY))
        return bool(self)

    @property
    def overdue(self) -> bool:
        """True once a batch is to be given back rather than waited for."""
        return self._deadline is not None and time.monotonic() > self._deadline

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen to SIGTERM and SIGINT, where this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(_: int, __: FrameType | None) -> None:
            for number in before:
                signal.signal(number, signal.SIG_DFL)
            self.ask()

        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Backoff:
    """Delays that double from one second to RETRY_MAX, each cut short at random: workers must not return together."""

    def __init__(self) -> None:
        self.failures = 0

    def reset(self) -> None:
        """Note a success."""
        self.failures = 0

    def next(self, at_least: float | None = None) -> float:
        """Return the seconds to wait now; never less than `at_least`, which the store asked for."""
        self.failures = min(self.failures + 1, 30)
        longest = min(2.0 ** (self.failures - 1), settings.RETRY_MAX)
        return max(jittered(longest), at_least or 0.0)


def hurried() -> AbstractContextManager[None]:
    """Let transactions that begin in this block wait for locks for a moment only."""
    return settings.overridden({"LOCK_TIMEOUT": min(settings.LOCK_TIMEOUT, HURRIED_LOCK_TIMEOUT)})


class Pace:
    """At most so many secrets a second."""

    def __init__(self, per_second: float | None) -> None:
        self.per_second = per_second
        self._free_at = time.monotonic()

    def batch(self, size: int) -> int:
        """Return the most that one batch may take: a second's worth, so that the rate is even."""
        return size if self.per_second is None else max(1, min(size, int(self.per_second)))

    def delay(self) -> float:
        """Return the seconds until more may be taken."""
        return max(0.0, self._free_at - time.monotonic())

    def spend(self, secrets: int) -> None:
        """Note that so many were taken."""
        if self.per_second is not None:
            self._free_at = max(self._free_at, time.monotonic()) + secrets / self.per_second


class BackfillWorker:
    """Runs the backfill until nothing is left (`watch=False`), or until it is stopped.

    `remaining` returns how many sources and jobs are left to move, as a tuple: a drain waits for delayed retries, for
    other workers' leases and for locked rows, and gives up when it has stayed the same for too long. `limit`: the
    most sources to take. `progress` is called with the moves so far after each batch.
    """

    def __init__(
        self,
        steps: Backfill,
        *,
        remaining: Callable[[], tuple[int, ...]],
        batch_size: int,
        limit: int | None = None,
        watch: bool = False,
        progress: Callable[[Summary], None] = lambda _: None,
    ) -> None:
        self.steps = steps
        self.remaining = remaining
        self.batch_size = batch_size
        self.limit = limit
        self.watch = watch
        self.progress = progress
        self.stop = Stop()
        self.summary = Summary()
        self.taken = 0
        self._size = batch_size
        self._pace = Pace(settings.RATE_LIMIT)
        self._store_backoff = Backoff()
        self._trouble: StoreUnavailable | None = None
        self._claim_after = 0.0
        self._left_before: tuple[int, ...] = ()
        self._moved_at = time.monotonic()

    def run(self) -> Summary:
        """Work until there is an end; return what was done and why it ended."""
        with self.stop.on_signals():
            try:
                self._run()
            except (StoreDenied, StoreMisconfigured) as error:
                self._end(End.DENIED, str(error))
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
        size = self._pace.batch(self._size)
        if self.limit is not None:
            size = min(size, self.limit - self.taken)
        if size <= 0:
            return None
        batch = self._in_database(lambda: self._claim(size, beside=beside))
        if batch is None and not self.stop:
            batch = self._in_database(lambda: self.steps.discover(size, beside=beside))
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
            self._store_backoff.reset()
            self._trouble = None
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
        self._size = min(self.batch_size, self._size + max(1, self.batch_size // 20))
        self.progress(self.summary)
        if isinstance(trouble, StoreUnavailable):
            self._trouble = trouble
            self._wait_for_store(trouble, also)
        elif trouble is not None:
            raise trouble

    def _settled(self, batch: Batch) -> Counter[Move]:
        try:
            return self.steps.settle(batch)
        except DatabaseError as error:
            if fault(error) is not Fault.TOO_MUCH or len(batch.items) == 1:
                raise
        # It took longer than the server allows: in halves, and with smaller batches from here on.
        middle = len(batch.items) // 2
        self._size = max(1, min(self._size, middle))
        parts = [Batch(batch.lease, batch.items[:middle]), Batch(batch.lease, batch.items[middle:])]
        return sum((self._settled(part) for part in parts), Counter())

    def _finish_put(
        self, batch: Batch, also: Batch | None
    ) -> StoreUnavailable | StoreDenied | StoreMisconfigured | None:
        """Wait for the store, renewing the leases of both batches; return what is wrong with the store, if anything."""
        try:
            while batch.call is not None and not batch.call.wait(min(batch.lease.duration / 6, LOOK_UP_EVERY)):
                if self.stop.overdue:
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

    def _renew(self, batch: Batch) -> None:
        try:
            self.steps.renew(batch)
        except LeaseLost:
            pass  # the store's guard and the fence say so too, where it matters
        except (DatabaseError, InterfaceError) as error:
            # No answer is not a renewal. The lease's own watch stops this worker before its next write.
            logger.warning("a lease could not be renewed (%s)", describe(error))
            connections[self.steps.using].close()

    def _give_back(self, batch: Batch) -> None:
        """Release what is in flight. What cannot be released now is tried again later, and expires by itself."""
        try:
            with hurried():
                self.steps.release(batch)
        except (DatabaseError, InterfaceError) as error:
            logger.warning("jobs could not be given back yet (%s)", describe(error))

    # When to wait, when to stop.

    def _wait(self) -> bool:
        """Nothing is at hand: return False if that is the end, else wait a little and return True."""
        if self.stop:
            self._end(End.INTERRUPTED, "interrupted by a signal")
            return False
        if self.limit is not None and self.taken >= self.limit:
            self._end(End.LIMIT, f"the limit of {self.limit} is reached")
            return False
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
        self.stop.wait(settings.POLL_INTERVAL)
        return True

    def _wait_for_store(self, trouble: StoreUnavailable, also: Batch | None) -> None:
        delay = self._store_backoff.next(trouble.retry_after)
        logger.warning("the secret store is unavailable, waiting %.1f s: %s", delay, trouble)
        if not self.watch and self._out_of_patience(database=True):
            self.stop.ask()
        until = time.monotonic() + delay
        while (left := until - time.monotonic()) > 0 and not self.stop.wait(min(left, LOOK_UP_EVERY)):
            if also is not None:
                self._renew(also)

    def _out_of_patience(self, *, database: bool) -> bool:
        """Return whether nothing has moved for so long that a drain gives up; note why. `database`: it answers."""
        # The lease of a worker that died has to run out meanwhile.
        patience = 2 * max(settings.RETRY_MAX, settings.LEASE)
        if time.monotonic() - self._moved_at <= patience:
            return False
        if not database:
            self._end(End.UNREACHABLE, "the database is out of reach")
        elif self._trouble is not None:
            self._end(End.UNREACHABLE, f"the secret store is out of reach: {self._trouble}")
        else:
            self._end(End.STUCK, f"nothing has moved for {patience:g} s")
        return True

    def _end(self, end: End, reason: str) -> None:
        if self.summary.end is End.DRAINED:
            self.summary.end, self.summary.reason = end, reason

    def _in_database(self, work: Callable[[], T]) -> T | None:
        """Do `work`, whole transactions of it again where that helps; None if the database is out of reach for now.

        A worker that is asked to stop tries nothing again: what it holds is given back then. No attempt of any job is
        counted. Raises `ImproperlyPrepared` where only a person can help.
        """
        for attempt in range(1, TRIES + 1):
            try:
                with hurried() if self.stop else nullcontext():
                    return work()
            except (DatabaseError, InterfaceError) as error:
                meaning, what = fault(error), describe(error)
            # Out here the error is gone: its text and its frames may hold a row.
            if meaning is Fault.DATA:
                raise ImproperlyPrepared(
                    f"the database refused to change a row ({what}), and it cannot be told which: see the server's log "
                    "for the constraint or trigger. What this worker had leased is given back."
                )
            if meaning is Fault.REFUSED:
                raise ImproperlyPrepared(
                    f"the database refused a statement of this worker ({what}). Check that `manage.py migrate` has run "
                    "and that this role may read and write the tables."
                )
            connections[self.steps.using].close_if_unusable_or_obsolete()
            if meaning is Fault.TOO_MUCH:
                self._size = max(1, self._size // 2)
            logger.info("the database could not answer (%s), try %d of %d", what, attempt, TRIES)
            if self.stop:
                return None
            self.stop.wait(pause_before_try(attempt))
        logger.warning("the database could not answer %d times, going on later", TRIES)
        # With a new connection: after a fail-over this one may be to a server that is read-only now.
        connections[self.steps.using].close()
        return None

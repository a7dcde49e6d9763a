"""What every worker's loop needs: when to wait, when to stop, what a fault means.

One thread, one connection: a worker renews its leases between its steps, and has no heartbeat of its own.
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
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, ClassVar, Protocol, TypeVar

from django.db import DatabaseError, InterfaceError, connections

from kfs_credentials.audit import acting_as
from kfs_credentials.conf import settings
from kfs_credentials.errors import (
    DatabaseRefused,
    ImproperlyPrepared,
    KfsCredentialsError,
    LeaseLost,
    StoreDenied,
    StoreMisconfigured,
    StoreUnavailable,
    WorkersPaused,
)
from kfs_credentials.models import WorkerRole
from kfs_credentials.pause import is_own, pause_workers, reason_to_pause
from kfs_credentials.ticks import Ticker, reason_of, refuse
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
"""How many rows of a kind the log names."""


class End(enum.Enum):
    """Why a run ended."""

    DRAINED = "drained"
    LIMIT = "limit"
    INTERRUPTED = "interrupted"
    STUCK = "stuck"
    DENIED = "denied"
    PAUSED = "paused"
    UNREACHABLE = "unreachable"


@dataclass
class Summary:
    """What a run did: why it ended, and what an operator should know besides."""

    lost: int = 0
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


class Steps(Protocol):
    """What both state machines have in common, for whoever makes their steps.

    A batch is rows under one lease: `Batch` or `Erasure`, made of a lease and a list of items.
    """

    using: str
    worker: str

    def renew(self, batch: Any, /) -> None:
        """Extend the lease of a batch; raises `LeaseLost`."""

    def settle(self, batch: Any, /) -> Counter[Any]:
        """Write what became of a batch, in one transaction; return how many of each."""

    def release(self, batch: Any, /) -> int:
        """Give back what is left of a batch; return how many rows."""


class Worker:
    """A loop over steps, until nothing is left (`watch=False`) or until it is stopped.

    `batch_size`: the most rows of one batch. Subclasses implement `_run`, and say `what` their rows are and
    which `role` they have.
    """

    what: ClassVar[str]
    role: ClassVar[WorkerRole]
    summary: Summary

    def __init__(self, steps: Steps, *, batch_size: int, watch: bool = False) -> None:
        self.using = steps.using
        self._common = steps
        self.batch_size = batch_size
        self.watch = watch
        self.stop = Stop()
        self._size = batch_size
        self._store_size = batch_size
        self._pace = Pace(settings.RATE_LIMIT)
        self._store_backoff = Backoff()
        self._trouble: StoreUnavailable | None = None
        self._pause: WorkersPaused | None = None
        self._was_paused = False
        self._moved_at = time.monotonic()
        self._ticker = Ticker(self.using, self.role, steps.worker)

    def _work(self) -> None:
        """Run `_run` until there is an end, listening to signals; what it does is done in this worker's name."""
        with self.stop.on_signals(), acting_as(self._common.worker):
            while True:
                try:
                    return self._run()
                except (StoreDenied, StoreMisconfigured) as error:
                    denied = error
                except KfsCredentialsError as error:
                    self._refused(error)
                    raise
                self._refused(denied)
                if is_own(denied):
                    raise ImproperlyPrepared(str(denied)) from None
                logger.error("the secret store cannot be used any more: %s", denied)
                if not self._pause_all(denied) or not self.watch:
                    return self._end(End.DENIED, str(denied))

    def _tick(self) -> None:
        """Tell that this worker is at work, and does not only wait for a store or for the end of a pause."""
        if self._trouble is None and self._pause is None:
            self._ticker.tick()

    def _refused(self, error: KfsCredentialsError) -> None:
        """Count what keeps this worker from working."""
        if reason := reason_of(error):
            refuse(self.using, self.role, reason)

    def _pause_all(self, denied: StoreDenied | StoreMisconfigured) -> bool:
        """Pause the workers of this database, since the store denies access or is not the right one.

        At its start a process finds that out for itself, and refuses. In the middle of a run it may concern all of
        them, and a person has to see to it. Return False if the database cannot be told.
        """
        by, reason = self._common.worker, reason_to_pause(denied)
        paused = self._in_database(lambda: [pause_workers(self.using, by=by, reason=reason)])
        return paused is not None

    def _wait_for_resume(self) -> bool:
        """Wait a little, since the workers are paused; return False instead if that is the end of this run."""
        if self.stop:
            return True
        if self._pause is not None and not self._was_paused:
            self._refused(self._pause)
        if not self.watch:
            self._end(End.PAUSED, str(self._pause))
            return False
        if not self._was_paused:
            logger.warning("%s", self._pause)
        self._was_paused = True
        self._idle(settings.POLL_INTERVAL)
        return True

    def _run(self) -> None:
        raise NotImplementedError

    def _wait_for_store(self, trouble: StoreUnavailable, renew: Callable[[], None]) -> None:
        """Wait for a store that is unavailable, and renew what is leased meanwhile."""
        self._trouble = trouble
        self._refused(trouble)
        delay = self._store_backoff.next(trouble.retry_after)
        logger.warning("the secret store is unavailable, waiting %.1f s: %s", delay, trouble)
        if not self.watch and self._out_of_patience(database=True):
            self.stop.ask()
        until = time.monotonic() + delay
        while (left := until - time.monotonic()) > 0 and not self.stop.wait(min(left, LOOK_UP_EVERY)):
            renew()

    @property
    def _patience(self) -> float:
        """Seconds without a move after which a drain gives up. The lease of a worker that died has to run out in it."""
        return 2 * max(settings.RETRY_MAX, settings.LEASE)

    def _idle(self, seconds: float) -> None:
        """Wait, at least so long that a POLL_INTERVAL of 0 is no busy loop."""
        self.stop.wait(max(seconds, 0.01))

    def _out_of_patience(self, *, database: bool) -> bool:
        """Return whether nothing has moved for so long that a drain gives up; note why. `database`: it answers."""
        if time.monotonic() - self._moved_at <= self._patience:
            return False
        if not database:
            self._end(End.UNREACHABLE, "the database is out of reach")
        elif self._trouble is not None:
            self._end(End.UNREACHABLE, f"the secret store is out of reach: {self._trouble}")
        else:
            self._end(End.STUCK, f"nothing has moved for {self._patience:g} s")
        return True

    def _end(self, end: End, reason: str) -> None:
        if self.summary.end is End.DRAINED:
            self.summary.end, self.summary.reason = end, reason

    def _in_database(self, work: Callable[[], T]) -> T | None:
        """Do `work`, whole transactions of it again where that helps; None if the database is out of reach for now.

        A worker that is asked to stop tries nothing again: what it holds is given back then. No attempt of any job is
        counted. Raises `DatabaseRefused` where only a person can help.
        """
        for attempt in range(1, TRIES + 1):
            try:
                with hurried() if self.stop else nullcontext():
                    return work()
            except (DatabaseError, InterfaceError) as error:
                meaning, what = fault(error), describe(error)
            # Out here the error is gone: its text and its frames may hold a row.
            if meaning is Fault.DATA:
                raise DatabaseRefused(
                    f"the database refused to change a row ({what}), and it cannot be told which: see the server's log "
                    "for the constraint or trigger. What this worker had leased is given back."
                )
            if meaning is Fault.REFUSED:
                raise DatabaseRefused(
                    f"the database refused a statement of this worker ({what}). Check that `manage.py migrate` has run "
                    "and that this role may read and write the tables."
                )
            connections[self.using].close_if_unusable_or_obsolete()
            if meaning is Fault.TOO_MUCH:
                self._size = max(1, self._size // 2)
            logger.info("the database could not answer (%s), try %d of %d", what, attempt, TRIES)
            if self.stop:
                return None
            self.stop.wait(pause_before_try(attempt))
        logger.warning("the database could not answer %d times, going on later", TRIES)
        # With a new connection: after a fail-over this one may be to a server that is read-only now.
        connections[self.using].close()
        return None

    def _renew(self, batch: Any) -> None:
        """Extend the lease of a batch if that is due."""
        try:
            self._common.renew(batch)
        except LeaseLost:
            pass  # the store's guard and the fence say so too, where it matters
        except (DatabaseError, InterfaceError) as error:
            # No answer is not a renewal. The lease's own watch stops this worker before its next write.
            logger.warning("a lease could not be renewed (%s)", describe(error))
            connections[self.using].close()

    def _settled(self, batch: Any) -> Counter[Any]:
        """Settle a batch, in halves if it takes longer than the server allows."""
        try:
            return self._common.settle(batch)
        except DatabaseError as error:
            if fault(error) is not Fault.TOO_MUCH or len(batch.items) == 1:
                raise
        # With smaller batches from here on.
        middle = len(batch.items) // 2
        self._size = max(1, min(self._size, middle))
        halves = (batch.items[:middle], batch.items[middle:])
        return sum((self._settled(replace(batch, items=half)) for half in halves), Counter())

    def _give_back(self, batch: Any) -> int:
        """Release what is in flight; return how many rows.

        What cannot be released now is tried again later, and expires by itself.
        """
        try:
            with hurried():
                return self._common.release(batch)
        except (DatabaseError, InterfaceError) as error:
            logger.warning("%s could not be given back yet (%s)", self.what, describe(error))
            return 0

    @property
    def _at_once(self) -> int:
        """The most rows of the next batch: no more than the database and the store have lately done in time."""
        return self._pace.batch(min(self._size, self._store_size))

    def _less_at_once(self, trouble: KfsCredentialsError | None, asked: int) -> None:
        """Ask the store for half as much from here on, if so much was not done in STORE_TIMEOUT."""
        if asked > 1 and isinstance(trouble, StoreUnavailable) and trouble.late:
            self._store_size = min(self._store_size, asked // 2)
            logger.warning(
                "the secret store does not do %d %s at a time within KFS_CREDENTIALS['STORE_TIMEOUT']: going on with "
                "%d, and slowly more. If it says so again and again, set KFS_CREDENTIALS['BATCH_SIZE'] to less",
                *(asked, self.what, self._store_size),
            )

    def _grow(self) -> None:
        """Let the next batch be a little larger, after one that went well."""
        self._size = min(self.batch_size, self._size + max(1, self.batch_size // 20))
        # In smaller steps: a batch that is too much for the store costs all of STORE_TIMEOUT.
        self._store_size = min(self.batch_size, self._store_size + max(1, self._store_size // 20))

    def _store_answered(self) -> None:
        self._store_backoff.reset()
        self._trouble = None

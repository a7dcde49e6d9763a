"""Calls to a store: each on a thread of its own, with a deadline for all of it, and never too many that hang."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from kfs_credentials.errors import StoreUnavailable
from kfs_credentials.stores.outcomes import bare

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfs_credentials.stores.values import Look

T = TypeVar("T")

MOST_HANGING = 16
"""How many calls of one store may outlive their deadlines at a time. Each holds a thread, and STORE_THREADS others."""
MOST_HANGING_ALIKE = 2
"""How many of them may be for one and the same secret, alone."""


class Deadline:
    """The moment by which one call has to be over, on a clock that runs on while the process is stopped.

    `guard`: another reason to stop (a lease), which raises when there is one. `look`: what to call with the probe,
    before and after all that the call writes or erases, and through the same handle.
    """

    def __init__(self, seconds: float, guard: Callable[[], None] | None = None, look: Look | None = None) -> None:
        self.seconds = seconds
        self.guard = guard
        self.look = look
        self.at = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left; 0 if there are none."""
        return max(0.0, self.at - time.monotonic())

    def check(self) -> None:
        """Raise `StoreUnavailable` if time is up. Call it right before a write becomes visible."""
        if self.guard is not None:
            self.guard()
        self.check_time()

    def check_time(self) -> None:
        """Raise `StoreUnavailable` if time is up, whatever the guard says. Call it before each read of many."""
        if not self.remaining:
            raise self.passed()

    def passed(self) -> StoreUnavailable:
        """Return the error that says that time is up."""
        return StoreUnavailable(
            f"the secret store did not answer within {self.seconds:g} s (KFS_CREDENTIALS['STORE_TIMEOUT'])", late=True
        )


class Call(Generic[T]):
    """A call to the store, on a thread of its own: the caller waits as long as it likes, and no longer.

    A call that outlives its deadline cannot be stopped from outside; it looks at the deadline itself before
    it makes anything visible. The thread is a daemon: a call that hangs for ever keeps no process from
    ending. `refusal`: why the call is not even begun; then it is over at once, and `result` raises that.
    """

    def __init__(
        self, function: Callable[[], T], deadline: Deadline, *, refusal: StoreUnavailable | None = None
    ) -> None:
        self.deadline = deadline
        self._function = function
        self._done = threading.Event()
        self._result: T
        self._error: BaseException | None = refusal
        self.thread = threading.Thread(target=self._run, name="kfs-credentials-store", daemon=True)
        if refusal is None:
            self.thread.start()
        else:
            del self._function
            self._done.set()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the waiting thread raises it
            self._error = bare(error)
        finally:
            del self._function
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return whether the call is over, by its end or by its deadline."""
        return self._done.wait(min(seconds, self.deadline.remaining)) or not self.deadline.remaining

    def result(self) -> T:
        """Return what the call returned or raise what it raised; `StoreUnavailable` if its time is up."""
        while not self._done.wait(remaining := self.deadline.remaining):
            if not remaining:
                raise self.deadline.passed()
        if self._error is not None:
            raise self._error
        return self._result


class _AtWork(NamedTuple):
    thread: threading.Thread
    deadline: Deadline
    ref: str | None


class Calls:
    """The calls of one store that are not over yet: a store that hangs must not take more and more threads.

    Only those count that have outlived their deadlines. However many callers wait at a time, each of them waits for one
    call; and of those that nobody waits for any more there are `MOST_HANGING`, before the next is refused. One secret
    for which each call hangs is refused before that: whoever asks for it again and again must not shut out the others.
    """

    def __init__(self) -> None:
        self._at_work: set[_AtWork] = set()

    def start(self, function: Callable[[], T], deadline: Deadline, ref: str | None = None) -> Call[T]:
        """Start a call, or refuse it: with `StoreUnavailable`, as its result. `ref`: if it is for that secret alone."""
        hanging: list[str | None] = []
        for one in self._at_work.copy():
            if not one.thread.is_alive():  # over; or of the process that this one was forked from
                self._at_work.discard(one)
            elif not one.deadline.remaining:
                hanging.append(one.ref)
        if len(hanging) >= MOST_HANGING:
            return Call(function, deadline, refusal=_too_many(len(hanging)))
        if ref is not None and (alike := hanging.count(ref)) >= MOST_HANGING_ALIKE:
            return Call(function, deadline, refusal=_too_many_alike(alike))
        call = Call(function, deadline)
        self._at_work.add(_AtWork(call.thread, deadline, ref))
        return call


def _too_many(hanging: int) -> StoreUnavailable:
    return StoreUnavailable(
        f"{hanging} calls of this process to the secret store hang, beyond KFS_CREDENTIALS['STORE_TIMEOUT']: no other "
        "is begun until one of them is over. If other processes reach the store, restart this one"
    )


def _too_many_alike(hanging: int) -> StoreUnavailable:
    return StoreUnavailable(
        f"{hanging} calls of this process for this secret hang, beyond KFS_CREDENTIALS['STORE_TIMEOUT']: no other for "
        "it is begun until one of them is over. If other processes reach it, restart this one"
    )

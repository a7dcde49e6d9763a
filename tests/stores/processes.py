"""Real processes that use a store: started at once, stopped at a chosen line, killed.

They are forked from a server process that has imported Django already, so that one costs a few milliseconds. They meet
at barriers and pipes, never by the clock.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from django.conf import settings as django_settings
from django.test import override_settings

import kfs_credentials.stores
from kfs_credentials.crypto import Plaintext
from kfs_credentials.errors import KfsCredentialsError
from kfs_credentials.stores import Entry, directory, secret_stores

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier
    from types import FrameType

    from kfs_credentials.crypto import Scope

T = TypeVar("T")

NOBODY = 65534
CLONE_NEWNS = 0x00020000

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["pytest", "tests.stores.preload"])

STORES = str(Path(kfs_credentials.stores.__file__).parent)


started: list[Running[Any]] = []


def kill_all() -> None:
    """End the processes that are left: one that is stopped ends in no other way."""
    while started:
        process = started.pop().process
        process.kill()
        process.join()


class Running(Generic[T]):
    """A process at work on `function(*arguments)`, with the settings and the kind of temporary files of now."""

    def __init__(self, function: Callable[..., T], *arguments: Any) -> None:
        self._answers, there = processes.Pipe(duplex=False)
        self.process = processes.Process(
            target=_work,
            args=(there, django_settings.KFS_CREDENTIALS, directory.UNNAMED, function, *arguments),
            daemon=True,
        )
        self.process.start()
        there.close()
        started.append(self)

    def result(self) -> T:
        """Return what the function returned; raises `EOFError` if the process died first."""
        with self._answers:
            try:
                answer: T = self._answers.recv()
            finally:
                self.process.join(60)
        return answer

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)


def _work(
    answers: Connection, kfs_credentials: Any, unnamed: int, function: Callable[..., Any], *arguments: Any
) -> None:
    directory.UNNAMED = unnamed
    with override_settings(KFS_CREDENTIALS=kfs_credentials):
        answers.send(function(*arguments))


def run(function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)` of a process of its own."""
    return Running(function, *arguments).result()


Said: TypeAlias = tuple[str, str]


def said(function: Callable[..., Any], *arguments: Any) -> Said:
    """Return the name of the error that a call raises, and its text; empty if it raises none."""
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test looks at
        return type(error).__name__, str(error)
    return "", ""


# What the processes do.


def as_nobody(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run the function as a user whom the file system refuses something: root it refuses nothing."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    return function(*arguments)


def mount(*arguments: str) -> str:
    """Mount something that nobody but this process sees; return why that is not allowed here, if it is not."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        return f"a mount namespace of one's own is not allowed here: {os.strerror(ctypes.get_errno())}"
    for command in (["mount", "--make-rprivate", "/"], ["mount", *arguments]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"mounting is not allowed here: {done.stderr}"
    return ""


def put(scope: Scope, ref: str, value: dict[str, Any]) -> Said:
    return said(secret_stores["default"].put, scope, ref, value)


def put_at_once(barrier: Barrier, scope: Scope, ref: str, value: dict[str, Any]) -> Said:
    """Put, and meet the others right before the secret becomes visible; try again while the store is unavailable."""
    meetings = [barrier.wait]

    def meet() -> None:
        if meetings:
            meetings.pop()()

    for _ in range(100):
        answer = said(put_with_guard, meet, scope, ref, value)
        if answer[0] != "StoreUnavailable":
            break
    return answer


def put_with_guard(guard: Callable[[], None], scope: Scope, ref: str, value: dict[str, Any]) -> None:
    entry = Entry(scope, ref, Plaintext.of(value))
    (outcome,) = secret_stores["default"].start_put_many([entry], guard=guard).result()
    if isinstance(outcome, KfsCredentialsError):
        raise outcome


def count_lines(scope: Scope, ref: str, value: dict[str, Any]) -> tuple[int, int]:
    """Put; return how many lines of the stores' code ran before the guard was called, and in all."""
    lines = at_line(0, lambda: None)
    before: list[int] = []
    put_with_guard(lambda: before.append(len(lines)), scope, ref, value)
    return before[0], len(lines)


def put_and_die(line: int, scope: Scope, ref: str, value: dict[str, Any]) -> Said:
    """Put, and be killed before the given line of the stores' code."""
    at_line(line, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return said(put_with_guard, lambda: None, scope, ref, value)


def count_replacing_lines(scope: Scope, ref: str) -> int:
    """Replace; return how many lines of the stores' code ran."""
    lines = at_line(0, lambda: None)
    secret_stores["default"].replace(scope, ref)
    return len(lines)


def replace_and_die(line: int, scope: Scope, ref: str) -> Said:
    """Replace, and be killed before the given line of the stores' code."""
    at_line(line, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return said(secret_stores["default"].replace, scope, ref)


def put_and_pause(pipe: Connection, line: int, scope: Scope, ref: str, value: dict[str, Any]) -> Said:
    """Put, say so before the given line of the stores' code (0: when the guard is called), and wait for an answer.

    Returns what became of it, once its thread is at its end too.
    """

    def pause() -> None:
        pipe.send(line)
        pipe.recv()

    at_line(line, pause)
    guard = (lambda: None) if line else pause
    call = secret_stores["default"].start_put_many([Entry(scope, ref, Plaintext.of(value))], guard=guard)
    answer = said(call.result)
    call._done.wait()
    return answer


def at_line(number: int, action: Callable[[], object]) -> list[int]:
    """Call `action` before the store's threads run their line of that number; return a list that grows by each line.

    Lines of the package `kfs_credentials.stores` count, in threads that start from here on.
    """
    lines: list[int] = []

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(STORES):
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == number:
                action()
        return trace

    threading.settrace(trace)
    return lines

"""Errors thrown at each line of ours that something runs, and what an error tracker would write down about each.

An error is thrown the last time that a line is reached, when most is in the variables. Then everything is looked at
that a tracker looks at: the errors that led to it, their texts and arguments, and the variables of our frames, as far
as their members reach; now and then Django's own debug page, too.
"""

from __future__ import annotations

import linecache
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import pytest
from django.db.models import QuerySet
from django.views.debug import ExceptionReporter

import kfs_credentials
from tests.crypto.test_leaks import frames, shown
from tests.leaks.canary import CANARY, OTHER_CANARY, hits

TRIES = 3
"""How often a line is tried that is not reached as often as before."""
PACKAGE = str(Path(kfs_credentials.__file__).parent)
Place = tuple[CodeType, int]
Run = Callable[[], object]


class ThrownError(Exception):
    """What is thrown. It stands for whatever nobody foresaw: no memory, a key pressed, a mistake in a library."""


class Tracer:
    """Notes each line of some files that is run, on all threads; or throws at one of them, the nth time."""

    def __init__(self, files: Collection[str], place: Place | None = None, turn: int = 0) -> None:
        self.files = {f"{PACKAGE}/{file}" for file in files}
        self.place = place
        self.turn = turn
        self.times: dict[Place, int] = {}
        self.blocks: set[tuple[FrameType, int]] = set()
        self.has_thrown = False

    def __enter__(self) -> None:
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            place = frame.f_code, frame.f_lineno
            if linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
                # The line comes again at the end of the block. An error there would be one in the interpreter.
                if (frame, frame.f_lineno) in self.blocks:
                    return self.trace
                self.blocks.add((frame, frame.f_lineno))
            self.times[place] = self.times.get(place, 0) + 1
            if place == self.place and self.times[place] == self.turn:
                self.has_thrown = True
                raise ThrownError
        return self.trace


def leaks_at_each_line(
    prepare: Callable[[], Run], files: Collection[str], caplog: pytest.LogCaptureFixture, *, but: Collection[str] = ()
) -> None:
    """Assert that nothing is shown, at whatever line of these files an error is thrown into what `prepare` returns.

    `prepare` makes everything as before, and returns what is to be run. `but`: functions that are left out, by name.
    """
    caplog.set_level(logging.DEBUG)
    run = prepare()
    tracer = Tracer(files)
    with tracer:
        run()
    leaks, missed = list[str](), list[str]()
    thrown = 0
    places = [(place, times) for place, times in tracer.times.items() if place[0].co_qualname not in but]
    for number, ((code, line), times) in enumerate(places):
        turn = times
        caplog.clear()
        texts: list[str] = []
        for _ in range(TRIES):
            run = prepare()
            thrower = Tracer(files, (code, line), turn)
            try:
                with thrower:
                    run()
            except Exception as error:  # noqa: BLE001 - or whatever was made of it on the way
                texts += everything_shown(error)
                if not thrown or number == len(places) // 2:  # a page takes a while
                    texts += debug_page(error)
            # It may get there fewer times than before, since some lines depend on the clock: then so many times.
            turn = thrower.times.get((code, line), 0)
            if thrower.has_thrown or not turn:
                break
        if thrower.has_thrown:
            thrown += 1
        else:
            missed.append(f"{code.co_filename.removeprefix(PACKAGE)}:{line}")
        found = hits("\n".join([caplog.text, *texts]))
        leaks += [f"{code.co_filename.removeprefix(PACKAGE)}:{line}, in {code.co_qualname}: {hit}" for hit in found]
    assert not leaks, "\n".join(leaks)
    assert len(missed) <= 1 + len(places) / 20, f"nothing was thrown at {missed}, of {len(places)} lines"


class Watcher:
    """Looks, at each line of some files that is run, into the variables of that frame: values that can be reached.

    For code that never has one: whatever goes wrong there, no report can hold any. It takes a single run.
    """

    def __init__(self, files: Collection[str]) -> None:
        self.files = {f"{PACKAGE}/{file}" for file in files}
        self.lines: set[Place] = set()
        self.leaks: set[str] = set()

    def __enter__(self) -> Self:
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self.files:
            return None
        self.lines.add((code, frame.f_lineno))
        for name, value in [*frame.f_locals.items(), ("(result)", argument if event == "return" else None)]:
            for text in shown(value, 3, repr_of_a_value):
                if CANARY in text or OTHER_CANARY in text:
                    self.leaks.add(f"{code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}, {name}")
        return self.trace


def repr_of_a_value(value: object) -> str:
    """Return the repr of what is no queryset: that would ask the database in the middle of something else."""
    return "" if isinstance(value, QuerySet) else repr(value)


def everything_shown(error: BaseException | None) -> Iterator[str]:
    """Yield what an error tracker writes down about an error, and about those that led to it."""
    while error is not None:
        yield from (str(error), repr(error), *map(repr, error.args), *shown(vars(error)))
        for frame in frames(error.__traceback__):
            if frame.f_code.co_filename.startswith(PACKAGE):
                for name, value in frame.f_locals.items():
                    for text in shown(value):
                        yield f"{frame.f_code.co_qualname}, {name}: {text}"
        error = error.__cause__ or error.__context__


def debug_page(error: BaseException) -> list[str]:
    """Return what Django shows of an error: on its debug page, in mails to admins.

    From the first frame of ours on, those of libraries included: before it stands the caller's, who has the values.
    """
    ours = error.__traceback__
    while ours is not None and not ours.tb_frame.f_code.co_filename.startswith(PACKAGE):
        ours = ours.tb_next
    reporter = ExceptionReporter(None, type(error), error, ours)
    return [reporter.get_traceback_text(), reporter.get_traceback_html()]

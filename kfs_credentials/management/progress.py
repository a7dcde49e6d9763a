"""Progress on standard error: a bar with rate and time left on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from kfs_credentials.errors import ImproperlyPrepared

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from django.core.management.base import OutputWrapper

LINE_EVERY = 10.0
"""Seconds between two plain lines, and between two looks at what is left."""
COUNTING = 0.01
"""The share of the time that may go into counting what is left."""


class Progress:
    """Shows how far a run has got; a context manager, so that the bar goes away however the run ends.

    `stream`: the command's standard error. `count_left`: returns how many are left to move, or None if that
    cannot be told now; workers elsewhere move some, and new ones come. `quiet`: show nothing.
    """

    def __init__(
        self,
        stream: OutputWrapper,
        count_left: Callable[[], int | None],
        *,
        doing: str = "moving",
        quiet: bool = False,
        no_color: bool = False,
    ) -> None:
        self.stream = stream
        self.count_left = count_left
        self.quiet = quiet
        self.started = self.shown_at = time.monotonic()
        self.done = self.ended = 0
        self.left = 0 if quiet else count_left() or 0
        self.count_at = self.started + max(LINE_EVERY, (time.monotonic() - self.started) / COUNTING)
        self.bar: Bar | None = None
        console = Console(stderr=True, no_color=no_color or None)
        if not quiet and stream.isatty() and not console.is_dumb_terminal:
            self.bar = Bar(
                TextColumn(doing),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self.task = self.bar.add_task("", total=self.left, rate="")

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def run(self, work: Callable[[], object], counts: Callable[[], str]) -> float:
        """Do the work that is shown; return the seconds since the start.

        Raises `ImproperlyPrepared` if the work does, with what it did until then: `counts` returns that in words.
        """
        problem = ""
        try:
            work()
        except ImproperlyPrepared as error:
            problem = str(error)
        seconds = time.monotonic() - self.started
        if problem:
            raise ImproperlyPrepared(f"{counts()} in {seconds:.1f} s; then {problem}")
        return seconds

    def show(self, ended: int, counts: str) -> None:
        """Show how many are done, of how many, and the rate. `ended`: by this run so far; `counts`: in words."""
        if self.quiet:
            return
        now = time.monotonic()
        self._count(ended, now)
        rate = self.done / max(now - self.started, 1e-9)
        if self.bar is not None:
            total = self.done + self.left
            self.bar.update(self.task, completed=self.done, total=total, rate=f"{rate:,.0f}/s")
        elif now - self.shown_at >= LINE_EVERY:
            self.shown_at = now
            time_left = f", about {_duration(self.left / rate)} left" if rate else ""
            self.stream.write(
                f"{self.done:,} of {self.done + self.left:,} ({rate:,.0f} a second{time_left}): {counts}", str
            )

    def _count(self, ended: int, now: float) -> None:
        """Bring `done` and `left` up to date: by what this run has ended, and now and then by looking."""
        newly = ended - self.ended
        self.ended, self.done, self.left = ended, self.done + newly, max(0, self.left - newly)
        if now < self.count_at:
            return
        left = self.count_left()
        if left is not None:
            # What is missing was moved elsewhere. What came on top makes the total larger: `done` never falls.
            self.done, self.left = self.done + max(0, self.left - left), left
        finished = time.monotonic()
        self.count_at = finished + max(LINE_EVERY, (finished - now) / COUNTING)


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"

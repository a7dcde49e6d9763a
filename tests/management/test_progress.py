"""Progress: what the numbers do, and where they are shown."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from django.core.management.base import OutputWrapper

from kfs_credentials.management import progress as module
from kfs_credentials.management.progress import Progress


class Scene:
    """A run, of which the test says what is left and what was done."""

    def __init__(self, left: int | None) -> None:
        self.left = left
        self.output = StringIO()
        self.progress = Progress(OutputWrapper(self.output), lambda: self.left)

    def show(self, ended: int, counts: str = "some moved") -> tuple[int, int]:
        """Show, and return how many of how many the line tells."""
        with self.progress:
            self.progress.show(ended, counts)
        line = self.output.getvalue().splitlines()[-1]
        found = re.fullmatch(r"([0-9,]+) of ([0-9,]+) \([0-9,]+ a second(, about .* left)?\): (.*)", line)
        assert found is not None, line
        assert found[4] == counts
        done, total = (int(found[place].replace(",", "")) for place in (1, 2))
        return done, total


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line each time, and a look at what is left each time."""
    monkeypatch.setattr(module, "LINE_EVERY", 0.0)
    monkeypatch.setattr(module, "COUNTING", float("inf"))


def test_a_run_alone() -> None:
    scene = Scene(1_200)
    scene.left = 700
    assert scene.show(500) == (500, 1_200)
    scene.left = 0
    assert scene.show(1_200) == (1_200, 1_200)


def test_what_other_workers_move_counts_as_done() -> None:
    scene = Scene(100)
    scene.left = 40
    assert scene.show(20) == (60, 100)
    scene.left = 0
    assert scene.show(30) == (100, 100)


def test_what_comes_on_top_makes_the_total_larger_and_nothing_goes_back() -> None:
    scene = Scene(10)
    scene.left = 5
    assert scene.show(5) == (5, 10)
    scene.left = 25
    assert scene.show(5) == (5, 30)
    scene.left = 24
    assert scene.show(8) == (8, 32)
    scene.left = 0
    assert scene.show(32) == (32, 32)


def test_more_is_done_than_was_counted() -> None:
    scene = Scene(3)
    scene.left = None  # the database cannot say
    assert scene.show(5) == (5, 5)


def test_nothing_is_left_from_the_start() -> None:
    assert Scene(0).show(0) == (0, 0)


def test_it_does_not_look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COUNTING", 1e-9)
    looks = iter([100])  # and no second one
    progress = Progress(OutputWrapper(StringIO()), lambda: next(looks))
    for ended in range(50):
        progress.show(ended, "")


def test_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_EVERY", 1e9)
    output = StringIO()
    progress = Progress(OutputWrapper(output), lambda: 100)
    for ended in range(50):
        progress.show(ended, "")
    assert output.getvalue() == ""


def test_quiet() -> None:
    output = StringIO()
    progress = Progress(OutputWrapper(output), lambda: 100, quiet=True)
    progress.show(50, "")
    assert output.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119.4, "119 s"), (120, "2 min"), (7_199, "120 min"), (9_000, "2.5 h")]
)
def test_how_long_it_takes(seconds: float, text: str) -> None:
    assert module._duration(seconds) == text

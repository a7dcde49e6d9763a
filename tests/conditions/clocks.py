"""Other clocks: for processes, and for a whole server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from example_project import postgres
from example_project.postgres import find_binaries
from tests.needs import libfaketime

HOUR = 3600.0
STARTUP = Path(__file__).with_name("startup")

WRAPPER = """#!/bin/sh
export {variables}
exec {program} "$@"
"""


def _other_clock(**said: str) -> dict[str, str]:
    """Return the variables for a process with another clock, of which `said` says what it shows.

    What it measures goes on as always, and files are as old as they are: only what time it is differs.
    """
    return {
        "LD_PRELOAD": str(libfaketime()),
        "DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        "PYTHONPATH": str(STARTUP),
        **said,
    }


def off_by(seconds: float) -> dict[str, str]:
    """Return the variables for a process whose clock is off by so many seconds."""
    return _other_clock(FAKETIME=f"{seconds:+.0f}")


class Clock:
    """The clock of other processes, off by a number of seconds that can be changed at any moment."""

    def __init__(self, file: Path, seconds: float = 0.0) -> None:
        self.file = file
        self.variables = _other_clock(FAKETIME_TIMESTAMP_FILE=str(file), FAKETIME_NO_CACHE="1")
        self.jump(seconds)

    def jump(self, seconds: float) -> None:
        """Be off by so many seconds from now on."""
        new = self.file.with_suffix(".new")
        new.write_text(f"{seconds:+.3f}\n")
        new.chmod(0o644)
        new.rename(self.file)

    def set(self, moment: datetime) -> None:
        """Stand at this moment now, and go on from there."""
        self.jump((moment - datetime.now(UTC)).total_seconds())


@contextmanager
def server_with(clock: Clock, directory: Path) -> Iterator[postgres.Server]:
    """Give a server of one's own that has this clock.

    `directory`: an empty one, that every user can enter, as the clock's file can be read by all: the server's user is
    another than ours.
    """
    variables = " ".join(f"'{name}={value}'" for name, value in clock.variables.items())
    real = find_binaries().directory
    for program in ("initdb", "postgres"):
        wrapper = directory / program
        wrapper.write_text(WRAPPER.format(variables=variables, program=real / program))
        wrapper.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "KFS_POSTGRES_BIN", str(directory))
        with postgres.temporary(["fsync=off"]) as server:
            yield server

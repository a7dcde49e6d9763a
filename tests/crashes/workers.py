"""Processes of workers and applications, as a test has them in its hands: to start, stop, freeze, kill and wait for."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[2]
MANAGE = "django.core.management.execute_from_command_line"
APPLICATION = "tests.crashes.application.perform"


class Worker:
    """A process, known by a handle that no other process can get. What it prints is in `output`."""

    def __init__(self, name: str, pid: int, output: Path, code_of: Callable[[int], int]) -> None:
        self.name = name
        self.pid = pid
        self.handle = os.pidfd_open(pid)
        self.output = output
        self._code_of = code_of
        self.code: int | None = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        signal.pidfd_send_signal(self.handle, number)

    def kill(self) -> None:
        """Kill it, with no chance to do anything, and wait until it is gone."""
        self.send(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def freeze(self) -> None:
        """Stop it, and wait until it has; SIGCONT lets it go on."""
        self.send(signal.SIGSTOP)
        self.wait_until_frozen()

    def wait_until_frozen(self) -> None:
        """Wait until each of its threads has stopped, or has ended."""
        until(lambda: {"T", "X", "Z"}.issuperset(self._states()), f"{self.name} has stopped")

    @property
    def is_frozen(self) -> bool:
        """Whether somebody has stopped it."""
        try:
            return "T" in self._states()
        except FileNotFoundError:
            return False

    def _states(self) -> Iterator[str]:
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                yield (thread / "stat").read_text().rpartition(")")[2].split()[0]

    def catches(self, number: signal.Signals) -> bool:
        """Whether it has a handler for a signal; before that the signal just ends it."""
        fields = dict(line.split(":") for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return bool(int(fields.get("SigCgt", "0"), 16) >> number - 1 & 1)

    def has_handled(self, number: signal.Signals) -> bool:
        """Whether its handler of a signal has done its work: then the process has none any more."""
        return not self.catches(number)

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end, but no longer than that; return whether it ended."""
        ended, _, _ = select.select([self.handle], [], [], seconds)
        return bool(ended)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.code is not None or self.ends_within(0)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait for its end; return the exit code, below 0 for a signal."""
        if self.code is None:
            if not self.ends_within(seconds):
                pytest.fail(f"{self.name} did not end within {seconds:g} s:\n{self.printed}")
            self.code = self._code_of(self.pid)
            os.close(self.handle)
        return self.code

    @property
    def printed(self) -> str:
        """What it has printed so far, on both streams."""
        return self.output.read_text() if self.output.exists() else ""

    @property
    def answers(self) -> list[dict[str, Any]]:
        """What an application was answered so far, to one call after the other: each line that it has finished."""
        lines = self.printed.splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


def start_command(arguments: Sequence[str], *, name: str, output: Path, environment: Mapping[str, str]) -> Worker:
    """Start `manage.py` as somebody does in a shell, with only these variables of ours."""
    with output.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "manage.py"), *arguments],
            env={**_others(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
    return Worker(name, process.pid, output, lambda _: process.wait())


def _others() -> dict[str, str]:
    ours = ("DATABASE_URL", "DJANGO_", "KFS_", "KNOWLEDGE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


class Nursery:
    """The process that forks the workers: see `nursery.py`."""

    def __init__(
        self,
        settings: str = "example_project.settings",
        *,
        under: Sequence[str] = (),
        cwd: Path = ROOT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it. `under`: a command, such as strace, under which it and all its children run."""
        self.process = subprocess.Popen(
            [*under, sys.executable, "-m", "tests.crashes.nursery"],
            cwd=cwd,
            env={
                **_others(),
                "PYTHONPATH": str(ROOT),
                **(environment or {}),
                "DJANGO_SETTINGS_MODULE": settings,
                "DATABASE_URL": "postgres:///",  # each worker is told its own
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self,
        name: str,
        arguments: Sequence[Any],
        *,
        output: Path,
        database: Mapping[str, Any],
        settings: Mapping[str, Any],
        function: str = MANAGE,
    ) -> Worker:
        """Start `manage.py` with these arguments, or a function given by its path.

        `database` and `settings` go on top of the nursery's own.
        """
        if function == MANAGE:
            arguments = ["manage.py", *arguments]
        order = {
            "function": function,
            "arguments": arguments,
            "output": str(output),
            "database": database,
            "settings": settings,
        }
        return Worker(name, self._ask(order)["pid"], output, self.code_of)

    def code_of(self, pid: int) -> int:
        """Return the exit code of a child that has ended."""
        return int(self._ask({"wait": pid})["code"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End, with all children."""
        self.process.communicate()

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

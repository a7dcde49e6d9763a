"""Gates: named places in a worker process at which a test can hold it up, and know that it is there.

Two named pipes each. The worker writes a line to `reached`, its process and its thread, and waits for a byte from `go`;
where there are no such pipes it passes without stopping.
"""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path
from typing import Self

import pytest

from tests.waiting import PATIENCE


def pass_gate(directory: Path, name: str) -> None:
    """In the worker: wait at the gate of that name, if the test has put one there."""
    try:
        reached = os.open(directory / f"{name}.reached", os.O_WRONLY)
        go = os.open(directory / f"{name}.go", os.O_RDONLY)
    except FileNotFoundError:
        return
    with os.fdopen(reached, "w") as announcement, os.fdopen(go, "rb", buffering=0) as permission:
        announcement.write(f"{os.getpid()} {threading.get_native_id()}\n")
        announcement.flush()
        permission.read(1)


class Gate:
    """In the test: a gate that is closed until it is opened; whoever comes by later finds none."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.thread = 0
        """The number of the thread that came to the gate, as the kernel knows it."""
        self.paths = [directory / f"{name}.{end}" for end in ("reached", "go")]
        for path in self.paths:
            os.mkfifo(path)
        # Open at both ends, so that neither this process nor a worker waits for the other to open them.
        self.reached, self.go = (os.open(path, os.O_RDWR) for path in self.paths)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def wait(self) -> int:
        """Wait until a worker comes to the gate, and return its process id; one may come with two threads."""
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([self.reached], [], [], PATIENCE)
            if not readable:
                pytest.fail(f"no worker came to the gate '{self.name}'")
            line += os.read(self.reached, 1)
        process, self.thread = map(int, line.split())
        return process

    def let_others_pass(self) -> None:
        """Keep those that stand at the gate; whoever comes now finds none."""
        for path in self.paths:
            path.unlink(missing_ok=True)

    def open(self) -> None:
        """Let everybody pass."""
        self.let_others_pass()
        if self.go >= 0:
            os.close(self.reached)
            os.close(self.go)
        self.reached = self.go = -1

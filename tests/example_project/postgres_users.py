"""Processes that use a server of the launcher, and processes that are watched and killed."""

import fcntl
import json
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from example_project import postgres
from example_project.postgres_supervisor import Account, acquire, open_lock, run_as

DEADLINE = 30  # seconds, after which a test gives up; none needs a tenth of it
PROJECT = Path(postgres.__file__).parents[1]

# What a process that uses a server does: say what it got, then live until it is killed or its input ends.
USER_PROGRAM = """
import pathlib, sys
from example_project.postgres import running, temporary
{start}
print((server.directory / "server.json").read_text(), flush=True)
sys.stdin.read()
"""
RUNNING = 'server = running(pathlib.Path(sys.argv[1]), options=["fsync=off"], linger=0.05)'
TEMPORARY = "server = (kept := temporary()).__enter__()"


@dataclass
class Person:
    """Somebody with an account on this machine, an interpreter and a directory of their own."""

    account: Account | None  # None: who runs the tests
    python: str
    home: Path

    @property
    def directory(self) -> Path:
        """Where their server is."""
        return self.home / "postgres"

    def start(self, *arguments: str, **keywords: Any) -> subprocess.Popen[str]:
        """Start Python where the launcher can be imported."""
        return subprocess.Popen(
            [self.python, *arguments],
            cwd=self.home / "project",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **run_as(self.account),
            **keywords,
        )


@dataclass
class User:
    """A process that uses a server."""

    process: subprocess.Popen[str]
    directory: Path
    received: dict[str, Any] | None = None

    @property
    def state(self) -> dict[str, Any]:
        """What it got, as in `server.json`."""
        if self.received is None:
            assert self.process.stdout
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            self.received = json.loads(line)
        return self.received

    def query(self, statement: str) -> Any:
        with psycopg.connect(host=self.state["socket_directory"], user="postgres", dbname="postgres") as connection:
            cursor = connection.execute(statement)
            return cursor.fetchone() if cursor.description else None

    def end(self) -> None:
        self.process.communicate()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


# What the fixtures `use`, `leave` and `give_database` give.
Use = Callable[..., User]
Leave = Callable[[Path], None]
GiveDatabase = Callable[..., None]


def wait_for_end(directory: Path) -> None:
    """Wait until the server in the directory has ended, and its supervisor with it."""
    if directory.exists():
        lock = open_lock(directory / "supervisor.lock")
        assert acquire(lock, fcntl.LOCK_EX, timeout=DEADLINE)
        os.close(lock)


@contextmanager
def watched(*pids: int) -> Iterator[Callable[[], None]]:
    """Open handles of processes, and give a function that waits until all of them have ended."""
    handles = []
    for pid in pids:
        with suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))

    def wait_until_ended() -> None:
        for handle in handles:
            assert select.select([handle], [], [], DEADLINE)[0], "a process goes on that should have ended"

    try:
        yield wait_until_ended
    finally:
        for handle in handles:
            os.close(handle)


def kill_all(*pids: int) -> None:
    with watched(*pids) as wait_until_ended:
        for pid in pids:
            with suppress(ProcessLookupError):  # the server's children come and go, and end with it
                os.kill(pid, signal.SIGKILL)
        wait_until_ended()


def processes_of(state: dict[str, Any]) -> list[int]:
    """Return the pids of the server, first, its supervisor and the server's children.

    In this order, a server that is killed with all of them has no time to tidy up, as it would after its supervisor.
    """
    pids = [state["server_pid"], state["pid"]]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == state["server_pid"]:
            pids.append(int(stat.parent.name))
    return pids


def programs(directory: Path, version: str, initdb: str = "exit 1") -> Path:
    """Make a directory of programs that say which version they are; `initdb` is what they do else."""
    directory.mkdir(parents=True)
    for program in ("postgres", "initdb"):
        says_version = f'[ "$1" != --version ] || exec echo "{program} (PostgreSQL) {version}"'
        (directory / program).write_text(f"#!/bin/sh\n{says_version}\n{initdb}\n")
        (directory / program).chmod(0o755)
    return directory

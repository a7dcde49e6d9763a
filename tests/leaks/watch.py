"""What can be seen from outside while everything runs: queries in pg_stat_activity, and the files that are written."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any, Self

import psycopg

from tests.stores.strace import parse, require_strace

CALLS = "open,openat,creat,mkdir,mkdirat,mknod,mknodat,link,linkat,rename,renameat,renameat2,symlink,symlinkat,connect"
_PLACE = re.compile(r'(?:<(?P<directory>[^>]*)>, )?"(?P<name>(?:[^"\\]|\\.)*)"')


class Sampler:
    """Reads what all sessions are at, again and again, on a thread of its own."""

    def __init__(self, session: psycopg.Connection[Any]) -> None:
        session.autocommit = True
        self.session = session
        self.seen: set[str] = set()
        self.samples = 0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def sample(self) -> set[str]:
        """Look once; return the queries that are at work, or were the last of their session."""
        with self._lock:
            rows = self.session.execute("SELECT query FROM pg_stat_activity WHERE pid <> pg_backend_pid()").fetchall()
            now = {query for (query,) in rows if query}
            self.seen |= now
            self.samples += 1
        return now

    def _run(self) -> None:
        while not self._over.wait(0.004):
            self.sample()


def strace(log: Path) -> list[str]:
    """Return the command under which a process is watched, with all its children."""
    return [require_strace(), "-f", "--seccomp-bpf", "-y", "-qq", "-s", "4096", "-e", f"trace={CALLS}", "-o", str(log)]


def places(log: str) -> set[str]:
    """Return every path at which something was written, made or connected to, or was to be."""
    found = set()
    for call in parse(log):
        if call.name in ("open", "openat") and not re.search(r"O_(WRONLY|RDWR|CREAT)", call.arguments):
            continue
        named = list(_PLACE.finditer(call.arguments))
        if not named:
            found.add(f"{call.name}({call.arguments})")
            continue
        directory, name = named[-1]["directory"] or "", named[-1]["name"]
        found.add(name if name.startswith(("/", "@")) else f"{directory}/{name}")
    return found

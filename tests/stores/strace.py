"""The system calls of a real process, in order, and failures put in their place: `strace`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.needs import missing

PROJECT = Path(__file__).parents[2]
CALLS = "openat,mkdir,write,fsync,linkat,unlinkat"
LOOKS = "newfstatat"
"""Traced where they are asked for: an interpreter that starts makes thousands of them."""

_LINE = re.compile(r"(?P<thread>\d+) +(?P<rest>.*)")
_WHOLE = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+).*")
_BEGUN = re.compile(r"(?P<name>\w+)\((?P<arguments>.*) <unfinished \.\.\.>")
_ENDED = re.compile(r"<\.\.\. \w+ resumed>(?P<arguments>.*)\) += (?P<result>-?\d+).*")


@dataclass
class SystemCall:
    """One call; `begun` and `ended` count the lines of the trace, so that two calls can be put in order."""

    name: str
    arguments: str
    begun: int
    ended: int = -1
    result: int = -1

    @property
    def file(self) -> int:
        """The number of the open file that is its first argument."""
        found = re.match(r"\d+", self.arguments)
        return int(found[0]) if found else -1


def require_strace() -> str:
    """Return the path of strace; without one the test fails where everything has to be there, else it is skipped."""
    strace = shutil.which("strace")
    if not strace or subprocess.run([strace, "-o", "/dev/null", "true"], capture_output=True).returncode:
        missing("strace is missing, or may not trace here: `apt-get install strace`, CAP_SYS_PTRACE in a container")
    return strace


def trace(
    location: Path, *actions: str, inject: str = "", only: Path | None = None, looks: bool = False
) -> tuple[list[str], list[SystemCall]]:
    """Run `tests.stores.traced` on a directory; return its lines of output, and its calls below that directory.

    Among the calls are its writes to the standard output: each says that an action has returned. `inject`, as in
    strace's option of that name, makes system calls fail; `only`: those on this path, or through a handle of it.
    `looks`: with the calls that look a name up.
    """
    log = location.with_name("strace.log")
    command = [
        require_strace(),
        "-f",
        "-y",
        "-qq",
        "-s",
        "256",
        "-e",
        f"trace={CALLS},{LOOKS}" if looks else f"trace={CALLS}",
        "-o",
        str(log),
    ]
    if inject:
        command += ["-e", f"inject={inject}"]
    if only is not None:
        command += ["-P", str(only)]
    command += [sys.executable, "-m", "tests.stores.traced", str(location), *actions]
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=True)
    calls = [call for call in parse(log.read_text()) if str(location) in call.arguments or call.name == "write"]
    return done.stdout.splitlines(), calls


def parse(log: str) -> list[SystemCall]:
    """Return the calls in a log of `strace -f`, in the order in which they began."""
    calls: list[SystemCall] = []
    waiting: dict[str, SystemCall] = {}
    for number, line in enumerate(log.splitlines()):
        parts = _LINE.fullmatch(line)
        if parts is None:
            continue
        thread, rest = parts["thread"], parts["rest"]
        if whole := _WHOLE.fullmatch(rest):
            call = SystemCall(whole["name"], whole["arguments"], number, number, int(whole["result"]))
            calls.append(call)
        elif begun := _BEGUN.fullmatch(rest):
            waiting[thread] = SystemCall(begun["name"], begun["arguments"], number)
            calls.append(waiting[thread])
        elif ended := _ENDED.fullmatch(rest):
            call = waiting.pop(thread)
            call.arguments += ended["arguments"]
            call.ended, call.result = number, int(ended["result"])
    return calls

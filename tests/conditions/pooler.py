"""A pooler in transaction mode, with two connections to the server: PgBouncer, as many projects have it.

    python -m tests.conditions.pooler [ARGUMENT ...]

runs pytest with the default database behind one: with the part of the suite that is `CHOSEN`, unless the arguments name
tests. The exit code is pytest's; without PgBouncer it is 1.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from example_project import postgres
from tests import needs
from tests.waiting import until

SIZE = 2
"""Connections to the server, for each database: whatever is open at the same time besides has to wait."""
WAITS_FOR = 15
"""Seconds after which a client that waits for one of them is refused."""

CONFIGURATION = """
[databases]
* = {server}

[pgbouncer]
listen_addr =
listen_port = 6432
unix_socket_dir = {directory}
auth_type = any
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 200
query_wait_timeout = {waits_for}
# The sessions stay, and keep whatever a client has left in them, to be looked at.
server_idle_timeout = 0
server_lifetime = 3600
logfile = {directory}/log
"""

CHOSEN = [
    "tests/services",
    "tests/backfill",
    "tests/pause",
    "tests/binding",
    "tests/cleanup/test_claim.py",
    "tests/cleanup/test_fence.py",
    "tests/cleanup/test_outcomes.py",
    "tests/cleanup/test_purge.py",
    "tests/cleanup/test_rescue.py",
    "tests/cleanup/test_sweep.py",
]
"""What can hold with two connections, within about a minute. The rest has three sessions or more at once, servers and
databases of its own, or needs no database."""

LEFT_OUT = {
    "tests/services/test_operations_repeated.py": "ends sessions by process ids that it is told: the pooler's",
    "tests/backfill/test_few_among_many.py": "reads the statistics of its own session",
    "tests/backfill/test_worker.py::test_a_batch_that_takes_longer_than_its_lease_is_renewed": "its session prepares",
    "tests/binding/test_mishaps.py": "copies, drops and restores databases, which the pooler's sessions keep open",
}
"""What of it cannot, and why."""


@contextmanager
def pooler(server: Mapping[str, Any], program: Path) -> Iterator[dict[str, str]]:
    """Give a pooler in front of a server, both as entries of DATABASES."""
    with tempfile.TemporaryDirectory(prefix="kfs-pooler-") as name:
        directory = Path(name)
        account = _account(str(server["HOST"]))
        if account is not None:
            os.chown(directory, account, -1)
        configuration = directory / "pgbouncer.ini"
        keys = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD"}
        given = " ".join(f"{key}='{server[value]}'" for key, value in keys.items() if server.get(value))
        configuration.write_text(
            CONFIGURATION.format(server=given, directory=directory, size=SIZE, waits_for=WAITS_FOR)
        )
        configuration.chmod(0o644)
        as_user: dict[str, Any] = {} if account is None else {"user": account, "extra_groups": []}
        with (directory / "output").open("w") as output:
            process = subprocess.Popen(
                [program, "-q", configuration],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                **as_user,
            )
        try:
            _wait_for(directory / ".s.PGSQL.6432", process, directory / "output")
            yield {
                "ENGINE": "django.db.backends.postgresql",
                "HOST": str(directory),
                "PORT": "6432",
                "USER": str(server["USER"]),
                "PASSWORD": "",
            }
        finally:
            process.terminate()
            process.wait()


def _account(host: str) -> int | None:
    """Return whose process it is to be, None for our own: root's is refused, and the server's socket is not for all."""
    if os.geteuid():
        return None
    return Path(host).stat().st_uid if host.startswith("/") else 65534


def _wait_for(path: Path, process: subprocess.Popen[bytes], output: Path) -> None:
    """Wait until it takes connections: the file of the socket is there before."""

    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"PgBouncer did not start:\n{output.read_text()}")
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(path)) == 0

    until(answers, "PgBouncer answers")


def connect(pooled: Mapping[str, Any], database: str) -> psycopg.Connection[Any]:
    """Open a connection by a pooler."""
    return psycopg.connect(
        host=pooled["HOST"], port=pooled["PORT"], user=pooled["USER"], dbname=database, prepare_threshold=None
    )


# What PgBouncer itself keeps for each client, and sets anew when it gives a session to another one; and what begins
# anew with each transaction, though it is listed as the session's.
KEPT = (
    *("application_name", "client_encoding", "DateStyle", "TimeZone", "standard_conforming_strings"),
    *("transaction_isolation", "transaction_read_only", "transaction_deferrable"),
)

LEFT_BEHIND = {
    "a setting": f"SELECT name FROM pg_settings WHERE source = 'session' AND name NOT IN {KEPT}",
    "a lock": "SELECT locktype FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'",
    "a cursor": "SELECT name FROM pg_cursors",
    "a prepared statement": "SELECT name FROM pg_prepared_statements",
    "a channel": "SELECT * FROM pg_listening_channels()",
    "a temporary table": "SELECT relname FROM pg_class WHERE relnamespace = pg_my_temp_schema()",
}


def left_behind(pooled: Mapping[str, Any], database: str) -> dict[int, list[str]]:
    """Return by the process id of each session what somebody has left in it; nobody else may be at work."""
    with connect(pooled, database) as first, connect(pooled, database) as second:
        found = {}
        for session in (first, second):  # both in a transaction, so that neither has the other's
            pid = session.execute("SELECT pg_backend_pid()").fetchone()
            assert pid is not None
            found[pid[0]] = [
                f"{what}: {name}" for what, query in LEFT_BEHIND.items() for (name,) in session.execute(query)
            ]
        return found


def main(arguments: Sequence[str]) -> int:
    """Run pytest behind a pooler."""
    program = needs.found_pgbouncer()
    if program is None:
        print("pgbouncer is not installed: apt-get install pgbouncer", file=sys.stderr)  # noqa: T201
        return 1
    named = [argument for argument in arguments if Path(argument.split("::")[0]).exists()]
    with (
        postgres.temporary(["fsync=off", "max_connections=200"]) as server,
        pooler(server.django_database(), program) as pooled,
    ):
        place = f"postgres://{quote(pooled['USER'])}@:{pooled['PORT']}/{pooled['HOST']}/postgres"
        # A database that is in use by a session of the pooler cannot be dropped: all of them go with the server.
        chosen = [] if named else [*CHOSEN, *(f"--deselect={test}" for test in LEFT_OUT)]
        command = [sys.executable, "-m", "pytest", "--reuse-db", *chosen, *arguments]
        return subprocess.run(command, env={**os.environ, "DATABASE_URL": place}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

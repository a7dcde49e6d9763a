"""A replica: a second server that follows the first one, and that can be made to lag behind it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from example_project import postgres
from example_project.postgres import find_binaries
from example_project.postgres_supervisor import environment
from tests.waiting import until


@contextmanager
def standby_of(server: postgres.Server) -> Iterator[dict[str, str]]:
    """Give a replica of a server, as an entry of DATABASES. It streams what the server writes, and answers queries."""
    with tempfile.TemporaryDirectory(prefix="kfs-standby-") as name:
        directory = Path(name)
        directory.chmod(0o711)
        data, sockets = directory / "data", directory / "sockets"
        _copy(server, data)
        owner = server.data_directory.stat()
        sockets.mkdir(mode=0o700)
        os.chown(sockets, owner.st_uid, owner.st_gid)
        as_user: dict[str, Any] = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
        with (directory / "log").open("w") as log:
            process = subprocess.Popen(
                [find_binaries().directory / "postgres", "-D", data, "-k", sockets, "-c", "listen_addresses="],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=environment(),
                **({} if os.geteuid() else as_user),
            )
        try:
            entry = {**server.django_database(), "HOST": str(sockets)}
            _wait_for(entry, process, directory / "log")
            yield entry
        finally:
            process.send_signal(signal.SIGQUIT)
            process.wait()


def _copy(server: postgres.Server, data: Path) -> None:
    """Copy a server's files while it runs, and say of the copy that it is to follow the server."""
    with psycopg.connect(server.dsn(), autocommit=True) as session:
        session.execute("SELECT pg_backup_start('tests', true)")
        # What the server removes meanwhile is not missed.
        shutil.copytree(
            server.data_directory, data, symlinks=True, ignore=shutil.ignore_patterns("postmaster.*", "pg_replslot")
        )
        row = session.execute("SELECT labelfile FROM pg_backup_stop(false)").fetchone()
        assert row is not None
    (data / "pg_replslot").mkdir()
    (data / "backup_label").write_text(row[0])
    (data / "standby.signal").touch()
    with (data / "postgresql.auto.conf").open("a") as settings:
        settings.write(f"primary_conninfo = 'host={server.socket_directory} port={server.port} user={server.user}'\n")
    owner = server.data_directory.stat()
    data.chmod(0o700)
    for path in (data, *data.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _wait_for(entry: dict[str, str], process: subprocess.Popen[bytes], log: Path) -> None:
    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the replica did not start:\n{log.read_text()}")
        with suppress(psycopg.OperationalError), _connect(entry):
            return True
        return False

    until(answers, "the replica answers")


def _connect(entry: dict[str, str]) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(
        host=entry["HOST"], port=entry["PORT"], user=entry["USER"], dbname=entry["NAME"], autocommit=True
    )


def stop_replaying(server: postgres.Server, entry: dict[str, str]) -> None:
    """Let a replica stay as its server is now, while the server goes on."""
    with psycopg.connect(server.dsn(), autocommit=True) as first, _connect(entry) as second:
        row = first.execute("SELECT pg_current_wal_lsn()").fetchone()
        assert row is not None
        follows, state = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", "SELECT pg_get_wal_replay_pause_state()"
        until(lambda: second.execute(follows, row).fetchone() == (True,), "the replica has followed")
        second.execute("SELECT pg_wal_replay_pause()")
        until(lambda: second.execute(state).fetchone() == ("paused",), "the replica stays as it is")

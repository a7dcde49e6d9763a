"""What the launcher says when no server can be had."""

import subprocess
import sys
from pathlib import Path

import pytest

from example_project import postgres
from example_project.postgres import PostgresError, running, temporary
from tests import needs

from .postgres_users import PROJECT, Person, Use, programs, watched


def test_a_setting_that_the_server_refuses() -> None:
    server = temporary(["no_such_setting=1"])
    with pytest.raises(PostgresError, match=r"(?s)did not start.*unrecognized .*no_such_setting"), server:
        pass


def test_other_options_than_the_running_server_has(me: Person, use: Use) -> None:
    user = use(me)
    state = user.state
    with pytest.raises(PostgresError, match=r"options \['fsync=off'\], not with \[\]. End the programs"):
        running(me.directory)
    with watched(state["server_pid"]) as wait_until_ended:
        user.end()
        wait_until_ended()  # who got no server does not keep one alive


def test_a_database_of_another_version(place: Path) -> None:
    data = place / "postgres" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("99\n")
    with pytest.raises(PostgresError) as caught:
        running(data.parent)
    assert f"{data.parent} holds a database of PostgreSQL 99. There are no programs of" in str(caught.value)
    assert f"python -m example_project.postgres remove {data.parent}" in str(caught.value)


def test_initdb_fails(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = programs(place / "bin", "15.3", initdb="echo 'initdb: error: the reason'; exit 1")
    monkeypatch.setenv("KFS_POSTGRES_BIN", str(failing))
    with pytest.raises(PostgresError, match=r"(?s)initdb could not make a database in .*the reason$"):
        running(place / "postgres")


def test_a_file_in_the_way(place: Path) -> None:
    (place / "file").touch()
    with pytest.raises(PostgresError, match=r"cannot hold a server .*Remove it or choose another directory"):
        running(place / "file")


def test_a_directory_of_somebody_else(nobody: Person, place: Path) -> None:
    process = nobody.start("-m", "example_project.postgres", "run", str(place / "postgres"), "true")
    _, message = process.communicate()
    assert process.returncode == 1
    assert message.startswith(f"{place / 'postgres'} is not writable for this user (")
    assert "else choose another directory" in message


def test_a_full_disk(place: Path) -> None:
    mount = f"mount -t tmpfs -o size=8m,mode=755 disk {place}"
    launch = f"exec {sys.executable} -m example_project.postgres run {place}/postgres true"

    def with_small_disk(command: str) -> subprocess.CompletedProcess[str]:
        private = ["unshare", "--mount", "sh", "-c", f"{mount} && {command}"]
        return subprocess.run(private, cwd=PROJECT, capture_output=True, text=True)

    if with_small_disk("true").returncode:
        needs.missing("only who may mount can have a small disk")
    result = with_small_disk(launch)
    assert result.returncode == 1
    assert result.stderr.startswith(f"The disk that holds {place}/postgres is full. Free some space")


def test_a_directory_that_is_no_servers_is_not_removed(tmp_path: Path) -> None:
    with pytest.raises(PostgresError, match="is not a directory that this program made: it stays"):
        postgres.remove(tmp_path)
    assert tmp_path.exists()

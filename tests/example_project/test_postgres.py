"""Real servers, real processes, real kills."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from example_project import postgres
from example_project.postgres import PostgresError, find_binaries, running, temporary
from example_project.postgres_supervisor import Account, run_as

from .postgres_users import (
    TEMPORARY,
    GiveDatabase,
    Leave,
    Person,
    Use,
    kill_all,
    processes_of,
    wait_for_end,
    watched,
)

IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="the server of a normal user runs as that user")


@contextmanager
def stranger(account: Account | None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that has nothing to do with us."""
    process = subprocess.Popen(["sleep", "1000"], **run_as(account))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def name_instead(pid: int, lock_file: Path) -> None:
    """Make a lock file of PostgreSQL name that process."""
    _, *rest = lock_file.read_text().splitlines(keepends=True)
    lock_file.write_text("".join([f"{pid}\n", *rest]))


class TestSharing:
    def test_processes_that_start_at_once_get_one_server(self, person: Person, use: Use) -> None:
        users = [use(person, is_new=True) for _ in range(4)]
        state = users[0].state
        assert [user.state for user in users] == [state] * 4
        assert users[0].query("SELECT 1") == (1,)
        with watched(state["server_pid"], state["pid"]) as wait_until_ended:
            for user in users:
                user.end()
            wait_until_ended()
        assert not (person.directory / "server.json").exists()

    def test_a_killed_user_counts_no_more_and_the_others_keep_the_server(self, me: Person, use: Use) -> None:
        first, second = use(me), use(me)
        state = first.state
        assert second.state == state
        with watched(state["server_pid"], state["pid"]) as wait_until_ended:
            first.kill()
            third = use(me)
            assert third.state == state
            third.end()
            second.kill()
            wait_until_ended()

    def test_the_server_of_a_removed_directory_leaves_the_next_one_alone(self, me: Person, use: Use) -> None:
        old = use(me)
        old_socket = Path(old.state["socket_directory"])
        shutil.rmtree(me.directory)
        new = use(me)
        assert new.query("SELECT 1") == (1,)
        with watched(old.state["server_pid"], old.state["pid"]) as wait_until_ended:
            old.end()
            wait_until_ended()
        assert not old_socket.exists()
        assert (me.directory / "server.json").exists()
        assert new.query("SELECT 1") == (1,)

    def test_one_process_can_have_two_in_a_row_in_one_place(
        self, place: Path, leave: Leave, give_database: GiveDatabase
    ) -> None:
        directory = place / "postgres"
        give_database(directory)
        old = running(directory, linger=0.05)
        shutil.rmtree(directory)
        new = running(directory, linger=0.05)
        assert new.socket_directory != old.socket_directory
        with pytest.raises(PostgresError, match="is in use"):
            postgres.remove(directory)

    def test_neither_our_environment_nor_a_users_lock_reaches_the_server(self, me: Person, use: Use) -> None:
        state = use(me, env={**os.environ, "KFS_CREDENTIALS_KEYS": "canary"}).state
        for pid in (state["pid"], state["server_pid"]):
            assert b"canary" not in Path(f"/proc/{pid}/environ").read_bytes()
        open_files = [os.path.realpath(link) for link in Path(f"/proc/{state['server_pid']}/fd").iterdir()]
        locks = {Path(path).name for path in open_files if path.endswith(".lock")}
        assert locks == {"server.lock"}


class TestKills:
    def test_the_supervisor(self, person: Person, use: Use) -> None:
        state = use(person).state
        with watched(state["server_pid"]) as wait_until_ended:
            os.kill(state["pid"], signal.SIGKILL)
            following = use(person)
            assert following.query("SELECT 1") == (1,)
            wait_until_ended()

    def test_the_server(self, me: Person, use: Use) -> None:
        state = use(me).state
        with watched(state["pid"]) as wait_until_ended:
            os.kill(state["server_pid"], signal.SIGKILL)
            wait_until_ended()
        assert use(me).query("SELECT 1") == (1,)

    def test_everything_at_once_loses_no_commit(self, me: Person, use: Use) -> None:
        user = use(me)
        user.query("CREATE TABLE kept AS SELECT 42 AS answer")
        kill_all(*processes_of(user.state), user.process.pid)
        assert use(me).query("SELECT answer FROM kept") == (42,)

    def test_a_stale_pid_that_is_a_strangers_by_now(self, person: Person, use: Use) -> None:
        user = use(person)
        state = user.state
        kill_all(*processes_of(state), user.process.pid)
        pid_file = Path(state["data_directory"], "postmaster.pid")
        owner = Account(pid_file.stat().st_uid, pid_file.stat().st_gid)
        account = owner if IS_ROOT else None
        with stranger(account) as one, stranger(account) as other:
            name_instead(one.pid, pid_file)
            name_instead(other.pid, Path(state["socket_directory"], ".s.PGSQL.5432.lock"))
            forged = json.dumps({**state, "pid": one.pid})
            (person.directory / "server.json").write_text(forged)
            # Neither may stop the next start, and no start and no removal may signal them.
            following = use(person)
            assert following.query("SELECT 1") == (1,)
            kill_all(*processes_of(following.state), following.process.pid)
            (person.directory / "server.json").write_text(forged)
            postgres.remove(person.directory)
            assert one.poll() is None
            assert other.poll() is None

    def test_a_start_that_had_not_written_its_pid_yet(self, me: Person, use: Use) -> None:
        user = use(me)
        pid_file = Path(user.state["data_directory"], "postmaster.pid")
        user.end()
        wait_for_end(me.directory)
        pid_file.touch()
        assert use(me).query("SELECT 1") == (1,)

    def test_an_unfinished_new_database(self, me: Person, use: Use) -> None:
        partial = me.directory / "data.partial"
        partial.mkdir(parents=True)
        (partial / "PG_VERSION").write_text("14\n")
        assert use(me).query("SELECT 1") == (1,)
        assert not partial.exists()


class TestTemporary:
    def test_has_its_options_and_restarts_and_leaves_nothing(self) -> None:
        with temporary(["fsync=off", "log_statement=all"]) as server:
            with psycopg.connect(server.dsn()) as connection:
                connection.execute("CREATE TABLE kept AS SELECT 'in the log' AS value")
                settings = "SELECT current_setting('fsync'), current_setting('server_version_num')::int / 10000"
                assert connection.execute(settings).fetchone() == ("off", server.version[0])
            server.restart("fast")
            server.restart("immediate")
            with psycopg.connect(server.dsn()) as connection:
                assert connection.execute("SELECT value FROM kept").fetchone() == ("in the log",)
            log = server.log_file.read_text()
            for text in (
                "'in the log'",
                "received fast shutdown request",
                "received immediate shutdown request",
            ):
                assert text in log
            assert server.log_file.stat().st_mode & 0o777 == 0o600
            assert server.socket_directory.stat().st_mode & 0o777 == 0o700
        assert not server.directory.exists()
        assert not server.socket_directory.exists()

    def test_goes_when_its_process_is_killed(self, me: Person, use: Use) -> None:
        user = use(me, start=TEMPORARY, is_new=True)
        state = user.state
        with watched(state["pid"], state["server_pid"]) as wait_until_ended:
            user.kill()
            wait_until_ended()
        assert not Path(state["data_directory"]).parent.exists()
        assert not Path(state["socket_directory"]).exists()


class TestPlaces:
    @needs_root
    def test_below_a_private_directory_of_root(self, place: Path, leave: Leave) -> None:
        (place / "private").mkdir(0o700)
        directory = place / "private" / ("deep, with spaces, " * 6) / "postgres"
        server = running(directory, linger=0.05)
        assert server.data_directory.parents[1] == Path("/var/tmp")
        assert server.data_directory.stat().st_mode & 0o777 == 0o700
        with psycopg.connect(server.dsn()) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        leave(directory)
        assert running(directory, linger=0.05) == server
        with psycopg.connect(server.dsn()) as connection:
            assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)
        leave(directory)
        postgres.remove(directory)
        for path in (directory, server.data_directory.parent, server.socket_directory):
            assert not path.exists()

    @needs_root
    def test_a_database_that_its_owner_cannot_reach_any_more(
        self, place: Path, leave: Leave, give_database: GiveDatabase
    ) -> None:
        give_database(place / "postgres")
        running(place / "postgres", linger=0.05)
        leave(place / "postgres")
        place.chmod(0o700)
        with pytest.raises(PostgresError, match=r"holds a database that its owner.* cannot reach: let others"):
            running(place / "postgres")

    def test_a_copy_of_the_directory_shares_nothing_with_the_original(self, me: Person, use: Use) -> None:
        original = use(me)
        original.query("CHECKPOINT")
        copy, other_copy = me.home / "copy", me.home / "other"
        for target in (copy, other_copy):
            subprocess.run(["cp", "-a", original.directory, target], check=True)
        use(me, copy).query("CREATE TABLE only_in_the_copy ()")
        postgres.remove(other_copy)
        assert original.query("SELECT to_regclass('only_in_the_copy')") == (None,)


def test_django_connects_where_libpq_does(place: Path, leave: Leave, give_database: GiveDatabase) -> None:
    give_database(place / "postgres")
    server = running(place / "postgres", linger=0.05)
    names = {"HOST": "host", "PORT": "port", "USER": "user", "NAME": "dbname"}
    database = server.django_database("a 'name'")
    assert database.pop("ENGINE") == "django.db.backends.postgresql"
    wanted = psycopg.conninfo.conninfo_to_dict(server.dsn("a 'name'"))
    assert {names[key]: value for key, value in database.items()} == wanted
    psycopg.connect(server.dsn()).close()


def test_command_line(
    place: Path, leave: Leave, give_database: GiveDatabase, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = str(place / "postgres")
    give_database(Path(directory))
    running(Path(directory), linger=0.05)
    show = "import os; print(os.environ['PGUSER'], *sorted(os.listdir(os.environ['PGHOST'])))"
    assert postgres.main(["run", directory, sys.executable, "-c", show]) == 0
    assert postgres.main(["run", directory, "false"]) == 1
    assert postgres.main(["binaries"]) == 0
    expected = f"postgres .s.PGSQL.5432 .s.PGSQL.5432.lock\n{find_binaries().directory}\n"
    assert capfd.readouterr().out == expected
    assert postgres.main(["remove", directory]) == 1
    assert capfd.readouterr().err.endswith("is in use: end the programs that use it and try again.\n")
    leave(Path(directory))
    assert postgres.main(["remove", directory, str(place / "missing")]) == 0
    assert not Path(directory).exists()

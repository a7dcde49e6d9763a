"""Fixtures for the tests of the launcher."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from example_project import postgres
from example_project.postgres import find_binaries, running
from example_project.postgres_supervisor import Account, remove_tree, run_as

from .postgres_users import PROJECT, RUNNING, USER_PROGRAM, GiveDatabase, Leave, Person, Use, User, wait_for_end


@contextmanager
def public_directory() -> Iterator[Path]:
    """Make a directory that every user of the machine can reach; pytest's own are private."""
    path = Path(tempfile.mkdtemp(prefix="kfs-test-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        for lock in list(path.rglob("server.lock")):
            remove_tree(lock.parent)
        shutil.rmtree(path)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user of the machine can reach."""
    with public_directory() as path:
        yield path


@pytest.fixture(scope="session")
def made_database() -> Iterator[Path]:
    """The directory of a stopped server that no test changes."""
    with public_directory() as path:
        directory = path / "postgres"
        running(directory, linger=0.05)
        postgres._leave(directory)
        wait_for_end(directory)
        yield directory


@pytest.fixture
def give_database(made_database: Path) -> GiveDatabase:
    """Put a copy of a new database where a server will be started: initdb takes a second each time."""

    def give(directory: Path, account: Account | None = None) -> None:
        directory.mkdir(mode=postgres._directory_mode())
        subprocess.run(["cp", "-a", made_database / "data", directory], check=True)
        if account:
            subprocess.run(["chown", "-R", f"{account.uid}:{account.gid}", directory], check=True)

    return give


@pytest.fixture
def me(place: Path) -> Person:
    """Who runs the tests."""
    home = place / "home"
    home.mkdir()
    (home / "project").symlink_to(PROJECT)
    return Person(None, sys.executable, home)


@pytest.fixture
def nobody(place: Path, monkeypatch: pytest.MonkeyPatch) -> Person:
    """A normal user, even if root runs the tests."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as somebody else")
    entry = pwd.getpwnam("nobody")
    account = Account(entry.pw_uid, entry.pw_gid)
    monkeypatch.setenv("KFS_POSTGRES_BIN", str(find_binaries(account=account).directory))
    home = place / "nobody"
    shutil.copytree(PROJECT / "example_project", home / "project" / "example_project")
    os.chown(home, *account)
    return Person(account, python_for(account), home)


def python_for(account: Account) -> str:
    """Return an interpreter that the account can run; ours may lie in a private directory."""
    check = ["-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            if subprocess.run([python, *check], **run_as(account), capture_output=True).returncode == 0:
                return python
        except OSError:
            continue
    pytest.skip("there is no Python 3.11 that a normal user could run")


@pytest.fixture(params=["me", "nobody"])
def person(request: pytest.FixtureRequest) -> Person:
    somebody = request.getfixturevalue(request.param)
    assert isinstance(somebody, Person)
    return somebody


@pytest.fixture
def use(place: Path, give_database: GiveDatabase) -> Iterator[Use]:
    """Start a process that uses a server; at the end no process and no server is left."""
    users: list[User] = []

    def begin(
        person: Person, directory: Path | None = None, *, start: str = RUNNING, is_new: bool = False, **keywords: Any
    ) -> User:
        directory = directory or person.directory
        if not is_new and not directory.exists():
            give_database(directory, person.account)
        program = USER_PROGRAM.format(start=start)
        users.append(User(person.start("-c", program, str(directory), **keywords), directory))
        return users[-1]

    yield begin
    for user in users:
        user.end()
    for directory in {user.directory for user in users}:
        wait_for_end(directory)


@pytest.fixture
def leave(place: Path) -> Iterator[Leave]:
    """End the use of a server by the tests' own process, which else lasts as long as that."""

    def leave(directory: Path) -> None:
        postgres._leave(directory)
        wait_for_end(directory)

    before = set(postgres._users_locks)
    yield leave
    for directory in set(postgres._users_locks) - before:
        leave(directory)

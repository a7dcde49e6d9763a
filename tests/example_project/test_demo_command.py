"""`make demo`: what it makes, that it changes nothing when it runs again, and what it refuses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections
from pytest_django import DjangoDbBlocker

from example_project import environment as demo_environment
from example_project import postgres
from example_project.demo_data import expected, foreign_sources
from example_project.read_back import read_back
from kfs_credentials.crypto import Scope
from kfs_credentials.models import Source
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory
from tests.management.commands import MANAGE, ROOT, Outcome, Run, database_url, environment, runner
from tests.management.rows import directory_contents, give_ref, table_contents
from tests.migrations.hosts import Host, throw_away
from tests.waiting import PATIENCE

NUMBER = 250
"""Enough for the awkward sources, which make the difference."""
MOVABLE = sum(1 for one in expected(NUMBER) if one.kind == "movable")
LEFT_ALONE = NUMBER - MOVABLE
KEY = "5c" * 32

pytestmark = pytest.mark.unbound


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys)


@pytest.fixture
def demo(run: Run, secrets_directory: Path, transactional_db: None) -> Callable[..., Outcome]:
    """Return a function that runs the demo on the tests' database."""
    return lambda *arguments: run("demo", "--number", NUMBER, *arguments)


# On a database of its own.


@pytest.fixture
def clone(place: Path) -> Iterator[Path]:
    """The project's files alone, as after `git clone`."""
    for name in ("example_project", "kfs_credentials"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "manage.py", place)
    yield place
    postgres.remove(place / ".demo" / "postgres")


def manage(clone: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=clone,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_a_fresh_clone(clone: Path) -> None:
    first = manage(clone, "demo", "--number", str(NUMBER))
    assert (first.returncode, first.stderr) == (0, "")
    steps = [line for line in first.stdout.splitlines() if line.startswith("==> ")]
    assert steps == [
        "==> Making a key for the demo: .demo/key",
        "==> Migrating",
        f"==> Loading {NUMBER} made-up sources with credentials in clear",
        "==> Moving them: manage.py run_credential_backfill",
        "==> Reading every one back from the encrypted store, and comparing",
        "==> The status: manage.py credential_status",
    ]
    assert f"{MOVABLE} credentials read back as they were, {LEFT_ALONE} sources left alone, 0 wrong" in first.stdout
    for counted in ("movable", "queued", "running"):
        assert re.search(rf" {counted} +0 ", first.stdout)
    assert first.stdout.endswith("(`manage.py settle_unsupported_credentials --all --dry-run` lists them).\n")
    made = directory_contents(clone / ".demo" / "secrets")
    key = clone / ".demo" / "key"
    assert len(made) == MOVABLE + 1  # the probe
    assert key.stat().st_mode & 0o777 == 0o600
    kept = key.read_text()

    # What it made is there for the other commands.
    status = manage(clone, "credential_status", "--check")
    assert (status.returncode, status.stderr) == (3, "")
    assert re.search(r"To look at: 12 unsupported; 5 too large ", status.stdout)

    again = manage(clone, "demo", "--number", str(NUMBER))
    assert (again.returncode, again.stderr) == (0, "")
    assert "They are there already." in again.stdout
    assert "0 moved in" in again.stdout
    assert (directory_contents(clone / ".demo" / "secrets"), key.read_text()) == (made, kept)


# On a database of somebody's.


def test_every_credential_reads_back_and_nothing_changes_the_second_time(
    demo: Callable[..., Outcome], secrets_directory: Path
) -> None:
    first = demo()
    assert (first.code, first.err) == (0, "")
    assert read_back("default", NUMBER, 2026)[:3] == (MOVABLE, LEFT_ALONE, 0)
    before = table_contents(), directory_contents(secrets_directory)
    again = demo()
    assert (again.code, again.err) == (0, "")
    assert (table_contents(), directory_contents(secrets_directory)) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [("9007199254740993", "9007199254740992"), ('"provider"', '"Provider"'), ('"provider"', '"more": 1, "provider"')],
)
def test_a_changed_source_is_found(demo: Callable[..., Outcome], old: str, new: str) -> None:
    assert demo().code == 0
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sources SET metadata = replace(metadata::text, %s, %s)::jsonb WHERE id = ("
            "SELECT id FROM sources WHERE credential_ref IS NOT NULL AND strpos(metadata::text, %s) > 0 "
            "ORDER BY id LIMIT 1) RETURNING id",
            [old, new, old],
        )
        found = cursor.fetchone()
    assert found is not None
    outcome = demo()
    assert outcome.code == 1
    assert outcome.err == (
        f"CommandError: 1 source not as expected: {found[0]}. Somebody has changed the data since the demo made it, or "
        "this is a fault: please report it.\n"
    )


@pytest.mark.parametrize(
    "change",
    [
        "SET metadata = jsonb_set(metadata, '{credentials}', '1') WHERE metadata -> 'credentials' = 'true'",
        """SET metadata = metadata || '{"credentials": {}}' WHERE id = (SELECT source_id FROM moved)""",
        "SET credential_ref = NULL WHERE id = (SELECT source_id FROM moved)",
    ],
    ids=["1 for true", "credentials that are back", "a ref that is gone"],
)
def test_a_source_that_only_looks_right_is_found(demo: Callable[..., Outcome], change: str) -> None:
    assert demo().code == 0
    with connection.cursor() as cursor:
        cursor.execute(
            "WITH moved AS (SELECT source_id FROM source_credential_backfills WHERE run_state = 'succeeded' LIMIT 1) "
            f"UPDATE sources {change}"
        )
        assert cursor.rowcount == 1
    outcome = demo()
    assert outcome.code == 1
    assert outcome.err.startswith("CommandError: 1 source not as expected: ")


def test_a_secret_that_lost_a_digit_is_found(demo: Callable[..., Outcome], store: EncryptedStore) -> None:
    assert demo().code == 0
    source = Source.objects.select_related("knowledge_space").get(name="9007199254740993, which is beyond 2^53")
    scope = Scope(source.knowledge_space.tenant_id, source.knowledge_space_id, source.pk)
    rounded = {name: number - 1 for name, number in store.get(scope, str(source.credential_ref)).items()}
    ref = give_ref(source)
    store.put(scope, ref, rounded)
    assert read_back("default", NUMBER, 2026)[2:] == (1, [source.pk])


def test_a_lost_secret_is_found(demo: Callable[..., Outcome], secrets_directory: Path) -> None:
    assert demo().code == 0
    files = [path for path in sorted(secrets_directory.rglob("*")) if path.is_file()]
    for path in files[:7]:
        path.unlink()
    files[7].write_bytes(files[8].read_bytes())
    outcome = demo()
    assert outcome.code == 1
    assert re.match(r"CommandError: 8 sources not as expected: ([0-9a-f-]{36}, ){5}\.\.\.\. ", outcome.err)


def test_foreign_sources(run: Run, secrets_directory: Path, transactional_db: None) -> None:
    SourceFactory.create_batch(2)
    before = table_contents()
    secrets_directory.rmdir()
    outcome = run("demo")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "CommandError: This database holds 2 sources that the demo did not make, and the demo would move the "
        "credentials of all. Nothing was touched. Give it another database with DATABASE_URL, or unset that for one "
        "of its own; `make clean` removes its own, if these were made in that.\n"
    )
    assert table_contents() == before
    assert not secrets_directory.exists()


def test_foreign_sources_beside_the_demos(demo: Callable[..., Outcome]) -> None:
    assert demo().code == 0
    SourceFactory.create()
    outcome = demo()
    assert outcome.code == 1
    assert "holds 1 source that the demo did not make" in outcome.err


@pytest.mark.parametrize("arguments", [["--number", "300"], ["--seed", "7"]])
def test_another_number_or_seed(demo: Callable[..., Outcome], arguments: list[str]) -> None:
    assert demo().code == 0
    before = table_contents()
    outcome = demo(*arguments)
    assert outcome.code == 1
    assert outcome.err.startswith(f"CommandError: This database holds another demo: {NUMBER} sources with seed 2026;")
    assert outcome.err.endswith(
        "Ask for the same number and seed as before, or use another database. `make clean` removes the demo's own.\n"
    )
    assert table_contents() == before


def test_a_database_out_of_reach(run: Run, secrets_directory: Path, transactional_db: None, tmp_path: Path) -> None:
    here = connection.settings_dict["HOST"]
    connection.close()
    connection.settings_dict["HOST"] = str(tmp_path)
    try:
        outcome = run("demo")
    finally:
        connection.settings_dict["HOST"] = here
    assert (outcome.code, outcome.out) == (5, "")
    assert outcome.err.startswith("CommandError: The database 'default' is out of reach (")


def test_a_directory_that_cannot_be_made(run: Run, secrets_directory: Path, transactional_db: None) -> None:
    secrets_directory.rmdir()
    secrets_directory.write_text("a file")
    outcome = run("demo")
    assert outcome.code == 1
    assert outcome.err == (
        f"CommandError: The demo cannot make the directory for its secrets, {secrets_directory} (File exists). Give "
        "another one with KFS_SECRETS_DIR.\n"
    )


def test_a_key_that_is_none(demo: Callable[..., Outcome], secrets_directory: Path, kfs_settings: Any) -> None:
    kfs_settings(KEYS=["too short"])
    outcome = demo()
    assert outcome.code == 1
    assert "KFS_CREDENTIALS['KEYS'], key 1 of 1: A key must be 64 hex digits" in outcome.err


# Its key.


@pytest.fixture
def key_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kfs_settings: Any) -> Path:
    """Where the demo keeps its key, which the settings do not have."""
    kfs_settings(KEYS=[])
    file = tmp_path / "demo" / "key"
    for module in ("example_project.management.commands.demo", "example_project.environment"):
        monkeypatch.setattr(f"{module}.DEMO_KEY_FILE", file)
        monkeypatch.setattr(f"{module}.BASE_DIR", tmp_path)
    return file


def test_the_key_is_made_once(demo: Callable[..., Outcome], key_file: Path, kfs_settings: Any) -> None:
    first = demo()
    assert first.out.startswith("==> Making a key for the demo: demo/key\n")
    (key,) = demo_environment.keys()
    assert re.fullmatch(r"[0-9a-f]{64}", key)
    assert key not in first.out
    assert [path.name for path in key_file.parent.iterdir()] == ["key"]
    kfs_settings(KEYS=[])
    again = demo()
    assert (again.code, demo_environment.keys()) == (0, [key])


def test_a_key_that_another_demo_makes_meanwhile(
    demo: Callable[..., Outcome], key_file: Path, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    real = os.link

    def link(source: Any, target: Any, **options: Any) -> None:
        if target == key_file:
            key_file.write_text(f"{KEY}\n")
        real(source, target, **options)

    monkeypatch.setattr(os, "link", link)
    assert demo().code == 0
    assert settings.KFS_CREDENTIALS["KEYS"] == demo_environment.keys() == [KEY]


def test_a_key_that_cannot_be_kept(demo: Callable[..., Outcome], key_file: Path) -> None:
    key_file.parent.write_text("a file")
    outcome = demo()
    assert outcome.code == 1
    assert outcome.err == (
        f"CommandError: The demo cannot keep its key in {key_file} (File exists). Make its directory writable, or "
        "give it a key with KFS_CREDENTIALS_KEYS.\n"
    )


# Several at once.


@pytest.fixture
def host(django_db_blocker: DjangoDbBlocker) -> Iterator[Host]:
    """An empty database."""
    with django_db_blocker.unblock(), throw_away("host") as made:
        yield made


def test_two_at_once_on_an_empty_database(host: Host, secrets_directory: Path) -> None:
    variables = environment(
        DATABASE_URL=database_url(host.alias), KFS_SECRETS_DIR=str(secrets_directory), KFS_CREDENTIALS_KEYS=KEY
    )
    command = [*MANAGE, "demo", "--number", str(NUMBER)]
    demos = [
        subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outcomes = [(demo.communicate(timeout=PATIENCE), demo.returncode) for demo in demos]
    assert [(errors, code) for (_, errors), code in outcomes] == [("", 0), ("", 0)]
    assert sorted("They are there already." in out for (out, _), _ in outcomes) == [False, True]
    assert host.value("SELECT count(*) FROM sources") == NUMBER
    assert foreign_sources(connections[host.alias]) == 0
    assert Source.objects.using(host.alias).referenced().count() == MOVABLE

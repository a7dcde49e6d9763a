"""A database whose secrets are in its store, and an empty one beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_django import DjangoDbBlocker

from tests.binding.scenes import Scene, Settings, add_sources
from tests.management.commands import Run, runner
from tests.migrations.hosts import throw_away


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `manage.py` with these arguments."""
    return runner(capsys)


@pytest.fixture(scope="session")
def migrated(django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    """The name of a database that is migrated, and empty: to migrate one for each test takes most of its time."""
    with django_db_blocker.unblock(), throw_away("binding-template") as host:
        host.migrate()
        name = host.name
        host.connection.close()
        yield name


@pytest.fixture
def scene(
    django_db_blocker: DjangoDbBlocker,
    migrated: str,
    secrets_directory: Path,
    tmp_path: Path,
    run: Run,
    kfs_settings: Settings,
) -> Iterator[Scene]:
    """Six sources that are moved, by a backfill that has bound the two, and two that are not."""
    kfs_settings(ERASE_GRACE=0, LATE_WRITE_HORIZON=600)
    with (
        django_db_blocker.unblock(),
        throw_away("origin", template=migrated) as origin,
        throw_away("copy") as copy,
    ):
        add_sources(origin, 6)
        outcome = run("run_credential_backfill", "--database", "origin")
        assert outcome.code == 0, outcome
        add_sources(origin, 2)
        yield Scene(origin, copy, secrets_directory, tmp_path, run, kfs_settings)

"""One PostgreSQL server for the whole run, a store of its own for each test."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from pytest_django import Settings

from example_project import postgres
from kfs_credentials.stores import secret_stores
from kfs_credentials.stores.encrypted import PROBE_NAME, EncryptedStore
from tests.bound import bind_as_before
from tests.flush import quick_flush  # noqa: F401 - a fixture for all

pytest_plugins = ["tests.crashes.fixtures", "tests.cuts"]

SERVER = "KFS_TESTS_SERVER"
# The durability of the server is not what these tests are about; those that need it have servers of their own. Nor does
# it vacuum by itself: it would hold locks, and change plans, at moments of its own. Who needs statistics makes them.
OPTIONS = ["fsync=off", "autovacuum=off", "max_connections=200"]
at_end = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """Start the server, or take the one that DATABASE_URL names; xdist's workers use the one of their controller."""
    if url := os.environ.get("DATABASE_URL"):
        import environ

        server = environ.Env.db_url_config(url, engine="django.db.backends.postgresql")
    elif SERVER in os.environ:
        server = json.loads(os.environ[SERVER])
    else:
        running = at_end.enter_context(postgres.temporary(OPTIONS))
        server = running.django_database()
        os.environ[SERVER] = json.dumps(server)
    django_settings.DATABASES["default"].update(server)


def pytest_collection_finish() -> None:
    """Let no collection of garbage look through all that was imported and collected, thousands of times."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the server that this process started."""
    at_end.close()


@pytest.fixture
def secrets_directory(settings: Settings, tmp_path: Path) -> Path:
    """An empty directory that the default store uses."""
    directory = tmp_path / "secrets"
    directory.mkdir(mode=0o700)
    store = {
        "BACKEND": "kfs_credentials.stores.encrypted.EncryptedStore",
        "OPTIONS": {
            "storage": {
                "BACKEND": "kfs_credentials.stores.files.DurableFileStorage",
                "OPTIONS": {"location": str(directory)},
            },
        },
    }
    settings.KFS_CREDENTIALS = {**settings.KFS_CREDENTIALS, "STORES": {"default": store}}
    return directory


@pytest.fixture
def store(secrets_directory: Path) -> EncryptedStore:
    """The default store, over an empty directory."""
    made = secret_stores["default"]
    assert isinstance(made, EncryptedStore)
    return made


@pytest.fixture
def kfs_settings(settings: Settings) -> Any:
    """Set entries of KFS_CREDENTIALS: `kfs_settings(LEASE=1)`."""

    def change(**values: Any) -> None:
        settings.KFS_CREDENTIALS = {**settings.KFS_CREDENTIALS, **values}

    return change


@pytest.fixture
def files(secrets_directory: Path) -> Callable[[], list[Path]]:
    """Return a function that lists the objects in the store's directory."""
    return lambda: sorted(path for path in secrets_directory.rglob("*") if path.is_file() and path.name != PROBE_NAME)


@pytest.fixture(autouse=True)
def bound(request: pytest.FixtureRequest) -> None:
    """A test that has both a store and a database gets them bound, though there may be refs before its first step."""
    marker = request.node.get_closest_marker("django_db")
    databases = {"db", "transactional_db"} & set(request.fixturenames)
    unbound = request.node.get_closest_marker("unbound")
    if unbound or "secrets_directory" not in request.fixturenames or not (marker or databases):
        return
    request.getfixturevalue("transactional_db" if marker and marker.kwargs.get("transaction") else "db")
    bind_as_before(request.getfixturevalue("store"), request.getfixturevalue("secrets_directory"))

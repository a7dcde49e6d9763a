"""Fixtures: those of the crash tests, and scenes on servers of one's own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from pytest_django import DjangoDbBlocker

from example_project import postgres
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.bound import bind_at_once
from tests.crashes.database import ALIAS, fill, new_database
from tests.crashes.scene import Scene
from tests.crashes.workers import Nursery

SceneOn = Callable[[postgres.Server, Nursery], AbstractContextManager[Scene]]


@pytest.fixture(scope="module")
def public_directory() -> Iterator[Path]:
    """A directory that every user of the machine can reach; pytest's own are private."""
    with tempfile.TemporaryDirectory(prefix="kfs-test-") as directory:
        path = Path(directory)
        path.chmod(0o755)
        yield path


@pytest.fixture
def scene_on(store: EncryptedStore, tmp_path: Path, django_db_blocker: DjangoDbBlocker) -> SceneOn:
    """Return a context manager that gives a scene on a server, with the workers of a nursery."""

    @contextmanager
    def give(server: postgres.Server, workers: Nursery) -> Iterator[Scene]:
        with django_db_blocker.unblock(), new_database(ALIAS, server=server.django_database()) as database:
            fill(ALIAS)
            bind_at_once(ALIAS, store)
            scene = Scene(workers, database, tmp_path, store)
            yield scene
            scene.close()

    return give

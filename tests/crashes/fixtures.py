"""Fixtures for whoever tests with processes: the nursery and the demo's database once, a scene for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connections
from pytest_django import DjangoDbBlocker

from example_project import postgres
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.bound import bind_at_once
from tests.crashes.database import ALIAS, fill, new_database
from tests.crashes.scene import Scene
from tests.crashes.workers import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The process that forks workers."""
    with Nursery() as nursery:
        yield nursery


@pytest.fixture(scope="session")
def template(django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    """The name of a database that is migrated and holds the demo's sources."""
    alias = f"{ALIAS}-template"
    with django_db_blocker.unblock(), new_database(alias) as entry:
        fill(alias)
        connections[alias].close()
        yield entry["NAME"]


@pytest.fixture
def scene(
    nursery: Nursery, template: str, store: EncryptedStore, tmp_path: Path, django_db_blocker: DjangoDbBlocker
) -> Iterator[Scene]:
    """A database with the demo's sources, and an empty store."""
    with django_db_blocker.unblock(), new_database(ALIAS, template=template) as database:
        bind_at_once(ALIAS, store)
        scene = Scene(nursery, database, tmp_path, store)
        yield scene
        scene.close()


@pytest.fixture
def own_server(
    nursery: Nursery, store: EncryptedStore, tmp_path: Path, django_db_blocker: DjangoDbBlocker
) -> Iterator[tuple[Scene, postgres.Server]]:
    """A scene on a server that nobody else uses, and that server."""
    with (
        postgres.temporary(["fsync=off"]) as server,
        django_db_blocker.unblock(),
        new_database(ALIAS, server=server.django_database()) as database,
    ):
        fill(ALIAS)
        bind_at_once(ALIAS, store)
        scene = Scene(nursery, database, tmp_path, store)
        yield scene, server
        scene.close()

"""What the backfill's tests share: the steps, a worker, and a second session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection

from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillSummary, BackfillWorker
from kfs_credentials.status import read_left
from kfs_credentials.stores.encrypted import EncryptedStore

Other = psycopg.Connection[Any]
Files = Callable[[], list[Path]]
Change = Callable[..., None]


@pytest.fixture
def new_steps(store: EncryptedStore, transactional_db: None) -> Callable[..., Backfill]:
    """Return a function that makes the steps of another worker."""

    def make(**options: Any) -> Backfill:
        return Backfill(**{"using": "default", "store": store, "worker": "tests", "lease": 60.0, **options})

    return make


@pytest.fixture
def steps(new_steps: Callable[..., Backfill]) -> Backfill:
    """The steps of one worker."""
    return new_steps()


@pytest.fixture
def run(steps: Backfill) -> Callable[..., BackfillSummary]:
    """Return a function that runs a worker to its end."""

    def drain(**options: Any) -> BackfillSummary:
        given = {"remaining": lambda: read_left("default"), "batch_size": 10, **options}
        return BackfillWorker(steps, **given).run()

    return drain


@pytest.fixture
def other(transactional_db: None) -> Iterator[Other]:
    """A session of somebody else, with a transaction open from its first statement on."""
    with psycopg.connect(_dsn()) as session:
        yield session
        session.rollback()


def _dsn() -> str:
    parameters = connection.get_connection_params()
    names = ("host", "port", "user", "password", "dbname")
    return psycopg.conninfo.make_conninfo(**{name: parameters[name] for name in names if parameters.get(name)})

"""What the tests of the cleanup's steps share: the steps, and a second session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from kfs_credentials.cleanup import Cleanup
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.runs import NewSteps
from tests.management.commands import dsn

Other = psycopg.Connection[Any]


@pytest.fixture
def new_steps(store: EncryptedStore, transactional_db: None) -> NewSteps:
    """Return a function that makes the steps of another worker."""

    def make(**options: Any) -> Cleanup:
        return Cleanup(**{"using": "default", "worker": "tests", "lease": 60.0, **options})

    return make


@pytest.fixture
def steps(new_steps: NewSteps) -> Cleanup:
    """The steps of one worker."""
    return new_steps()


@pytest.fixture
def other(transactional_db: None) -> Iterator[Other]:
    """A session of somebody else, with a transaction open from its first statement on."""
    with psycopg.connect(dsn()) as session:
        yield session
        session.rollback()

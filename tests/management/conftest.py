"""Runs commands as a user does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from kfs_credentials.stores.encrypted import EncryptedStore
from tests.bound import seal_anew
from tests.keys import NEW, OLD, Change
from tests.management.commands import Admin, Run, dsn, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `manage.py` with these arguments."""
    return runner(capsys)


@pytest.fixture
def admin(transactional_db: None) -> Iterator[Admin]:
    """A session of somebody else, who may do anything. Each statement is a transaction."""
    with psycopg.connect(dsn(), autocommit=True) as session:
        yield session


@pytest.fixture
def new_first(bound: None, store: EncryptedStore, kfs_settings: Change) -> Callable[[], None]:
    """Return a function that puts the new key before the old one, which is the only one until then."""
    kfs_settings(KEYS=[OLD])
    seal_anew("default", store)
    return lambda: kfs_settings(KEYS=[NEW, OLD])

"""What these tests share, besides the fixtures of the crash tests: stores that lie or drip, a deadline, an operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials.pause import resume_workers
from tests.crashes.database import ALIAS
from tests.crashes.scene import Scene

Stores = Callable[..., dict[str, Any]]

TIMEOUT = 0.5
"""Seconds that a call has to a store that does not answer."""
LATE = f"did not answer within {TIMEOUT} s (KFS_CREDENTIALS['STORE_TIMEOUT'])"
REASON = "SELECT reason FROM kfs_credentials_pause"
"""Why the workers are paused."""


@pytest.fixture
def stores(secrets_directory: Path) -> Stores:
    """Return a function that makes STORES of a storage of `tests.bad_stores.storages`, by name, with these options."""

    def make(storage: str, **options: Any) -> dict[str, Any]:
        backend = {
            "BACKEND": f"tests.bad_stores.storages.{storage}",
            "OPTIONS": {"location": str(secrets_directory), **options},
        }
        store = {"BACKEND": "kfs_credentials.stores.encrypted.EncryptedStore", "OPTIONS": {"storage": backend}}
        return {"default": store}

    return make


def everybody_may_go_on(scene: Scene) -> None:
    """Say what an operator says once the store is mended."""
    assert scene.rows(REASON)
    resume_workers(ALIAS)

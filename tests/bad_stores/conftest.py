"""Fixtures: those of the crash tests, and a scene whose store lies, hangs or drips as told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Stores = Callable[..., dict[str, Any]]


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

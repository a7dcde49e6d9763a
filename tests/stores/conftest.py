"""What the tests of the stores share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stores.processes import kill_all


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    kill_all()


@pytest.fixture
def reachable(kfs_settings: Callable[..., None]) -> Iterator[Path]:
    """A directory for secrets that another user can reach; pytest's own are private."""
    with tempfile.TemporaryDirectory(prefix="kfs-test-") as directory:
        Path(directory).chmod(0o755)
        options = {
            "storage": {
                "BACKEND": "kfs_credentials.stores.files.DurableFileStorage",
                "OPTIONS": {"location": directory},
            }
        }
        kfs_settings(
            STORES={
                "default": {
                    "BACKEND": "kfs_credentials.stores.encrypted.EncryptedStore",
                    "OPTIONS": options,
                }
            }
        )
        yield Path(directory)

"""What the tests of the stores share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stores.processes import kill_all


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    kill_all()

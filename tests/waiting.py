"""Waiting for what others do: looking again and again, with a moment for them in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds for what happens at once on a machine that is not busy."""
MOMENT = 0.005
"""Seconds between two looks: whoever is waited for needs the processor too."""


def until(condition: Callable[[], T], what: str = "another thread has done it") -> T:
    """Wait until a condition holds, and return its value; fail if it takes too long."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited in vain until {what}")
        time.sleep(MOMENT)
    return found

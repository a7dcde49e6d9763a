"""How long an erasure waits before it is tried again: as long as the original's."""

from __future__ import annotations

from typing import Any

import pytest

from kfs_credentials.cleanup import DAY, backoff
from tests.crypto import vectors

MILLISECONDS = 1000


@vectors.each("backoff")
def test_the_original_waits_as_long(case: dict[str, Any]) -> None:
    seconds = backoff(
        case["attempts"], interval=case["interval_ms"] / MILLISECONDS, longest_exponent=case["max_exponent"]
    )
    assert round(seconds * MILLISECONDS, 6) == case["backoff_ms"]


def test_the_delay_doubles_and_ends_at_a_day() -> None:
    assert [backoff(attempts, interval=10) for attempts in range(5)] == [10, 20, 40, 80, 160]
    assert backoff(10_000, interval=10) == DAY
    assert backoff(0, interval=2 * DAY) == 2 * DAY, "an interval that is longer stays"


@pytest.mark.parametrize("attempts", [0, 5, 10_000])
def test_no_interval_is_no_delay(attempts: int) -> None:
    assert backoff(attempts, interval=0) == 0

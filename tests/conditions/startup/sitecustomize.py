"""Run by every process that has another clock, when it starts: see `clocks.py`.

libfaketime 0.9.10 breaks the call by which `time.sleep` waits (clock_nanosleep until a moment of the monotonic clock,
which it takes for one of its own). A wait by select() it leaves alone.
"""

from __future__ import annotations

import select
import time
from typing import SupportsIndex


def _sleep(seconds: float | SupportsIndex) -> None:
    select.select([], [], [], float(seconds))


time.sleep = _sleep

"""Kills at random moments: how many, and after how long a life. KFS_CRASHES: the number, for the long form."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

from tests.crashes.scene import CLEAN, LOOK, NOT_FINISHED
from tests.crashes.workers import Worker

KILLS = int(os.environ.get("KFS_CRASHES", "24"))
PER_DATABASE = 24
ROUNDS = [min(PER_DATABASE, KILLS - before) for before in range(0, KILLS, PER_DATABASE)]

ENDED = (CLEAN, LOOK, NOT_FINISHED)
"""Exit codes of a worker that found nothing to do, for the moment."""

LIFE = 0.12
"""Seconds that a worker goes on at most from the moment at which it is at work."""


def was_killed(worker: Worker, ended: Collection[int] = ENDED) -> bool:
    """Kill a worker; return False if it has ended by itself just before, with one of the codes `ended`."""
    worker.send(signal.SIGKILL)
    code = worker.wait()
    assert code in (-signal.SIGKILL, *ended), worker.printed
    return code == -signal.SIGKILL

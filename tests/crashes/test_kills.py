"""Backfills of the demo's sources killed at random moments: the end is as if nobody had been killed.

With everybody else beside them, and for longer: `make torture`.
"""

from __future__ import annotations

import random
import signal

import pytest

from tests.crashes.database import NUMBER
from tests.crashes.scene import CLEAN, LOOK, NOT_FINISHED, Scene
from tests.crashes.workers import Worker

KILLS = 24
WORKERS = 4
ENDED = (CLEAN, LOOK, NOT_FINISHED)
"""Exit codes of a worker that found nothing to do, for the moment."""
LIFE = 0.12
"""Seconds that a worker goes on at most from the moment at which it is at work."""


def was_killed(worker: Worker) -> bool:
    """Kill a worker; return False if it has ended by itself just before."""
    worker.send(signal.SIGKILL)
    code = worker.wait()
    assert code in (-signal.SIGKILL, *ENDED), worker.printed
    return code == -signal.SIGKILL


@pytest.mark.long
def test_killed_at_random(scene: Scene) -> None:
    """Sources appear all the while, so that there is always something to do."""
    scene.settings["LEASE"] = 1
    # A row may well be hit five times alone by chance, which is what fails one that deserves it.
    scene.settings["MAX_ATTEMPTS"] = 50
    scene.set_aside()
    crew: list[Worker] = []
    killed = 0
    while killed < KILLS:
        scene.let_appear(NUMBER // KILLS)
        while len(crew) < WORKERS:
            crew.append(scene.start(BATCH_SIZE=random.randint(1, 6)))
        victim = crew.pop(random.randrange(WORKERS))
        if scene.comes_to_work(victim):
            victim.ends_within(random.uniform(0, LIFE))
        killed += was_killed(victim)
        scene.check_always()
    scene.let_appear(NUMBER)
    for worker in crew:
        assert worker.wait() in ENDED, worker.printed
    scene.drain()
    scene.check_end()
    scene.recover()
    scene.check_cleaned()


def test_killed_as_an_operator_starts_them(scene: Scene) -> None:
    """The command itself, as real processes from their start on, by the environment of the example project alone."""
    scene.settings |= {"LEASE": 1, "BATCH_SIZE": 5}
    scene.set_aside()
    crew = [scene.start_command() for _ in range(4)]
    killed = 0
    while killed < 2:
        scene.let_appear(NUMBER // 4)
        victim = crew.pop(0)
        if scene.comes_to_work(victim) and was_killed(victim):
            killed += 1
        else:
            assert victim.wait() in ENDED, victim.printed
            crew.append(scene.start_command())
    scene.let_appear(NUMBER)
    for worker in crew:
        assert worker.wait() in ENDED, worker.printed
    scene.drain()
    scene.check_end()
    scene.recover()
    scene.check_cleaned()

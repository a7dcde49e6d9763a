"""Workers killed at random moments, over and over: the end is as if nobody had been killed.

KFS_CRASHES=200 pytest tests/crashes/test_kills.py      200 kills of one worker, and 200 of four at once
"""

from __future__ import annotations

import random

import pytest

from tests.crashes.database import NUMBER
from tests.crashes.kills import ENDED, LIFE, ROUNDS, was_killed
from tests.crashes.scene import Scene
from tests.crashes.workers import Worker


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("kills", ROUNDS)
def test_killed_at_random(scene: Scene, workers: int, kills: int) -> None:
    """Sources appear all the while, so that there is always something to do."""
    scene.settings["LEASE"] = 1
    # A row may well be hit five times alone by chance, which is what fails one that deserves it.
    scene.settings["MAX_ATTEMPTS"] = 50
    scene.set_aside()
    crew: list[Worker] = []
    killed = 0
    while killed < kills:
        scene.let_appear(NUMBER // kills)
        while len(crew) < workers:
            crew.append(scene.start(BATCH_SIZE=random.randint(1, 6)))
        victim = crew.pop(random.randrange(workers))
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

"""The scene of the crash tests, and everything that tortures it."""

from __future__ import annotations

import pytest

from tests.crashes.scene import Scene
from tests.torture.judge import Judge
from tests.torture.memory import Memory
from tests.torture.old_application import OldApplication


@pytest.fixture
def memory() -> Memory:
    """What every source must be: there is none."""
    return Memory()


@pytest.fixture
def old(scene: Scene, memory: Memory) -> OldApplication:
    """An old application, on a database without sources."""
    scene.execute("DELETE FROM sources")
    return OldApplication(scene, memory)


@pytest.fixture
def judge(scene: Scene, memory: Memory) -> Judge:
    """The judge."""
    return Judge(scene, memory)

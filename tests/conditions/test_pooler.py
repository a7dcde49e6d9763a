"""Behind a pooler in transaction mode with two connections to the server: all is done, and nothing is left there.

A chosen part of the suite runs there too: see pooler.py.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests import needs
from tests.conditions.pooler import SIZE, connect, left_behind, pooler
from tests.crashes.scene import CLEAN, LOOK, Scene
from tests.crashes.stage import Stage
from tests.crashes.workers import Worker

SOURCES = 24
ROUNDS = 3
LIFE = 0.4
"""Seconds for which those that are killed have lived at most."""

Place = dict[str, str]


@pytest.fixture
def pooled(scene: Scene) -> Iterator[Place]:
    """A pooler in front of the scene's database: that is where workers and applications are from here on."""
    with pooler(scene.database, needs.pgbouncer()) as place:
        scene.database.update(HOST=place["HOST"], PORT=place["PORT"])
        yield place
        scene.close()


def sessions(scene: Scene) -> list[Any]:
    """Return the process ids of the sessions of the pooler: all but ours."""
    found = scene.rows(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend'"
    )
    return sorted(pid for (pid,) in found)


def killed(*workers: Worker, life: float = LIFE) -> int:
    """Kill these at random moments; return how many of them had not come to their end."""
    count = 0
    for worker in workers:
        worker.ends_within(random.uniform(0, life))
        worker.send(signal.SIGKILL)
        count += worker.wait() == -signal.SIGKILL
    return count


def test_many_at_once_some_of_them_killed(scene: Scene, pooled: Place) -> None:
    stage = Stage(scene, SOURCES)
    tenant, _, _ = stage.sources[0]
    (space,) = scene.new_spaces(tenant, 1)
    kills = 0

    def make_work() -> None:
        legacy = scene.new_legacy_sources(space, SOURCES)
        stage.values |= {(tenant, source): {"token": source} for source in legacy}

    for _ in range(ROUNDS):
        make_work()
        stage.orphans()
        rotated = [stage.sources.pop()[:2] for _ in range(2)]
        stage.values |= {one: {"token": "new"} for one in rotated}
        with ExitStack() as stack:
            application = scene.start_application(*[stage.rotation(*one) for one in rotated])
            stack.callback(application.wait)
            mortal = [
                *(scene.start(BATCH_SIZE=size) for size in (2, 3)),
                *(scene.start_cleanup(BATCH_SIZE=size) for size in (1, 2)),
            ]
            kills += killed(*mortal)
        assert [set(answer) for answer in application.answers] == [{"source", "ref", "version"}] * 2
    life = LIFE
    while kills <= ROUNDS:  # this machine is fast: they have to die sooner
        life /= 2
        make_work()
        kills += killed(scene.start(BATCH_SIZE=2), life=life)
    scene.expire_leases()
    last = [scene.start(BATCH_SIZE=5), scene.start(BATCH_SIZE=7), scene.start_cleanup(BATCH_SIZE=5)]
    for worker in last:
        assert worker.wait() in (CLEAN, LOOK), worker.printed
    scene.recover()
    stage.check()
    assert scene.states() == {"succeeded": len(stage.values) - ROUNDS * 3}
    left = left_behind(pooled, scene.database["NAME"])
    assert sorted(left) == sessions(scene)
    assert list(left.values()) == [[]] * SIZE


def test_what_is_left_behind_would_be_seen(scene: Scene, pooled: Place) -> None:
    with connect(pooled, scene.database["NAME"]) as session:
        for statement in (
            "SET lock_timeout = '7s'",
            "SELECT pg_advisory_lock(1)",
            "DECLARE kept CURSOR WITH HOLD FOR SELECT 1",
            "PREPARE mine AS SELECT 1",
            "LISTEN ours",
            "CREATE TEMPORARY TABLE passing (id int)",
        ):
            session.execute(statement)
    left = left_behind(pooled, scene.database["NAME"])
    assert sorted(what for found in left.values() for what in found) == [
        "a channel: ours",
        "a cursor: kept",
        "a lock: advisory",
        "a prepared statement: mine",
        "a setting: lock_timeout",
        "a temporary table: passing",
    ]

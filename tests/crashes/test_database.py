"""The database goes away, or refuses, in the middle of a run: the worker goes on by itself and blames no row."""

from __future__ import annotations

import random
import signal
from functools import partial
from itertools import pairwise

import pytest
from django.db import connections

from example_project import postgres
from tests.crashes.database import ALIAS, NUMBER
from tests.crashes.scene import KINDS, LOOK, NOT_FINISHED, Scene
from tests.crashes.stores import AFTER_PUT
from tests.crashes.workers import Worker


def check_end(scene: Scene, *workers: Worker) -> None:
    """The workers ended by themselves, everything is done, and no attempt was counted."""
    for worker in workers:
        assert worker.wait() == LOOK, worker.printed
    scene.check_end()
    assert scene.attempts() == 0


@pytest.mark.long
def test_connections_ended_at_random(scene: Scene) -> None:
    """Sources appear all the while, so that there is always something to do."""
    scene.set_aside()
    workers = [scene.start("--watch", BATCH_SIZE=3), scene.start("--watch", BATCH_SIZE=1)]
    for worker in workers:
        assert scene.comes_to_work(worker)
    for _ in range(8):
        scene.let_appear(NUMBER // 8)
        assert not workers[0].ends_within(random.uniform(0, 0.1)), workers[0].printed
        scene.terminate_all()
        scene.check_always()
    scene.wait_until(partial(scene.has_moved, KINDS["movable"]), "all are moved", watched=workers[0])
    for worker in workers:
        worker.send(signal.SIGTERM)
        assert worker.wait() == NOT_FINISHED, worker.printed
        assert len(worker.printed.splitlines()) < 10, "it says so once, and not each time"
    scene.drain()
    check_end(scene)


@pytest.mark.parametrize("size", [1, 20])
def test_out_of_reach_for_longer_than_it_is_tried(scene: Scene, size: int) -> None:
    """What is at work is given back once the database answers again. Its lease would outlive this test."""
    with scene.gate(AFTER_PUT) as gate:
        worker = scene.start("--limit", str(3 * size), BATCH_SIZE=size, LEASE=600)
        gate.wait()
        with scene.out_of_reach():
            gate.open()
            scene.wait_until(
                lambda: "jobs could not be given back yet" in worker.printed, "the worker has tried", watched=worker
            )
    assert worker.wait() == NOT_FINISHED, worker.printed
    assert "running" not in scene.states()
    scene.drain()
    check_end(scene)


def test_read_only_for_a_while(scene: Scene) -> None:
    """As after a fail-over: the sessions stay, and cannot write. The worker has to connect anew by itself."""
    scene.database["CONN_MAX_AGE"] = None  # else Django itself would not keep them for long
    worker = scene.start(BATCH_SIZE=5)
    assert scene.comes_to_work(worker)
    scene.configure("SET default_transaction_read_only = on")
    scene.terminate_all()
    scene.wait_until(lambda: "going on later" in worker.printed, "the worker has tried to write", watched=worker)
    scene.configure("RESET default_transaction_read_only")
    check_end(scene, worker)
    assert len(worker.printed.splitlines()) < 10, "it says so once, and not each time"


def test_statements_that_take_too_long(scene: Scene) -> None:
    """Batches get smaller until they pass, and larger again."""
    scene.slow_down("INSERT", "source_credential_backfills", seconds=0.003)
    scene.slow_down("UPDATE", "sources", seconds=0.003)
    scene.configure("SET statement_timeout = '300ms'")
    check_end(scene, scene.start(BATCH_SIZE=240))
    reserved = scene.rows("SELECT count(*) FROM source_secret_lifecycle_refs GROUP BY created_at ORDER BY created_at")
    sizes = [size for (size,) in reserved]
    assert max(sizes) <= 100  # at 3 ms each
    assert any(later > earlier for earlier, later in pairwise(sizes)), sizes


def test_the_server_crashes(own_server: tuple[Scene, postgres.Server]) -> None:
    scene, server = own_server
    workers = [scene.start(BATCH_SIZE=3), scene.start(BATCH_SIZE=1)]
    for worker in workers:
        assert scene.comes_to_work(worker)
    for moved in (20, 80):
        scene.wait_until(partial(scene.has_moved, moved), "some are moved")
        server.restart("immediate")
        connections[ALIAS].close()
        scene.check_always()
    check_end(scene, *workers)

"""The database goes away in the middle of a cleanup: it goes on by itself, and nothing is lost."""

from __future__ import annotations

import random
import signal
from functools import partial

import pytest
from django.db import connections

from example_project import postgres
from tests.crashes.database import ALIAS
from tests.crashes.scene import CLEAN, NOT_FINISHED, ORPHANED, Scene
from tests.crashes.stage import AT_ONCE, LEDGER, Stage
from tests.crashes.stores import AFTER_DELETE
from tests.crashes.workers import Worker

SOURCES = 60
ROUNDS = 6


def has_erased(scene: Scene, number: int) -> bool:
    """Return whether at least so many refs are erased."""
    return int(scene.value(f"SELECT count(*) FROM {LEDGER} WHERE state = 'deleted'")) >= number


def check_end(stage: Stage, *workers: Worker) -> None:
    """The workers ended by themselves, everything is erased that had to be, and no attempt was counted."""
    for worker in workers:
        assert worker.wait() == CLEAN, worker.printed
    stage.check()
    assert stage.scene.value(f"SELECT sum(delete_attempts) FROM {LEDGER}") == 0


@pytest.mark.long
def test_connections_ended_at_random(scene: Scene) -> None:
    """Sources are deleted all the while, so that there is always something to do."""
    stage = Stage(scene, SOURCES)
    workers = [scene.start_cleanup("--watch", BATCH_SIZE=size, RECOVER_AFTER=0.1) for size in (3, 1)]
    for worker in workers:
        assert scene.comes_to_work(worker)
    for _ in range(ROUNDS):
        stage.orphans()
        assert not workers[0].ends_within(random.uniform(0, 0.1)), workers[0].printed
        scene.terminate_all()
        scene.check_meanwhile(ORPHANED)
    scene.wait_until(partial(has_erased, scene, ROUNDS * AT_ONCE), "all are erased", watched=workers[0])
    for worker in workers:
        worker.send(signal.SIGTERM)
        assert worker.wait() in (CLEAN, NOT_FINISHED), worker.printed
    check_end(stage, scene.start_cleanup())


def test_out_of_reach_for_longer_than_it_is_tried(scene: Scene) -> None:
    """What is at work is given back once the database answers again. Its lease would outlive this test."""
    stage = Stage(scene, SOURCES)
    stage.orphans()
    with scene.gate(AFTER_DELETE) as gate:
        worker = scene.start_cleanup(LEASE=600)
        gate.wait()
        with scene.out_of_reach():
            gate.open()
            scene.wait_until(
                lambda: "refs could not be given back yet" in worker.printed, "the worker has tried", watched=worker
            )
    check_end(stage, worker)


def test_read_only_for_a_while(scene: Scene) -> None:
    """As after a fail-over: the sessions stay, and cannot write. The worker has to connect anew by itself."""
    stage = Stage(scene, SOURCES)
    for _ in range(12):
        stage.orphans()
    scene.database["CONN_MAX_AGE"] = None  # else Django itself would not keep them for long
    worker = scene.start_cleanup(BATCH_SIZE=3)
    assert scene.comes_to_work(worker)
    scene.configure("SET default_transaction_read_only = on")
    scene.terminate_all()
    scene.wait_until(lambda: "going on later" in worker.printed, "the worker has tried to write", watched=worker)
    scene.configure("RESET default_transaction_read_only")
    check_end(stage, worker)
    assert len(worker.printed.splitlines()) < 10, "it says so once, and not each time"


def test_the_server_crashes(own_server: tuple[Scene, postgres.Server]) -> None:
    scene, server = own_server
    stage = Stage(scene, SOURCES)
    for _ in range(15):
        stage.orphans()
    workers = [scene.start_cleanup(BATCH_SIZE=3), scene.start_cleanup(BATCH_SIZE=1)]
    for worker in workers:
        assert scene.comes_to_work(worker)
    for erased in (5, 20):
        scene.wait_until(partial(has_erased, scene, erased), "some are erased")
        server.restart("immediate")
        connections[ALIAS].close()
        scene.check_meanwhile(ORPHANED)
    check_end(stage, *workers)

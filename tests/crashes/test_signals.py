"""SIGTERM and SIGINT, at each stage: the worker ends by itself, in time, and holds nothing afterwards."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import pytest

from kfs_credentials.conf import Settings
from kfs_credentials.worker import HURRIED_LOCK_TIMEOUT, LOOK_UP_EVERY, STOP_WITHIN
from tests.crashes.gates import Gate
from tests.crashes.scene import NOT_FINISHED, Scene
from tests.crashes.stores import BEFORE_PUT
from tests.crashes.workers import Worker

JOBS = "source_credential_backfills"
LEDGER = "source_secret_lifecycle_refs"

GRACE = 10.0
"""Seconds until a process manager kills what it has asked to end."""
LOCK_TIMEOUT = 5.0
"""That of the settings, and so of a worker that waits for a lock when it is asked to stop."""

Stage = Callable[[Scene, int], AbstractContextManager[list[Worker]]]

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@contextmanager
def idle(scene: Scene, workers: int) -> Iterator[list[Worker]]:
    """Nothing is left, and the workers watch."""
    scene.drain()
    watching = [scene.start("--watch", POLL_INTERVAL=600) for _ in range(workers)]
    for worker in watching:
        scene.wait_until_idle(worker)
    yield watching


@contextmanager
def in_claim(scene: Scene, workers: int) -> Iterator[list[Worker]]:
    """The table is locked, and does not come free."""
    with scene.session() as session:
        session.execute(f"LOCK TABLE {JOBS} IN EXCLUSIVE MODE")
        waiting = [scene.start(LOCK_TIMEOUT=2) for _ in range(workers)]
        for worker in waiting:
            scene.wait_for_lock(worker, JOBS)
        yield waiting


def come_to(gate: Gate, scene: Scene, workers: int) -> list[Worker]:
    """Start workers, and wait until all of them stand at the gate."""
    coming = [scene.start() for _ in range(workers)]
    there: set[int] = set()
    while len(there) < workers:
        there.add(gate.wait())
    return coming


@contextmanager
def in_put(scene: Scene, workers: int) -> Iterator[list[Worker]]:
    """The store does not answer."""
    with scene.gate(BEFORE_PUT) as gate:
        yield come_to(gate, scene, workers)


@contextmanager
def in_settle(scene: Scene, workers: int) -> Iterator[list[Worker]]:
    """Somebody holds the rows of the ledger."""
    with scene.gate(BEFORE_PUT) as gate, scene.session() as session:
        hanging = come_to(gate, scene, workers)
        session.execute(f"SELECT FROM {LEDGER} FOR UPDATE")
        gate.open()
        for worker in hanging:
            scene.wait_for_lock(worker)
        yield hanging


STAGES: list[Stage] = [idle, in_claim, in_put, in_settle]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_a_worker_that_is_asked_to_stop(scene: Scene, stage: Stage) -> None:
    """It ends by itself, though what it waits for never comes: by which bounds, see the next test."""
    scene.settings.update(LOCK_TIMEOUT=LOCK_TIMEOUT, STORE_TIMEOUT=600)
    with stage(scene, len(SIGNALS)) as workers:
        for worker, number in zip(workers, SIGNALS, strict=True):
            scene.wait_until(partial(worker.catches, signal.SIGTERM), "it listens to signals", watched=worker)
            worker.send(number)
        for worker in workers:
            assert worker.wait() == NOT_FINISHED, worker.printed
            assert "Ended early: interrupted by a signal." in worker.printed
        assert scene.states().get("running", 0) == 0, "\n".join(worker.printed for worker in workers)
    scene.drain()
    scene.check_end()
    assert scene.attempts() == 0


def test_what_a_worker_waits_for_when_it_is_asked_to_stop_is_over_in_time() -> None:
    """Looked at, and not measured, since a machine may be slow: a lock or a batch, then a try to give back each of two.

    There is a second left for what does not wait.
    """
    at_hand = max(Settings.LOCK_TIMEOUT.default, STOP_WITHIN + LOOK_UP_EVERY)
    assert Settings.LOCK_TIMEOUT.default == LOCK_TIMEOUT
    assert at_hand + 2 * HURRIED_LOCK_TIMEOUT + 1 <= GRACE


def test_a_second_signal_leaves_at_once(scene: Scene) -> None:
    pairs = [(first, second) for first in SIGNALS for second in SIGNALS]
    with in_put(scene, len(pairs)) as workers:
        for worker, (first, second) in zip(workers, pairs, strict=True):
            worker.send(first)
            scene.wait_until(partial(worker.has_handled, first), "the signal is handled", watched=worker)
            worker.send(second)
            assert worker.wait() == -second, (first, second, worker.printed)
    scene.check_always()
    scene.expire_leases()
    scene.drain()
    scene.check_end()

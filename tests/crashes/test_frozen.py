"""A worker that is frozen past its lease and goes on afterwards is too late, and writes nothing; a put that hangs."""

from __future__ import annotations

import signal
from contextlib import ExitStack

import pytest

from kfs_credentials.metrics import read_metrics, render
from kfs_credentials.status import read_status
from tests.crashes.database import ALIAS
from tests.crashes.scene import KINDS, LOOK, Scene
from tests.crashes.stores import AFTER_PUT, BEFORE_PUT, IN_PUT
from tests.crashes.workers import Worker

LEDGER = "source_secret_lifecycle_refs"
LEFT_TO_MOVE = """
SELECT src.id FROM sources src LEFT JOIN source_credential_backfills job ON job.source_id = src.id
WHERE src.credential_ref IS NULL AND jsonb_typeof(src.metadata -> 'credentials') = 'object'
  AND (job.id IS NULL OR job.run_state <> 'failed' AND job.lease_token IS DISTINCT FROM %s)
"""

RUNNING = "FROM source_credential_backfills WHERE run_state = 'running'"
LEASE_IN_SECONDS = f"SELECT EXTRACT(EPOCH FROM max(lease_expires_at - heartbeat_at)) {RUNNING}"
ALL_EXPIRED = f"SELECT bool_and(lease_expires_at < now()) {RUNNING}"


@pytest.mark.parametrize("place", [BEFORE_PUT, IN_PUT])
def test_frozen_in_the_put(scene: Scene, place: str) -> None:
    """By its own watch its lease is over when it wakes up."""
    with scene.gate(place) as gate:
        frozen = scene.start(LEASE=1)
        gate.wait()
        scene.wait_for_the_store(frozen)
        frozen.freeze()
        gate.open()
    scene.drain()  # waits for the lease of the frozen one
    check_that_nothing_more_happens(scene, frozen)


@pytest.mark.parametrize("place", [IN_PUT, AFTER_PUT])
def test_frozen_and_its_own_watch_does_not_know(scene: Scene, place: str) -> None:
    """The database's clock decides, whatever the worker believes: it ran out there, and another took over."""
    with scene.gate(place) as gate:
        frozen = scene.start(LEASE=600)
        gate.wait()
        scene.wait_for_the_store(frozen)
        frozen.freeze()
        gate.open()
    scene.expire_leases()
    scene.drain()
    check_that_nothing_more_happens(scene, frozen)


def test_frozen_while_it_waits_for_a_row(scene: Scene) -> None:
    """Another worker has its jobs by now, and waits for the ledger's rows until it is awake, or the server ends it."""
    with ExitStack() as stack:
        gate = stack.enter_context(scene.gate(AFTER_PUT))
        frozen = scene.start()
        gate.wait()
        session = stack.enter_context(scene.session())
        session.execute(f"SELECT FROM {LEDGER} FOR UPDATE")
        gate.open()
        scene.wait_for_lock(frozen)
        frozen.freeze()
    scene.expire_leases()
    other = scene.start()
    scene.wait_for_lock(other)
    frozen.send(signal.SIGCONT)
    assert frozen.wait() == LOOK, frozen.printed
    assert other.wait() == LOOK, other.printed
    scene.check_end()


def test_what_hangs_is_told_one_lease_after_its_last_renewal(scene: Scene) -> None:
    """A frozen worker's jobs still count as running; that their leases are over is in the status and the metrics."""
    with scene.gate(BEFORE_PUT) as gate:
        frozen = scene.start(LEASE=1)
        gate.wait()
        scene.wait_for_the_store(frozen)
        frozen.freeze()
        gate.open()
    running = scene.states()["running"]
    assert scene.value(LEASE_IN_SECONDS) <= 1
    scene.wait_until(lambda: scene.value(ALL_EXPIRED), "the database calls its leases expired")
    backfills = read_status(ALIAS).backfills
    assert (backfills["running"], backfills["expired_leases"], backfills["succeeded"]) == (running, running, 0)
    metrics = render(read_metrics(ALIAS)).splitlines()
    assert f"kfs_credentials_jobs_expired_leases {running}.0" in metrics
    assert 'kfs_credentials_events_last_minute{kind="activated"} 0.0' in metrics
    scene.drain()  # another worker takes them over
    assert read_status(ALIAS).backfills["expired_leases"] == 0
    check_that_nothing_more_happens(scene, frozen)


def test_frozen_in_a_transaction(scene: Scene) -> None:
    """It has written, and not committed: nobody else gets its rows, nor waits for them, and it finds out in time."""
    with scene.held_up("UPDATE", "sources", condition="NEW.credential_ref IS NOT NULL") as hold_up:
        frozen = scene.start(LEASE=1)
        hold_up.wait(frozen)
        frozen.freeze()
        hold_up.let_go()
        token = scene.value("SELECT lease_token FROM source_credential_backfills ORDER BY created_at LIMIT 1")
        other = scene.start()
        # The frozen one has leased two batches. It holds the rows of the first; the other one takes over the second.
        scene.wait_until(
            lambda: not scene.rows(LEFT_TO_MOVE, [token]), "the other worker has done what is not locked", watched=other
        )
        assert 20 - KINDS["too_large"] <= scene.states()["running"] <= 20
        frozen.send(signal.SIGCONT)
        assert frozen.wait() == LOOK, frozen.printed
        assert other.wait() == LOOK, other.printed
    scene.check_end()
    assert scene.attempts() == 0


def test_a_put_that_never_returns(scene: Scene) -> None:
    """It has a deadline: what it was to put is given back, and the worker goes on, to its end, without it."""
    with scene.gate(BEFORE_PUT) as gate:
        worker = scene.start(STORE_TIMEOUT=1)
        gate.wait()
        gate.let_others_pass()
        assert worker.wait() == LOOK, worker.printed
    assert "did not answer within 1 s (KFS_CREDENTIALS['STORE_TIMEOUT'])" in worker.printed
    scene.check_end()
    assert scene.attempts() == 0


def check_that_nothing_more_happens(scene: Scene, frozen: Worker) -> None:
    """Everything is done by another worker; wake the frozen one up, and see that it changes nothing."""
    scene.check_end()
    before = scene.everything()
    frozen.send(signal.SIGCONT)
    assert frozen.wait() == LOOK, frozen.printed
    assert scene.everything() == before
    scene.check_end()

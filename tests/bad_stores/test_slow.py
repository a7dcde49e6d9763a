"""A store that takes two leases for a call, one that drips, and one that does not do a batch in time.

Nobody takes over, and nothing waits for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bad_stores.conftest import LATE, TIMEOUT, Stores
from tests.crashes.scene import CLEAN, Scene
from tests.crashes.stage import AT_ONCE, LEDGER, Stage
from tests.crashes.stores import BEFORE_DELETE, BEFORE_PUT, BEFORE_REPLACE
from tests.crashes.workers import Worker

LEASE = 2
"""Seconds. A worker renews its lease when a third of it is over: all else is slack for a machine that is busy."""
SOURCES = 10
JOBS = "source_credential_backfills"
ROUNDS = "kfs_credentials_round"


def renewals(scene: Scene, table: str, worker: Worker, seconds: float) -> None:
    """Wait until a worker's leases have been renewed for so long, and nobody else has any."""
    until = f"SELECT EXTRACT(EPOCH FROM min(lease_expires_at))::float FROM {table} WHERE lease_token IS NOT NULL"
    holders = f"SELECT DISTINCT worker_id FROM {table} WHERE lease_token IS NOT NULL"
    first, held = scene.value(until), scene.rows(holders)
    assert held
    assert all(f":{worker.pid}:" in holder for (holder,) in held)
    scene.wait_until(lambda: scene.value(until) >= first + seconds, "its leases were renewed for so long", worker)
    assert scene.rows(holders) == held


def test_a_put_that_takes_two_leases(scene: Scene) -> None:
    """Another worker is there and waits: it gets nothing, and nothing is put or activated twice."""
    scene.leave_only(SOURCES)
    versions = dict(scene.rows("SELECT id, version FROM sources"))
    with scene.gate(BEFORE_PUT) as gate:
        slow = scene.start(LEASE=LEASE)
        gate.wait()
        gate.let_others_pass()
        other = scene.start(LEASE=LEASE)
        renewals(scene, JOBS, slow, LEASE)  # beyond the first
        assert scene.states() == {"running": SOURCES}
        gate.open()
        assert slow.wait() == CLEAN, slow.printed
    assert other.wait() == CLEAN, other.printed
    assert f"{SOURCES} moved" in slow.printed
    assert " 0 moved" in other.printed or "othing" in other.printed
    assert scene.rows(f"SELECT DISTINCT run_state, retry_count FROM {JOBS}") == [("succeeded", 0)]
    assert {key: version + 1 for key, version in versions.items()} == dict(
        scene.rows("SELECT id, version FROM sources")
    )
    assert len(scene.files()) == SOURCES
    scene.check_always()


def test_an_erasure_that_takes_two_leases(scene: Scene) -> None:
    stage = Stage(scene, SOURCES)
    stage.orphans()
    with scene.gate(BEFORE_DELETE) as gate:
        slow = scene.start_cleanup(LEASE=LEASE)
        gate.wait()
        gate.let_others_pass()
        other = scene.start_cleanup("--due", LEASE=LEASE)
        assert other.wait() == CLEAN, other.printed
        renewals(scene, LEDGER, slow, LEASE)
        gate.open()
        assert slow.wait() == CLEAN, slow.printed
    assert scene.rows(f"SELECT DISTINCT delete_attempts FROM {LEDGER} WHERE state = 'deleted'") == [(0,)]
    stage.check()


def test_a_replacement_that_takes_two_leases(scene: Scene) -> None:
    stage = Stage(scene, SOURCES)
    keys = [os.urandom(32).hex(), *scene.keys]
    with scene.gate(BEFORE_REPLACE) as gate:
        slow = scene.start_reencryption(LEASE=LEASE, KEYS=keys)
        gate.wait()
        gate.let_others_pass()
        renewals(scene, ROUNDS, slow, LEASE)
        other = scene.start_reencryption(LEASE=LEASE, KEYS=keys)
        assert other.wait() == 1, other.printed
        assert "Another reencrypt_secrets is at work" in other.printed
        gate.open()
        assert slow.wait() == CLEAN, slow.printed
    scene.keys = keys[:1]
    scene.check_values(stage.values)


# A byte now and then.


@pytest.fixture
def drips(secrets_directory: Path) -> Path:
    """The file that makes a storage drip for as long as it is there."""
    return Path(f"{secrets_directory}-drips")


def begin(scene: Scene, command: Callable[..., Worker], drips: Path, stores: Stores) -> Worker:
    """Start a worker on a store that drips, and let it drip no more once a call was over."""
    drips.touch()
    worker = command(STORES=stores("DrippingStorage"), STORE_TIMEOUT=TIMEOUT)
    scene.wait_until(lambda: LATE in worker.printed, "a call is over", worker)
    return worker


def test_a_backfill_on_a_store_that_drips(scene: Scene, stores: Stores, drips: Path) -> None:
    """No byte is late, and the call is over at its deadline: given back, no attempt counted, and later done."""
    scene.leave_only(SOURCES)
    worker = begin(scene, scene.start, drips, stores)
    assert scene.rows("SELECT id FROM sources WHERE credential_ref IS NOT NULL") == []
    drips.unlink()
    assert worker.wait() == CLEAN, worker.printed
    assert scene.attempts() == 0
    assert len(scene.files()) == SOURCES
    scene.check_always()


def test_a_cleanup_on_a_store_that_drips(scene: Scene, stores: Stores, drips: Path) -> None:
    stage = Stage(scene, SOURCES)
    stage.orphans()
    worker = begin(scene, scene.start_cleanup, drips, stores)
    assert scene.rows(f"SELECT id FROM {LEDGER} WHERE state = 'deleted'") == []
    drips.unlink()
    assert worker.wait() == CLEAN, worker.printed
    assert scene.rows(f"SELECT DISTINCT delete_attempts FROM {LEDGER} WHERE state = 'deleted'") == [(0,)]
    stage.check()


def test_an_application_on_a_store_that_drips(scene: Scene, stores: Stores, drips: Path) -> None:
    """It reads and it writes; it is told in time, and its source has what it had."""
    stage = Stage(scene, 2)
    tenant, source, _ = stage.sources[0]
    calls = ("resolve_credentials", {"tenant": tenant, "source_id": source}), stage.rotation(tenant, source)
    drips.touch()
    answers = scene.call(*calls, STORES=stores("DrippingStorage"), STORE_TIMEOUT=TIMEOUT)
    assert answers == [{"error": "StoreUnavailable"}] * 2
    drips.unlink()
    stage.recover()


# More than it does in time.

MANY = 24
SLOW = {"STORE_TIMEOUT": 1, "BATCH_SIZE": MANY, "RETRY_MAX": 0.1}
"""So that about nine objects can be done in one call, and a batch is of many more."""


@pytest.fixture
def slow(stores: Stores) -> dict[str, Any]:
    """The settings of a worker whose store takes a tenth of a second for each object."""
    return {**SLOW, "STORES": stores("SlowStorage", seconds=0.1)}


def ended_with_less(worker: Worker, what: str) -> None:
    """Wait for the end of a worker which was told that the store does less at a time."""
    assert worker.wait() == CLEAN, worker.printed
    assert "did not answer within 1 s (KFS_CREDENTIALS['STORE_TIMEOUT'])" in worker.printed
    assert f"the secret store does not do {MANY} {what} at a time within" in worker.printed
    assert f"going on with {MANY // 2}, " in worker.printed


def test_a_backfill_whose_batches_are_too_much(scene: Scene, slow: dict[str, Any]) -> None:
    """They get smaller until they are done in time, and no attempt is counted."""
    scene.leave_only(MANY)
    ended_with_less(scene.start(**slow), "jobs")
    assert scene.attempts() == 0
    assert len(scene.files()) == MANY
    scene.check_always()


def test_a_cleanup_whose_batches_are_too_much(scene: Scene, slow: dict[str, Any]) -> None:
    stage = Stage(scene, MANY)
    for _ in range(MANY // AT_ONCE):
        stage.orphans()
    ended_with_less(scene.start_cleanup(**slow), "refs")
    assert scene.rows(f"SELECT DISTINCT delete_attempts FROM {LEDGER} WHERE state = 'deleted'") == [(0,)]
    stage.check()


def test_a_reencryption_whose_batches_are_too_much(scene: Scene, slow: dict[str, Any]) -> None:
    """The one that is at work, too: the store is asked for less of it at a time."""
    stage = Stage(scene, MANY)
    keys = [os.urandom(32).hex(), *scene.keys]
    ended_with_less(scene.start_reencryption(KEYS=keys, **slow), "objects")
    scene.keys = keys[:1]
    scene.check_values(stage.values)

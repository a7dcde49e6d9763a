"""A cleanup, or a change of the key, that is asked to end while it waits for the store: what it holds is given back."""

from __future__ import annotations

import secrets
import signal
from functools import partial

import pytest

from tests.crashes.scene import NOT_FINISHED, Scene
from tests.crashes.stage import AT_ONCE, LEDGER, Stage
from tests.crashes.stores import BEFORE_DELETE, BEFORE_REPLACE
from tests.crashes.test_signals import SIGNALS

SOURCES = 12
DELETING = f"SELECT count(*) FROM {LEDGER} WHERE state = 'deleting'"


@pytest.mark.parametrize("number", SIGNALS)
def test_in_an_erasure(scene: Scene, number: signal.Signals) -> None:
    stage = Stage(scene, SOURCES)
    stage.orphans()
    with scene.gate(BEFORE_DELETE) as gate:
        worker = scene.start_cleanup(STORE_TIMEOUT=600)
        gate.wait()
        assert scene.value(DELETING) == AT_ONCE
        worker.send(number)
        assert worker.wait() == NOT_FINISHED, worker.printed
    assert scene.value(DELETING) == 0
    assert scene.value(f"SELECT sum(delete_attempts) FROM {LEDGER}") == 0
    stage.recover()


def test_a_second_signal_in_an_erasure_leaves_at_once(scene: Scene) -> None:
    """What it holds is claimed again once its lease is over."""
    stage = Stage(scene, SOURCES)
    stage.orphans()
    with scene.gate(BEFORE_DELETE) as gate:
        worker = scene.start_cleanup()
        gate.wait()
        worker.send(signal.SIGTERM)
        scene.wait_until(partial(worker.has_handled, signal.SIGTERM), "the signal is handled", watched=worker)
        worker.send(signal.SIGINT)
        assert worker.wait() == -signal.SIGINT, worker.printed
    assert scene.value(DELETING) == AT_ONCE
    stage.recover()


def test_in_a_change_of_the_key(scene: Scene) -> None:
    stage = Stage(scene, SOURCES)
    scene.keys.insert(0, secrets.token_bytes(32).hex())
    with scene.gate(BEFORE_REPLACE) as gate:
        run = scene.start_reencryption(STORE_TIMEOUT=600)
        gate.wait()
        run.send(signal.SIGTERM)
        assert run.wait() == NOT_FINISHED, run.printed
    leased = "SELECT count(*) FROM kfs_credentials_round WHERE lease_expires_at IS NOT NULL"
    assert scene.value(leased) == 0
    again = scene.start_reencryption()
    assert again.wait() == 0, again.printed
    scene.keys.pop()
    scene.check_values(stage.values)

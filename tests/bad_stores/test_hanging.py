"""A call to the store that never returns, each in turn: it is over at its deadline, and changes nothing any more."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.bad_stores.conftest import LATE, TIMEOUT
from tests.bad_stores.stores import BEFORE_GET, BEFORE_LIST, BEFORE_NEW_PROBE, BEFORE_PROBE
from tests.crashes.gates import Gate
from tests.crashes.scene import CLEAN, OUT_OF_REACH, Scene
from tests.crashes.stage import LEDGER, Stage
from tests.crashes.stores import BEFORE_CHECK, BEFORE_DELETE, BEFORE_PUT, BEFORE_REPLACE
from tests.crashes.workers import Worker

SOURCES = 6
REFUSED = "SELECT role FROM kfs_credentials_refusal WHERE reason = 'store_unavailable'"
LEFT_TO_ERASE = (
    f"SELECT count(*) FROM {LEDGER} WHERE state <> 'active' AND (state <> 'deleted' OR next_delete_at IS NOT NULL)"
)


@pytest.fixture
def stage(scene: Scene) -> Stage:
    """Sources that have secrets."""
    return Stage(scene, SOURCES)


@pytest.fixture
def everywhere(scene: Scene) -> dict[str, Any]:
    """The settings of a worker whose store has gates everywhere."""
    storage = {
        "BACKEND": "kfs_credentials.stores.files.DurableFileStorage",
        "OPTIONS": {"location": str(scene.secrets)},
    }
    options = {"storage": storage, "gates": str(scene.directory / "gates")}
    return {
        "STORE_TIMEOUT": TIMEOUT,
        "STORES": {"default": {"BACKEND": "tests.bad_stores.stores.GatedEverywhere", "OPTIONS": options}},
    }


def check_that_a_late_answer_changes_nothing(scene: Scene, worker: Worker, gate: Gate) -> None:
    """The work is done without it. Let the call that hung go on, and see it end, and everything be as before."""
    worker.freeze()
    before, hanging = scene.everything(), Path(f"/proc/{worker.pid}/task/{gate.thread}")
    assert hanging.exists()
    worker.send(signal.SIGCONT)
    gate.open()
    scene.wait_until(lambda: not hanging.exists(), "the call is over", worker)
    worker.send(signal.SIGTERM)
    worker.wait()
    assert scene.everything() == before


def test_a_put_of_a_backfill(scene: Scene, stage: Stage, everywhere: dict[str, Any]) -> None:
    """All is written, and nothing has its name yet."""
    (space,) = scene.new_spaces("a tenant", 1)
    scene.new_legacy_sources(space, SOURCES)
    with scene.gate(BEFORE_CHECK) as gate:
        worker = scene.start("--watch", **everywhere)
        gate.wait()
        gate.let_others_pass()
        scene.wait_until(lambda: scene.has_moved(2 * SOURCES), "all is moved without it", worker)
        assert LATE in worker.printed
        check_that_a_late_answer_changes_nothing(scene, worker, gate)
    assert scene.attempts() == 0
    assert scene.rows(REFUSED) == [("backfill",)]
    stage.check()


@pytest.mark.parametrize("place", [BEFORE_DELETE, BEFORE_NEW_PROBE, BEFORE_LIST])
def test_a_call_of_a_cleanup(scene: Scene, stage: Stage, everywhere: dict[str, Any], place: str) -> None:
    stage.orphans()
    with scene.gate(place) as gate:
        worker = scene.start_cleanup("--watch", **everywhere)
        gate.wait()
        gate.let_others_pass()
        scene.wait_until(lambda: LATE in worker.printed, "the call is over", worker)
        scene.wait_until(lambda: is_cleaned(scene), "all is erased without it", worker)
        check_that_a_late_answer_changes_nothing(scene, worker, gate)
    assert scene.rows(REFUSED) == [("cleanup",)]
    assert scene.rows(f"SELECT DISTINCT delete_attempts FROM {LEDGER} WHERE state = 'deleted'") == [(0,)]
    stage.recover()


@pytest.mark.parametrize("command", ["start", "start_cleanup", "start_reencryption"])
def test_the_first_look_at_the_probe(scene: Scene, everywhere: dict[str, Any], command: str) -> None:
    """A command that cannot find out whether this is its store says so, and does not begin."""
    before = scene.everything()
    with scene.gate(BEFORE_PROBE) as gate:
        worker = getattr(scene, command)(**everywhere)
        gate.wait()
        assert worker.wait() == OUT_OF_REACH, worker.printed
    assert LATE in worker.printed
    assert scene.everything() == before


def is_cleaned(scene: Scene) -> bool:
    patrolled = "SELECT count(*) FROM kfs_credentials_round WHERE name LIKE 'patrol%' AND completed_at IS NOT NULL"
    erased = scene.value(f"SELECT count(*) FROM {LEDGER} WHERE state = 'deleted'")
    return bool(erased and scene.value(LEFT_TO_ERASE) == 0 and scene.value(patrolled))


def test_a_replacement_of_a_reencryption(scene: Scene, stage: Stage, everywhere: dict[str, Any]) -> None:
    """Nobody waits for it any more: all is replaced by the calls after it."""
    keys = [os.urandom(32).hex(), *scene.keys]
    with scene.gate(BEFORE_REPLACE) as gate:
        worker = scene.start_reencryption(KEYS=keys, **everywhere)
        gate.wait()
        gate.let_others_pass()
        assert worker.wait() == CLEAN, worker.printed
    assert LATE in worker.printed
    assert scene.rows(REFUSED) == [("reencrypt",)]
    scene.keys = keys[:1]
    scene.check_values(stage.values)


@pytest.mark.parametrize("place", [BEFORE_GET, BEFORE_PUT])
def test_a_call_of_an_application(scene: Scene, stage: Stage, everywhere: dict[str, Any], place: str) -> None:
    """It is told in time, its source has what it had, and its next call is answered, however busy the machine is."""
    del everywhere["STORE_TIMEOUT"]
    tenant, source, _ = stage.sources[0]
    resolution = "resolve_credentials", {"tenant": tenant, "source_id": source}
    function, arguments = resolution if place == BEFORE_GET else stage.rotation(tenant, source)
    hanging = function, {**arguments, "STORE_TIMEOUT": TIMEOUT}
    with scene.gate(place) as gate:
        application = scene.start_application(hanging, resolution, **everywhere)
        gate.wait()
        gate.let_others_pass()
        assert application.wait() == CLEAN, application.printed
    assert application.answers == [{"error": "StoreUnavailable"}, {"credentials": {"token": source}}]
    stage.recover()

"""A cleanup that is killed at a known step, each step of its work in turn: the next one finishes what it began."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.crashes.database import HoldUp
from tests.crashes.scene import CLEAN, DANGLING, LATE, ORPHANED, UNREGISTERED, Scene
from tests.crashes.stage import Stage
from tests.crashes.stores import (
    AFTER_DELETE,
    AFTER_LIST,
    AFTER_PUT,
    BEFORE_DELETE,
    BEFORE_PUT,
    GONE_AT_GATE,
    IN_DELETE,
    IN_PUT,
)
from tests.crashes.workers import Worker

LEDGER = "source_secret_lifecycle_refs"
OBJECTS = "kfs_credentials_secret_object"
ROUNDS = "kfs_credentials_round"

SOURCES = 90
"""How many sources have a secret in the beginning."""

Work = Callable[[Stage], None]

# What a cleanup writes: what makes it do so, and how a trigger knows it: event, table, condition.
WRITES: dict[str, tuple[Work, str, str, str]] = {
    "sweep, begun": (Stage.orphans, "UPDATE", ROUNDS, "NEW.name = 'sweep' AND OLD.lease_token IS NULL"),
    "sweep": (Stage.orphans, "UPDATE", LEDGER, "OLD.state = 'active' AND NEW.state = 'retired'"),
    "sweep, ended": (Stage.orphans, "UPDATE", ROUNDS, "NEW.name = 'sweep' AND NEW.lease_token IS NULL"),
    "claim, the first table": (Stage.orphans, "UPDATE", OBJECTS, "NEW.first_claimed_at > OLD.updated_at"),
    "claim": (Stage.orphans, "UPDATE", LEDGER, "OLD.state = 'retired' AND NEW.state = 'deleting'"),
    "settle, the first table": (Stage.orphans, "UPDATE", OBJECTS, "NEW.first_erased_at > OLD.updated_at"),
    "settle": (Stage.orphans, "UPDATE", LEDGER, "NEW.state = 'deleted' AND NEW.next_delete_at IS NOT NULL"),
    "claim to confirm": (Stage.orphans, "UPDATE", LEDGER, "OLD.state = 'deleted' AND NEW.state = 'deleting'"),
    "confirm": (Stage.orphans, "UPDATE", LEDGER, "NEW.state = 'deleted' AND NEW.next_delete_at IS NULL"),
    "patrol, begun": (Stage.orphans, "UPDATE", ROUNDS, "NEW.name <> 'sweep' AND OLD.lease_token IS NULL"),
    "patrol": (Stage.late_write, "UPDATE", LEDGER, "OLD.state = 'deleted' AND NEW.state = 'deleted'"),
    "patrol, ended": (Stage.late_write, "UPDATE", ROUNDS, "NEW.name <> 'sweep' AND NEW.lease_token IS NULL"),
    "purge": (Stage.orphans, "DELETE", LEDGER, ""),
    "reconcile": (Stage.reservation, "UPDATE", LEDGER, "OLD.state = 'staged' AND NEW.state = 'retired'"),
    "register": (Stage.unregistered, "INSERT", LEDGER, ""),
    "reinstate": (Stage.stale_save, "UPDATE", LEDGER, "OLD.state = 'retired' AND NEW.state = 'active'"),
    "displace": (Stage.stale_save, "UPDATE", OBJECTS, "NEW.attention = 'displaced'"),
    "rescue, reserve": (Stage.stale_save_of_what_is_being_erased, "INSERT", LEDGER, "NEW.state = 'staged'"),
    "rescue, point": (Stage.stale_save_of_what_is_being_erased, "UPDATE", "sources", ""),
    "rescue, displace": (Stage.stale_save_of_what_is_being_erased, "UPDATE", OBJECTS, "NEW.attention = 'displaced'"),
}
COMMITS = (
    "sweep",
    "claim",
    "settle",
    "claim to confirm",
    "confirm",
    "patrol",
    "purge",
    "reconcile",
    "register",
    "reinstate",
    "rescue, reserve",
    "rescue, point",
)
"""The steps whose transactions are different ones."""
COMMIT_ENDS = [
    pytest.param("rolled back", COMMITS, id="rolled back", marks=pytest.mark.long),
    pytest.param("carried out", COMMITS, id="carried out"),
    pytest.param("answered", ("claim", "settle", "confirm"), id="answered"),
]
"""How the commits end whose worker is killed, and at which steps."""

CALLS: dict[str, tuple[Work, str]] = {
    "in the erasure": (Stage.orphans, IN_DELETE),  # the first: what one worker left is erased in smaller groups
    "before the erasure": (Stage.orphans, BEFORE_DELETE),
    "after the erasure": (Stage.orphans, AFTER_DELETE),
    "in the patrol": (Stage.late_write, AFTER_LIST),
    "before the copy": (Stage.stale_save_of_what_is_being_erased, BEFORE_PUT),
    "in the copy": (Stage.stale_save_of_what_is_being_erased, IN_PUT),
    "after the copy": (Stage.stale_save_of_what_is_being_erased, AFTER_PUT),
}
"""Calls to the store: what leads to them, and the gate."""


def start(scene: Scene, step: str) -> Worker:
    """Start the worker that is to be killed at a step."""
    return scene.start_cleanup(**{"LEDGER_RETENTION": 0} if step == "purge" else {})


def kill_in_commit(scene: Scene, worker: Worker, hold_up: HoldUp, commit: str) -> None:
    """Kill a worker in a COMMIT, which is rolled back, carried out, or answered before the worker reads it."""
    backend = hold_up.wait(worker)
    assert scene.value("SELECT query FROM pg_stat_activity WHERE pid = %s", [backend]) == "COMMIT"
    if commit == "answered":
        worker.freeze()
        hold_up.let_go()
        scene.wait_until_idle(worker)
    worker.kill()
    if commit == "carried out":
        hold_up.let_go()
    elif commit == "rolled back":
        scene.terminate(backend)
    scene.wait_for_end_of(backend)


@pytest.mark.long
def test_killed_in_a_statement(scene: Scene) -> None:
    stage = Stage(scene, SOURCES)
    for step, (make_work, event, table, condition) in WRITES.items():
        make_work(stage)
        with scene.held_up(event, table, condition=condition) as hold_up:
            worker = start(scene, step)
            backend = hold_up.wait(worker)
            worker.kill()
            hold_up.let_go()
            scene.wait_for_end_of(backend)
        scene.check_always(ORPHANED, DANGLING, UNREGISTERED, LATE)
        scene.expire_leases()
    stage.recover()


@pytest.mark.parametrize(("commit", "steps"), COMMIT_ENDS)
def test_killed_in_the_commit_and_after_it(scene: Scene, commit: str, steps: Sequence[str]) -> None:
    stage = Stage(scene, SOURCES)
    for step in steps:
        make_work, event, table, condition = WRITES[step]
        make_work(stage)
        with scene.held_up(event, table, condition=condition, commit=True) as hold_up:
            kill_in_commit(scene, start(scene, step), hold_up, commit)
        scene.check_always(ORPHANED, DANGLING, UNREGISTERED, LATE)
        scene.expire_leases()
    stage.recover()


def test_killed_in_a_call_to_the_store(scene: Scene) -> None:
    stage = Stage(scene, SOURCES)
    for make_work, place in CALLS.values():
        make_work(stage)
        before = len(list(scene.store.list()))
        with scene.gate(place) as gate:
            worker = scene.start_cleanup()
            gate.wait()
            gone = before - len(list(scene.store.list()))
            assert place != IN_DELETE or gone == GONE_AT_GATE
            worker.kill()
        scene.check_always(ORPHANED, DANGLING, UNREGISTERED, LATE)
        scene.expire_leases()
    stage.recover()


@pytest.mark.parametrize("what", ["sweep", "patrol"])
def test_the_round_of_one_that_died_is_made_by_the_next(scene: Scene, what: str) -> None:
    """It waits for the lease of the one that died, rather than to end with a round that nobody has made."""
    stage = Stage(scene, SOURCES)
    make_work, event, table, condition = WRITES[what]
    make_work(stage)
    with scene.held_up(event, table, condition=condition) as hold_up:
        worker = scene.start_cleanup(LEASE=1)
        backend = hold_up.wait(worker)
        worker.kill()
        hold_up.let_go()
        scene.wait_for_end_of(backend)
    following = scene.start_cleanup()
    assert following.wait() == CLEAN, following.printed
    stage.check()

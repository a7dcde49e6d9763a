"""Hypothesis looks for an order of steps and faults after which something is not as it must be.

The short form is a part of the suite. A long one, which tells in the end how far it got:

    KFS_EXAMPLES=2000 KFS_STEPS=40 pytest -n 2 tests/model

KFS_BLOB, set to what a failure says, repeats that one example; with KFS_QUICK a failure is shown as it was found.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from django.db import connections
from hypothesis import HealthCheck, Phase, reproduce_failure, settings
from hypothesis.stateful import run_state_machine_as_test
from pytest_django import Settings

from tests.keys import NEW, OLD
from tests.model.faults import AT_COMMIT, AT_READ, AT_STATEMENT, HELD, IN_STORE
from tests.model.machine import Machine
from tests.model.rules import OPTIONAL
from tests.model.world import ALIAS, World
from tests.move_history import noted

FAULT_KINDS = (*AT_STATEMENT, *AT_COMMIT, *IN_STORE, *AT_READ, *HELD)
LONG = "KFS_EXAMPLES" in os.environ
PARTS = 2 if LONG else 1
"""For as many processors."""
FEW, MANY = 6, 100
"""Examples in which it gets somewhere; in which every fault comes, and every act."""
EXAMPLES = int(os.environ.get("KFS_EXAMPLES", "6")) // PARTS
STEPS = int(os.environ.get("KFS_STEPS", "30"))


@pytest.fixture
def machine(
    settings: Settings,
    tmp_path: Path,
    transactional_db: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[type[Machine]]:
    """The machine, on a database whose connection has faults and on a store that has them."""
    connections.databases[ALIAS] = {**connections["default"].settings_dict, "ENGINE": "tests.model.postgresql"}
    directory = tmp_path / "secrets"
    storage = {"BACKEND": "tests.model.faults.FaultyStorage", "OPTIONS": {"location": str(directory)}}
    store = {"BACKEND": "kfs_credentials.stores.encrypted.EncryptedStore", "OPTIONS": {"storage": storage}}
    settings.KFS_CREDENTIALS = {
        "KEYS": [OLD, NEW],
        "STORES": {"default": store},
        "LOCK_TIMEOUT": 0.02,
        "MAX_ATTEMPTS": 3,
        "PARK_AFTER": 2,
        "POLL_INTERVAL": 0,
        "RETRY_BASE": 0,
    }
    world = World(directory)
    # Ids that come out the same when an example is repeated.
    monkeypatch.setattr(uuid, "uuid4", world.new_uuid)
    logging.disable(logging.CRITICAL)
    with noted() as history, history.watching():
        Machine.world, Machine.history = world, history
        yield Machine
        world.close()
    logging.disable(logging.NOTSET)
    del connections.databases[ALIAS]


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_lost_doubled_or_left_behind(
    machine: type[Machine], part: int, request: pytest.FixtureRequest
) -> None:
    """Whatever applications, old ones, workers and operators do, and whatever goes wrong."""
    if blob := os.environ.get("KFS_BLOB"):
        machine = reproduce_failure(hypothesis.__version__, blob.encode())(machine)
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                # In the suite the same examples for everybody: a failure is due to what was changed.
                derandomize=not LONG,
                print_blob=True,
                phases=[phase for phase in Phase if phase is not Phase.shrink or "KFS_QUICK" not in os.environ],
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        if LONG:
            request.node.user_properties.append(("reached", dict(machine.reached)))
    reached = machine.reached.keys()
    if EXAMPLES >= FEW:
        assert {"race: overtake", "Move: ACTIVATE", "Outcome: ERASED"} <= reached, "it did not get far"
        assert any(what.startswith("fault: ") for what in reached)
    if EXAMPLES >= MANY:
        assert {*(f"fault: {how}" for how in FAULT_KINDS), *(f"act: {act}" for act in OPTIONAL)} <= reached

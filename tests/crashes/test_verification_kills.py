"""A deep verification, or a command that moves a value wrapped, is killed at each step; then it is run again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials.crypto import object_name
from tests.crashes.scene import CLEAN, LOOK, Scene
from tests.crashes.stores import AFTER_PUT, BEFORE_CHECK, BEFORE_PUT, IN_PUT
from tests.crashes.workers import MANAGE, Worker

CHECKPOINT = "kfs_credentials_checkpoint"
LEDGER = "source_secret_lifecycle_refs"
OBJECTS = "kfs_credentials_secret_object"


def start(scene: Scene, *arguments: str, **settings: Any) -> Worker:
    return scene._start(MANAGE, list(arguments), settings)


def finish(scene: Scene, *arguments: str, code: int = CLEAN) -> str:
    """Run a command to its end; return what it printed."""
    worker = start(scene, *arguments)
    assert worker.wait() == code, worker.printed
    return worker.printed


def secrets(scene: Scene, number: int) -> list[str]:
    """Leave only so many sources, with a secret each; return their refs, in order."""
    scene.leave_only(number)
    scene.drain(CLEAN)
    return [ref for (ref,) in scene.rows(f"SELECT credential_ref FROM {LEDGER} ORDER BY credential_ref")]


@pytest.mark.parametrize("commit", [False, True])
def test_a_deep_run_that_is_killed_goes_on(scene: Scene, commit: bool) -> None:
    """Killed while it notes its third batch, or in the commit of that: it goes on after the second, or the third."""
    refs = secrets(scene, 60)
    bad = [refs[0], refs[9], refs[50]]
    paths = [scene.secrets / object_name(ref, prefix=scene.store.prefix) for ref in bad]
    for path in paths:
        path.write_bytes(path.read_bytes()[:40])
    condition = "NEW.name = 'verify:objects' AND (NEW.data->>'read')::int >= 30"
    # A rate of 10 a second: ten at a time.
    with scene.held_up("UPDATE", CHECKPOINT, condition=condition, commit=commit) as hold_up:
        worker = start(scene, "verify_credentials", "--deep", "--only", "object_damaged", RATE_LIMIT=10)
        backend = hold_up.wait(worker)
        worker.kill()
        hold_up.let_go()
        scene.wait_for_end_of(backend)
    ((position, read),) = scene.rows(f"SELECT position, data->>'read' FROM {CHECKPOINT} WHERE name = 'verify:objects'")
    assert (position, int(read)) in [(refs[19], 20), (refs[29], 30)]
    printed = finish(scene, "verify_credentials", "--deep", "--resume", "--only", "object_damaged", code=LOOK)
    assert f"after {read} objects; --restart begins anew." in printed
    assert "object_damaged: an object is not what was put (3)" in printed
    assert all(ref[:25] in printed for ref in bad)
    assert "60 objects read and 0 listed" in printed
    assert scene.value(f"SELECT count(*) FROM {CHECKPOINT} WHERE name = 'verify:objects'") == 0


# What a wrap writes, in order.
STATEMENTS = {
    "reserve": ("INSERT", LEDGER, "NEW.state = 'staged'"),
    "reserve, the last table": ("INSERT", OBJECTS, ""),
    "point": ("UPDATE", "sources", "NEW.credential_ref IS NOT NULL"),
    "activate": ("UPDATE", LEDGER, "NEW.state = 'active'"),
    "note": ("INSERT", "kfs_credentials_event", ""),
}
PLACES = (BEFORE_PUT, BEFORE_CHECK, IN_PUT, AFTER_PUT)
WRAP = ("settle_unsupported_credentials", "--all", "--wrap", "token")


def one_unsupported(scene: Scene) -> tuple[str, str]:
    """Leave one source, whose credentials are a text; return its tenant and id."""
    scene.leave_only(1)
    scene.execute("""UPDATE sources SET metadata = '{"title": "x", "credentials": "made-up"}'""")
    ((tenant, source),) = scene.rows(
        "SELECT tenant_id, src.id::text FROM sources src JOIN knowledge_spaces space ON space.id = knowledge_space_id"
    )
    return tenant, source


def check_wrapped_once(scene: Scene, of: tuple[str, str], version: int) -> None:
    """Nothing is lost, nothing was made twice, and nothing is left."""
    finish(scene, *WRAP)
    scene.recover()
    scene.check_cleaned()
    scene.check_values({of: {"token": "made-up"}})
    assert scene.rows("SELECT version, metadata::text FROM sources") == [(version + 1, '{"title": "x"}')]


@pytest.mark.long
@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_wrap_that_is_killed_in_a_statement(scene: Scene, statement: str) -> None:
    of = one_unsupported(scene)
    version = scene.value("SELECT version FROM sources")
    event, table, condition = STATEMENTS[statement]
    with scene.held_up(event, table, condition=condition) as hold_up:
        worker = start(scene, *WRAP)
        backend = hold_up.wait(worker)
        worker.kill()
        hold_up.let_go()
        scene.wait_for_end_of(backend)
    assert scene.rows("SELECT version, metadata->>'credentials' FROM sources") == [(version, "made-up")]
    check_wrapped_once(scene, of, version)


@pytest.mark.parametrize("step", ["reserve", "activate"])
@pytest.mark.parametrize("carried_out", [True, False])
def test_a_wrap_that_is_killed_in_a_commit(scene: Scene, step: str, carried_out: bool) -> None:
    of = one_unsupported(scene)
    version = scene.value("SELECT version FROM sources")
    event, table, condition = STATEMENTS[step]
    with scene.held_up(event, table, condition=condition, commit=True) as hold_up:
        worker = start(scene, *WRAP)
        backend = hold_up.wait(worker)
        worker.kill()
        if carried_out:
            hold_up.let_go()
        else:
            scene.terminate(backend)
        scene.wait_for_end_of(backend)
    check_wrapped_once(scene, of, version)


@pytest.mark.parametrize("place", PLACES)
def test_a_wrap_that_is_killed_in_the_put(scene: Scene, place: str) -> None:
    of = one_unsupported(scene)
    version = scene.value("SELECT version FROM sources")
    with scene.gate(place) as gate:
        worker = start(scene, *WRAP)
        gate.wait()
        worker.kill()
    assert scene.rows("SELECT version, metadata->>'credentials' FROM sources") == [(version, "made-up")]
    check_wrapped_once(scene, of, version)


def test_sigterm_ends_a_deep_run_which_goes_on(scene: Scene, tmp_path: Path) -> None:
    refs = secrets(scene, 30)
    condition = "NEW.name = 'verify:objects' AND (NEW.data->>'read')::int >= 20"
    with scene.held_up("UPDATE", CHECKPOINT, condition=condition) as hold_up:
        worker = start(scene, "verify_credentials", "--deep", RATE_LIMIT=10)
        hold_up.wait(worker)
        worker.send(signal.SIGTERM)
        hold_up.let_go()
        assert worker.wait() == 4, worker.printed
    assert "Not finished: interrupted." in worker.printed
    assert worker.printed.endswith("`manage.py verify_credentials --deep` goes on where it was.\n")
    assert f"{len(refs)} objects read" in finish(scene, "verify_credentials", "--deep", "--skip", "metadata")

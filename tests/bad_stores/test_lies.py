"""Workers and services on a store that lies: nothing is activated, and nothing called erased, on its mere word."""

from __future__ import annotations

import os
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import call_command

from kfs_credentials.crypto import Scope, key_id, new_ref, object_name
from tests.bad_stores.conftest import REASON, Stores, everybody_may_go_on
from tests.bad_stores.storages import DELETES, PUTS, TRIAL, all_lie
from tests.crashes.database import ALIAS
from tests.crashes.scene import CLEAN, LOOK, NOT_FINISHED, UNREGISTERED, Scene
from tests.crashes.stage import LEDGER, Stage
from tests.crashes.workers import Worker
from tests.invariants import objects_in_use

SOURCES = 40
IN_CLEAR = "SELECT count(*) FROM sources WHERE jsonb_typeof(metadata -> 'credentials') = 'object'"
MOVED = "SELECT credential_ref FROM sources WHERE credential_ref IS NOT NULL"


def lie_of(ref: str, lies: dict[str, str]) -> str:
    """Return what a storage with these lies lies about an object; empty if nothing."""
    return lies.get(object_name(ref).rpartition("/")[2][0], "")


def mixed(*told: str) -> dict[str, str]:
    """Return lies, each about one object in sixteen."""
    return dict(zip("0123456789abcdef", told, strict=False))


def put_unknown(scene: Scene, number: int) -> list[str]:
    """Put objects that no ledger knows; return their names."""
    refs = [new_ref() for _ in range(number)]
    for ref in refs:
        scene.store.put(Scope("tenant-a", str(uuid4()), str(uuid4())), ref, {"token": "unknown"})
    return [object_name(ref) for ref in refs]


def erase_unknown(scene: Scene, code: int, **settings: Any) -> Worker:
    """Erase them, as a person does."""
    return scene.run("verify_credentials", "--deep", "--erase-unknown", "--yes", code=code, **settings)


def test_a_backfill_activates_nothing_that_the_store_only_says_it_has(scene: Scene, stores: Stores) -> None:
    """Six lies at a time, each about some objects: these keep their plaintext, and the others are moved."""
    lies = mixed(*PUTS)
    number = 2 * SOURCES
    scene.leave_only(number)
    scene.execute("UPDATE sources SET metadata = jsonb_build_object('credentials', jsonb_build_object('id', id))")
    worker = scene.start(STORES=stores("LyingStorage", lies=lies, spared=TRIAL), MAX_ATTEMPTS=2, RETRY_MAX=0)
    assert worker.wait() == LOOK, worker.printed
    moved = [ref for (ref,) in scene.rows(MOVED)]
    assert {lie_of(ref, lies) for ref in moved} == {""}
    assert 0 < len(moved) < number
    assert scene.value(IN_CLEAR) == number - len(moved)
    scene.check_always(UNREGISTERED)  # that is what `other name` was
    codes = scene.rows("SELECT DISTINCT last_error_code FROM source_credential_backfills ORDER BY 1")
    assert codes == [("SOURCE_SECRET_INTEGRITY_FAILED",), ("SOURCE_SECRET_STORE_CONTRADICTED",), (None,)]

    # The store is mended; an operator has the others tried again, under fresh refs, and nothing is missing.
    call_command("retry_credential_backfill", database=ALIAS, all=True, verbosity=0)
    scene.drain(CLEAN)
    assert (len(scene.rows(MOVED)), scene.value(IN_CLEAR)) == (number, 0)
    scene.recover()
    scene.check_always(UNREGISTERED)


def test_a_store_that_keeps_nothing_pauses_the_workers_and_takes_nothing_away(scene: Scene, stores: Stores) -> None:
    scene.leave_only(SOURCES)
    worker = scene.start(STORES=stores("LyingStorage", lies=all_lie("nothing")))
    assert worker.wait() == NOT_FINISHED, worker.printed
    assert "has put 20 secrets, and shows none of them like that" in worker.printed
    assert scene.value(IN_CLEAR) == SOURCES
    assert (scene.rows(MOVED), scene.attempts(), scene.states()) == ([], 0, {"queued": SOURCES})

    other = scene.start()
    assert other.wait() == NOT_FINISHED, other.printed
    everybody_may_go_on(scene)
    scene.drain(CLEAN)
    assert (scene.value(IN_CLEAR), len(scene.rows(MOVED))) == (0, SOURCES)
    scene.check_always()
    scene.check_cleaned()


@pytest.mark.parametrize(("lie", "error"), [("nothing", "NotAsSaid"), ("other bytes", "SecretIntegrityError")])
def test_a_service_leaves_a_source_what_it_has(scene: Scene, stores: Stores, lie: str, error: str) -> None:
    """Whether the store lies about this one object, or about all."""
    stage = Stage(scene, 2)
    tenant, source, _ = stage.sources[0]
    rotation = stage.rotation(tenant, source)
    assert scene.call(rotation, STORES=stores("LyingStorage", lies=all_lie(lie), spared=TRIAL)) == [{"error": error}]
    assert scene.call(rotation, STORES=stores("LyingStorage", lies=all_lie(lie))) == [{"error": "StoreMisconfigured"}]
    stage.recover()


def test_a_ref_does_not_read_deleted_while_its_object_is_there(scene: Scene, stores: Stores) -> None:
    """The store says that it has erased what it keeps: that is tried again, then parked; and erased once it can be."""
    stage = Stage(scene, SOURCES)
    lies = mixed(*DELETES, *DELETES)
    scene.execute("DELETE FROM sources")
    stage.values = {(tenant, source): None for tenant, source, _ in stage.sources}
    worker = scene.start_cleanup(STORES=stores("LyingStorage", lies=lies, spared=TRIAL), PARK_AFTER=2)
    assert worker.wait() == LOOK, worker.printed
    kept = {ref for _, _, ref in stage.sources if lie_of(ref, lies).startswith("kept")}
    states = dict(scene.rows(f"SELECT credential_ref, state FROM {LEDGER}"))
    assert {ref for ref, state in states.items() if state != "deleted"} == kept
    assert objects_in_use(ALIAS, scene.store)["retired"] == len(kept)
    codes = scene.rows(f"SELECT DISTINCT last_error_code FROM {LEDGER} WHERE state = 'retired'")
    assert codes == [("SOURCE_SECRET_NEEDS_ATTENTION",)] * bool(kept)
    scene.check_always()

    scene.execute(f"UPDATE {LEDGER} SET next_delete_at = now() WHERE state = 'retired'")
    scene.recover()
    assert scene.rows(f"SELECT count(*) FROM {LEDGER} WHERE state <> 'deleted'") == [(0,)]
    assert scene.files() == []


def test_a_store_that_erases_nothing_pauses_the_workers(scene: Scene, stores: Stores) -> None:
    stage = Stage(scene, SOURCES)
    scene.execute("DELETE FROM sources")
    stage.values = {(tenant, source): None for tenant, source, _ in stage.sources}
    worker = scene.start_cleanup(STORES=stores("LyingStorage", lies=all_lie("kept")))
    assert worker.wait() == NOT_FINISHED, worker.printed
    assert "has erased 20 secrets, and shows none of them like that" in worker.printed
    assert scene.rows(f"SELECT DISTINCT state, delete_attempts FROM {LEDGER}") == [("retired", 0)]
    assert len(list(scene.store.list())) >= SOURCES
    everybody_may_go_on(scene)
    scene.recover()
    assert scene.rows(f"SELECT count(*) FROM {LEDGER} WHERE state <> 'deleted'") == [(0,)]
    # What it kept of its trials has no ref, and is in no list: three for each of the two batches that were at work.
    assert len(scene.files()) in range(3, 7)
    scene.check_always()


def test_an_object_that_comes_back_is_erased_again(scene: Scene, stores: Stores) -> None:
    """Nobody sees it until it is there: the patrol finds it after its erasure was confirmed."""
    stage = Stage(scene, 6)
    scene.execute("DELETE FROM sources")
    stage.values = {(tenant, source): None for tenant, source, _ in stage.sources}
    lying = stores("LyingStorage", lies=all_lie("comes back"))
    worker = scene.start_cleanup(STORES=lying)
    assert worker.wait() == CLEAN, worker.printed
    assert "6 objects were written after their erasure was confirmed: erased again" in worker.printed
    stage.recover()


def test_reencryption_loses_nothing_that_the_store_only_says_it_has_replaced(scene: Scene, stores: Stores) -> None:
    stage = Stage(scene, SOURCES)
    lies = mixed(*["old kept", "lost"] * 4)
    keys = [os.urandom(32).hex(), *scene.keys]
    told = {ref: lie_of(ref, lies) for _, _, ref in stage.sources}
    worker = scene.start_reencryption(STORES=stores("LyingStorage", lies=lies, spared=TRIAL), KEYS=keys)
    code = worker.wait()
    old = sum(lie == "old kept" for lie in told.values())
    assert code == (LOOK if old else CLEAN), worker.printed
    known = "SELECT count(*) FROM kfs_credentials_secret_object WHERE key_id = %s"
    assert scene.value(known, [key_id(bytes.fromhex(keys[0]))]) == SOURCES - old

    scene.keys = keys
    again = scene.start_reencryption()
    assert again.wait() == CLEAN, again.printed
    scene.keys = keys[:1]
    scene.check_values(stage.values)


def test_a_store_that_shows_an_old_probe_is_not_believed(scene: Scene, stores: Stores) -> None:
    """As one that was restored from a copy, or a replica that lags: nothing is erased on its word."""
    stage = Stage(scene, 6)
    stage.orphans()
    lying = stores("LyingStorage", probe="old probe")
    before = len(scene.files())
    worker = scene.start_cleanup(STORES=lying)
    assert worker.wait() == NOT_FINISHED, worker.printed
    assert scene.rows(f"SELECT count(*) FROM {LEDGER} WHERE state = 'deleted'") == [(0,)]
    assert len(scene.files()) == before
    everybody_may_go_on(scene)
    stage.recover()


def test_a_store_that_does_not_write_its_probe_erases_nothing(scene: Scene, stores: Stores) -> None:
    """The epoch that begins before an erasure is not there: neither a cleanup nor a person's command goes on."""
    stage = Stage(scene, 6)
    stage.orphans()
    (unknown,) = put_unknown(scene, 1)
    lying = stores("LyingStorage", probe="probe kept")
    before = scene.files()
    worker = scene.start_cleanup(STORES=lying)
    assert worker.wait() == NOT_FINISHED, worker.printed
    assert "has written its probe, and shows another one, or none" in worker.printed
    assert scene.rows(f"SELECT DISTINCT state, delete_attempts FROM {LEDGER} WHERE state <> 'active'") == [
        ("retired", 0)
    ]
    assert scene.files() == before
    everybody_may_go_on(scene)
    told = erase_unknown(scene, 1, STORES=lying).printed
    assert "has written its probe, and shows another one, or none" in told
    assert scene.files() == before
    scene.store.delete_named([unknown])
    if scene.rows(REASON):
        everybody_may_go_on(scene)
    stage.recover()


@pytest.mark.parametrize("lie", ["year 1", "text", "overflow"])
def test_a_time_that_is_none_erases_nothing_that_is_in_use(scene: Scene, stores: Stores, lie: str) -> None:
    """It counts as not known, or as old: then ledger and sources are asked, as of each object, before it is erased."""
    stage = Stage(scene, 6)
    stage.orphans()
    put_unknown(scene, 2)
    lying = stores("LyingStorage", lies=all_lie(lie))
    worker = scene.start_cleanup(STORES=lying, ERASE_GRACE=600)
    assert worker.wait() == NOT_FINISHED, worker.printed  # three are due later
    assert len(scene.files()) == 8, "neither what is not due yet nor what nobody knows is erased"
    told = erase_unknown(scene, CLEAN if lie == "year 1" else LOOK, STORES=lying, ERASE_GRACE=600).printed
    assert ("2 unknown objects erased" in told) == (lie == "year 1"), told
    assert (told.count("its age cannot be told") == 2) == (lie != "year 1"), told
    assert len(scene.files()) == (6 if lie == "year 1" else 8)
    scene.check_always(UNREGISTERED)


@pytest.mark.parametrize("lie", ["hidden", "phantoms"])
def test_nothing_is_erased_or_forgotten_on_the_word_of_a_list(scene: Scene, stores: Stores, lie: str) -> None:
    stage = Stage(scene, 6)
    stage.orphans()
    worker = scene.start_cleanup(STORES=stores("LyingStorage", lies=all_lie(lie)))
    code: Any = worker.wait()
    assert code == (LOOK if lie == "phantoms" else CLEAN), worker.printed
    assert ("16 objects that no ledger row accounts for" in worker.printed) == (lie == "phantoms")
    stage.check()

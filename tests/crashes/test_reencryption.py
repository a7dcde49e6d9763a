"""`reencrypt_secrets` as a process: killed, frozen, beside others; and workers with an old key ring at their worst."""

from __future__ import annotations

import secrets
import signal
from typing import Any

import pytest

from kfs_credentials.crypto import Credentials, Scope, envelope_key_id, key_id
from kfs_credentials.keys import CLOSING
from kfs_credentials.stores import Address
from tests.bound import seal_anew
from tests.crashes.database import ALIAS, HELD_UP
from tests.crashes.scene import CLEAN, NOT_FINISHED, Scene
from tests.crashes.stage import LEDGER
from tests.crashes.stores import AFTER_PUT, AFTER_REPLACE, BEFORE_PUT, BEFORE_REPLACE, IN_REPLACE
from tests.crashes.workers import Worker
from tests.keys import NEW, NEW_ID, OLD, OLD_ID, Change

NUMBER = 30
OLD_RING, NEW_RING, ONLY_NEW = ([key.hex() for key in ring] for ring in ([OLD, NEW], [NEW, OLD], [NEW]))
WRONG_USE = 1
OBJECTS = "kfs_credentials_secret_object"
CLOSED = f"Key {OLD_ID} is closed: "
CLOSING_WAITS = f"{HELD_UP} AND classid = %s AND mode = 'ExclusiveLock'"


@pytest.fixture
def scene(scene: Scene, kfs_settings: Change) -> Scene:
    """A scene with few sources, under the old key; what the test itself reads is opened by either key."""
    kfs_settings(KEYS=[OLD])
    seal_anew(ALIAS, scene.store)
    kfs_settings(KEYS=[NEW, OLD])
    scene.leave_only(NUMBER)
    scene.settings["BATCH_SIZE"] = 10
    scene.keys = OLD_RING
    return scene


def keys_of_objects(scene: Scene) -> set[str | None]:
    """Return the keys that objects say they are under."""
    return {envelope_key_id(path.read_bytes()) for path, *_ in scene.files() if path.suffix == ".enc"}


def reencrypt(scene: Scene, *arguments: str, code: int = CLEAN, **settings: Any) -> Worker:
    """Run it to its end."""
    worker = scene.start_reencryption(*arguments, **{"KEYS": NEW_RING, **settings})
    assert worker.wait() == code, worker.printed
    return worker


def check_that_the_old_key_can_go(scene: Scene, kfs_settings: Change, number: int = NUMBER) -> None:
    """All sources are moved, and the new key alone opens what each of them names; nothing else is wrong either."""
    kfs_settings(KEYS=[NEW])
    rows = scene.rows(
        "SELECT tenant_id, ledger.knowledge_space_id, source_id, ledger.credential_ref "
        "FROM source_secret_lifecycle_refs ledger JOIN sources src USING (credential_ref) WHERE state = 'active'"
    )
    assert len(rows) == number
    found = scene.store.get_many([Address(Scope(*scope), ref) for *scope, ref in rows])
    assert {type(one) for one in found} == {Credentials}
    scene.check_always()
    held = (
        "SELECT count(*) FROM kfs_credentials_secret_object JOIN source_secret_lifecycle_refs USING (credential_ref) "
        "WHERE key_id = %s AND state <> 'deleted'"
    )
    assert scene.value(held, [OLD_ID]) == 0


# The run itself, killed and frozen.


@pytest.mark.parametrize("place", [BEFORE_REPLACE, IN_REPLACE, AFTER_REPLACE])
def test_killed(scene: Scene, kfs_settings: Change, place: str) -> None:
    """The next run goes on where it was, as soon as its lease is over; every object is whole at any moment."""
    scene.drain(CLEAN)
    with scene.gate(place) as gate:
        killed = scene.start_reencryption(KEYS=NEW_RING)
        gate.wait()
        scene.check_always()
        killed.kill()
    assert "Another reencrypt_secrets is at work" in reencrypt(scene, code=WRONG_USE).printed
    scene.expire_leases()
    scene.check_always()
    reencrypt(scene)
    check_that_the_old_key_can_go(scene, kfs_settings)


def test_frozen_until_another_run_has_begun(scene: Scene, kfs_settings: Change) -> None:
    """Its lease is over by its own watch: it replaces nothing any more, and notes nothing."""
    third = secrets.token_bytes(32)
    scene.drain(CLEAN)
    with scene.gate(BEFORE_REPLACE) as gate:
        frozen = scene.start_reencryption(KEYS=[*NEW_RING, third.hex()], LEASE=2)
        gate.wait()
        frozen.freeze()
    # That the lease is over is the database's to say, and the frozen one's watch: both have run on.
    expired = "SELECT lease_expires_at <= now() FROM kfs_credentials_round WHERE name = 're-encryption'"
    scene.wait_until(lambda: scene.value(expired), "its lease is over")
    reencrypt(scene, "--reopen", KEYS=[third.hex(), *NEW_RING])  # the frozen one has closed it
    before = scene.everything()
    frozen.send(signal.SIGCONT)
    assert frozen.wait() == NOT_FINISHED, frozen.printed
    assert "Ended early: another run has begun." in frozen.printed
    assert scene.everything() == before
    assert keys_of_objects(scene) == {key_id(third)}
    kfs_settings(KEYS=[third])
    scene.check_always()


def test_asked_to_stop(scene: Scene, kfs_settings: Change) -> None:
    """It finishes the batch at hand, and the next run goes on at once."""
    scene.drain(CLEAN)
    with scene.gate(IN_REPLACE) as gate:
        stopped = scene.start_reencryption(KEYS=NEW_RING)
        gate.wait()
        stopped.send(signal.SIGTERM)
    assert stopped.wait() == NOT_FINISHED, stopped.printed
    assert "10 rewritten, 0 skipped, 0 failed" in stopped.printed
    assert "Ended early: interrupted by a signal." in stopped.printed
    assert "20 rewritten, 10 skipped, 0 failed" in reencrypt(scene).printed
    check_that_the_old_key_can_go(scene, kfs_settings)


# Beside those who erase.


def test_what_is_rotated_and_erased_between_the_read_and_the_replacement_is_not_back(
    scene: Scene, kfs_settings: Change
) -> None:
    """Behind its last check the run brings it back, whatever it does; so it looks again, and erases it once more."""
    scene.leave_only(2)
    scene.drain(CLEAN)
    source, tenant = scene.rows(
        "SELECT src.id::text, tenant_id FROM sources src JOIN knowledge_spaces space ON space.id = knowledge_space_id "
        "ORDER BY src.credential_ref DESC LIMIT 1"
    )[0]
    ref = scene.value("SELECT credential_ref FROM sources WHERE id = %s", [source])
    with scene.gate(IN_REPLACE) as gate:
        run = scene.start_reencryption(KEYS=NEW_RING, LEASE=600)
        gate.wait()  # the second of the two is about to be replaced
        arguments = {"tenant": tenant, "source_id": source, "credentials": {"token": "made-up"}}
        scene.call(("rotate_credentials", arguments), KEYS=NEW_RING)
        cleanup = scene.start_cleanup("--due", KEYS=NEW_RING)
        assert cleanup.wait() == CLEAN, cleanup.printed
        assert (
            scene.value("SELECT state FROM source_secret_lifecycle_refs WHERE credential_ref = %s", [ref]) == "deleted"
        )
    assert run.wait() == CLEAN, run.printed
    assert "1 erased meanwhile" in run.printed
    assert len([path for path, *_ in scene.files() if path.suffix == ".enc"]) == 2
    check_that_the_old_key_can_go(scene, kfs_settings, 2)


# Workers with an old key ring.


@pytest.mark.parametrize("place", [BEFORE_PUT, AFTER_PUT])
def test_a_frozen_worker_with_an_old_ring_activates_nothing(scene: Scene, kfs_settings: Change, place: str) -> None:
    """It has leased, or put already, when the key is closed. It ends with 1, gives back, and counts no attempt."""
    with scene.gate(place) as gate:
        # All in one batch: it has no transaction open for the next one, for whose end closing would wait.
        frozen = scene.start(BATCH_SIZE=NUMBER)
        gate.wait()
        frozen.freeze()
    reencrypt(scene)
    frozen.send(signal.SIGCONT)
    assert frozen.wait() == WRONG_USE, frozen.printed
    assert CLOSED in " ".join(frozen.printed.split())
    assert scene.attempts() == 0
    assert set(scene.states()) <= {"queued"}
    assert scene.value("SELECT count(*) FROM sources WHERE credential_ref IS NOT NULL") == 0

    scene.drain(CLEAN, KEYS=NEW_RING)
    scene.recover(KEYS=NEW_RING)
    reencrypt(scene)
    assert keys_of_objects(scene) == {NEW_ID}
    check_that_the_old_key_can_go(scene, kfs_settings)


def test_an_activation_that_is_under_way_is_waited_for_and_seen(scene: Scene, kfs_settings: Change) -> None:
    """Closing waits for a real lock, which the activation holds until its commit; then it is in the inventory."""
    with scene.held_up("UPDATE", "sources", condition="NEW.credential_ref IS NOT NULL") as hold_up:
        worker = scene.start()
        hold_up.wait(worker)
        run = scene.start_reencryption(KEYS=NEW_RING)
        scene.wait_until(lambda: scene.rows(CLOSING_WAITS, [CLOSING]), "the run waits for the activation", run)
        assert scene.value("SELECT count(*) FROM kfs_credentials_closed_key") == 0
        hold_up.let_go()
        assert run.wait() == CLEAN, run.printed
    assert worker.wait() == WRONG_USE, worker.printed
    activated = scene.value("SELECT count(*) FROM sources WHERE credential_ref IS NOT NULL")
    assert activated in (10, 20)
    check_that_the_old_key_can_go(scene, kfs_settings, activated)


def test_a_reservation_that_is_under_way_is_waited_for_and_seen(scene: Scene, kfs_settings: Change) -> None:
    """Else it would note the old key when nobody looks any more, and the key would seem to be needed."""
    with scene.held_up("INSERT", LEDGER) as hold_up:
        worker = scene.start()
        hold_up.wait(worker)
        run = scene.start_reencryption(KEYS=NEW_RING)
        scene.wait_until(lambda: scene.rows(CLOSING_WAITS, [CLOSING]), "the run waits for the reservation", run)
        hold_up.let_go()
        assert run.wait() == CLEAN, run.printed
    assert worker.wait() == WRONG_USE, worker.printed
    noted = f"SELECT count(*), count(*) FILTER (WHERE key_id = %s) FROM {LEDGER} JOIN {OBJECTS} USING (credential_ref)"
    ((reserved, under_the_old_key),) = scene.rows(f"{noted} WHERE state = 'candidate'", [OLD_ID])
    assert reserved >= 10
    assert under_the_old_key == 0, "the run has looked at each: nothing lies there, or it is sealed anew"
    scene.drain(CLEAN, KEYS=NEW_RING)
    scene.recover(KEYS=NEW_RING)
    check_that_the_old_key_can_go(scene, kfs_settings)


def test_an_activation_that_comes_while_a_key_is_closed_waits_and_finds_it_closed(
    scene: Scene, kfs_settings: Change
) -> None:
    """The worker waits for a real lock, which closing holds until its commit, and ends."""
    with scene.session() as session:
        session.execute("SELECT pg_advisory_xact_lock(%s, 0)", [CLOSING])
        session.execute("INSERT INTO kfs_credentials_closed_key VALUES (%s, now(), 'tests')", [OLD_ID])
        worker = scene.start()
        scene.wait_for_lock(worker)
        session.commit()
        assert worker.wait() == WRONG_USE, worker.printed
    assert CLOSED in " ".join(worker.printed.split())
    assert scene.value("SELECT count(*) FROM sources WHERE credential_ref IS NOT NULL") == 0
    assert scene.attempts() == 0
    scene.drain(CLEAN, KEYS=NEW_RING)
    scene.recover(KEYS=NEW_RING)
    assert keys_of_objects(scene) == {NEW_ID}
    check_that_the_old_key_can_go(scene, kfs_settings)


def test_an_application_that_has_put_under_the_old_key_is_refused(scene: Scene, kfs_settings: Change) -> None:
    """Its create is frozen between its put and its activation; what it has put is taken back."""
    (space,) = scene.new_spaces("tenant-x", 1)
    values = {"tenant": "tenant-x", "space_id": space, "type": "drive", "name": "A source", "uri": "https://x.example"}
    with scene.gate(AFTER_PUT) as gate:
        frozen = scene.start_application(("create_source", {**values, "credentials": {"token": "made-up"}}))
        gate.wait()
        frozen.freeze()
    scene.drain(CLEAN, KEYS=NEW_RING)
    reencrypt(scene)
    frozen.send(signal.SIGCONT)
    frozen.wait()
    assert [answer["error"] for answer in frozen.answers] == ["KeyClosed"], frozen.printed
    scene.recover(KEYS=NEW_RING)
    reencrypt(scene)
    assert keys_of_objects(scene) == {NEW_ID}
    check_that_the_old_key_can_go(scene, kfs_settings)


# A change of keys, from its beginning to its end.


def test_the_order_in_which_keys_are_changed(scene: Scene, kfs_settings: Change) -> None:
    """The new key behind the old one everywhere, then first everywhere, then all is moved, then the old one goes."""
    old = [OLD.hex()]
    (space,) = scene.new_spaces("tenant-x", 1)
    values = {"tenant": "tenant-x", "space_id": space, "type": "drive", "name": "A source", "uri": "https://x.example"}
    made: dict[tuple[str, str], dict[str, str]] = {}
    for place, ring in enumerate((old, OLD_RING, NEW_RING)):
        secret = {"token": f"made-up-{place}"}
        (answer,) = scene.call(("create_source", {**values, "credentials": secret}), KEYS=ring)
        made["tenant-x", answer["source"]] = secret
        if ring is NEW_RING:
            scene.drain(CLEAN, KEYS=ring)
        else:
            worker = scene.start("--limit", "10", KEYS=ring)
            assert worker.wait() == NOT_FINISHED, worker.printed
        # Nobody is left out while both rings are at work.
        for reading in (OLD_RING, NEW_RING):
            scene.keys = reading
            scene.check_values(made)
    reencrypt(scene)
    scene.keys = ONLY_NEW
    scene.check_values(made)
    scene.recover(KEYS=ONLY_NEW)
    check_that_the_old_key_can_go(scene, kfs_settings, NUMBER + 3)
    assert keys_of_objects(scene) == {NEW_ID}

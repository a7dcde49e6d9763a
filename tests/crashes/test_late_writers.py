"""A writer that is frozen in its put while its ref is given up, erased and confirmed, and then goes on."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import pytest

from tests.crashes.database import ALIAS
from tests.crashes.scene import CLEAN, LATE, Scene
from tests.crashes.stage import LEDGER, Stage
from tests.crashes.stores import BEFORE_CHECK, IN_PUT, VISIBLE_AT_GATE
from tests.crashes.workers import Worker
from tests.invariants import check_invariants

SOURCES = 5


class Writer:
    """One that is to put a secret, or several, and never gets to use them."""

    late = 1
    """How many objects it makes visible once it is past its check."""
    answers: tuple[list[dict[str, Any]], list[dict[str, Any]]] = (
        [{"error": "StoreUnavailable"}],
        [{"error": "OperationOver"}],
    )
    """What it is told: where its deadline stops it, and where it writes late."""

    time = 1.0
    """Seconds that its put, or its lease, has where that is to be over when its process wakes up."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.stage = Stage(scene, SOURCES)

    def start(self, **settings: Any) -> Worker:
        """Start it."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Let its ref be of no use to anybody."""


class Creating(Writer):
    """An application that creates a source."""

    def start(self, **settings: Any) -> Worker:
        return self.scene.start_application(create(self.scene), **settings)


class Rotating(Writer):
    """An application that rotates; its source keeps what it has."""

    def start(self, **settings: Any) -> Worker:
        tenant, source, _ = self.stage.sources[0]
        return self.scene.start_application(self.stage.rotation(tenant, source), **settings)


class Moving(Writer):
    """A backfill, whose space is deleted meanwhile."""

    late = SOURCES - VISIBLE_AT_GATE
    answers = ([], [])
    time = 2.0

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        (self.space,) = scene.new_spaces("a tenant", 1)
        scene.new_legacy_sources(self.space, SOURCES)

    def start(self, **settings: Any) -> Worker:
        return self.scene.start(LEASE=settings.get("STORE_TIMEOUT", 600))

    def give_up(self) -> None:
        self.scene.execute("DELETE FROM knowledge_spaces WHERE id = %s", [self.space])


def create(scene: Scene) -> tuple[str, Mapping[str, Any]]:
    """Return a call that creates a source."""
    ((tenant, space),) = scene.rows("SELECT tenant_id, id::text FROM knowledge_spaces ORDER BY id LIMIT 1")
    what = {"type": "online_drive", "name": "Made up", "uri": "", "source_id": str(uuid4())}
    return "create_source", {"tenant": tenant, "space_id": space, "credentials": {"token": "late"}, **what}


writers = pytest.mark.parametrize("kind", [Creating, Rotating, Moving])


@writers
def test_its_deadline_stops_it(scene: Scene, kind: type[Writer]) -> None:
    """All is written but the name, and the time of the call, or of the lease, is over."""
    writer = kind(scene)
    with scene.gate(BEFORE_CHECK) as gate:
        frozen = writer.start(STORE_TIMEOUT=writer.time)
        gate.wait()
        frozen.freeze()
        gate.open()
    writer.give_up()
    scene.recover(LATE_WRITE_HORIZON=writer.time + 0.1)  # it has been frozen for longer when that is over
    writer.stage.check()
    before = scene.everything()
    frozen.send(signal.SIGCONT)
    assert frozen.wait() == CLEAN, frozen.printed
    assert frozen.answers == writer.answers[0]
    assert scene.everything() == before
    writer.stage.check()


@writers
def test_what_it_writes_late_is_found_by_the_patrol(scene: Scene, kind: type[Writer]) -> None:
    """It is past its check: it makes an object visible whose erasure is confirmed, and can do no more than that."""
    writer = kind(scene)
    frozen = freeze(scene, writer)
    scene.recover()
    writer.stage.check()
    before = len(list(scene.store.list()))
    wake(frozen, writer)
    assert len(list(scene.store.list())) == before + writer.late
    (found,) = check_invariants(ALIAS, scene.store)
    assert found.startswith(LATE)
    patrol = scene.start_cleanup()
    assert patrol.wait() == CLEAN, patrol.printed
    assert f"{writer.late} objects were written after their erasure was confirmed: erased again" in patrol.printed
    writer.stage.check()


def test_what_it_writes_within_the_horizon_is_erased_without_a_patrol(scene: Scene) -> None:
    """The erasure is not confirmed yet: that is what the second one is for."""
    writer = Rotating(scene)
    frozen = freeze(scene, writer)
    scene.expire_leases()
    scene.expire_reservations()
    eraser = scene.start_cleanup("--due", LATE_WRITE_HORIZON=600)
    assert eraser.wait() == CLEAN, eraser.printed
    wake(frozen, writer)
    scene.check_always()
    scene.execute(f"UPDATE {LEDGER} SET next_delete_at = now() WHERE state = 'deleted'")
    confirming = scene.start_cleanup()
    assert confirming.wait() == CLEAN, confirming.printed
    assert "objects were written after" not in confirming.printed
    writer.stage.check()


def test_the_store_applies_late_what_its_caller_gave_up(scene: Scene) -> None:
    """A call that has timed out cannot be taken back; the application lives on, and knows that it failed."""
    stage = Stage(scene, SOURCES)
    with scene.gate(IN_PUT) as gate, scene.session() as session:
        application = scene.start_application(create(scene), create(scene), STORE_TIMEOUT=0.5)
        gate.wait()
        session.execute("SELECT FROM knowledge_spaces FOR UPDATE")  # its second call comes no further meanwhile
        scene.wait_until(lambda: application.answers, "the first call is over", application)
        assert application.answers == [{"error": "StoreUnavailable"}]
        scene.recover()
        stage.check()
        gate.open()
        scene.wait_until(lambda: len(list(scene.store.list())) == SOURCES + 1, "it is written", application)
        assert check_invariants(ALIAS, scene.store)
        scene.recover()
        stage.check()
    assert application.wait() == CLEAN, application.printed
    scene.recover()
    stage.check()


def freeze(scene: Scene, writer: Writer) -> Worker:
    """Return a writer that is past its check, and frozen; its ref is given up, and its own watch does not know."""
    with scene.gate(IN_PUT) as gate:
        frozen = writer.start()
        gate.wait()
        frozen.freeze()
        gate.open()
    writer.give_up()
    return frozen


def wake(frozen: Worker, writer: Writer) -> None:
    """Let it go on, to its end."""
    frozen.send(signal.SIGCONT)
    assert frozen.wait() == CLEAN, frozen.printed
    assert frozen.answers == writer.answers[1]

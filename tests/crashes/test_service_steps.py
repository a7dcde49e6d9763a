"""An application that is killed at a known step of a create or a rotate: all or nothing of it took place."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, product
from typing import Any
from uuid import uuid4

import pytest

from tests.crashes.scene import Call, Scene
from tests.crashes.stores import AFTER_PUT, BEFORE_CHECK, BEFORE_PUT, IN_PUT
from tests.crashes.workers import Worker

LEDGER = "source_secret_lifecycle_refs"
OBJECTS = "kfs_credentials_secret_object"

# What a call writes, in order, and how a trigger knows it: event, table, condition.
WRITES = {
    "create_source": {
        "reserve": ("INSERT", LEDGER, "NEW.state = 'staged'"),
        "reserve, the last table": ("INSERT", OBJECTS, ""),
        "insert": ("INSERT", "sources", ""),
        "activate": ("UPDATE", LEDGER, "NEW.state = 'active'"),
    },
    "rotate_credentials": {
        "reserve": ("INSERT", LEDGER, "NEW.state = 'staged'"),
        "reserve, the last table": ("INSERT", OBJECTS, ""),
        "point": ("UPDATE", "sources", "NEW.credential_ref <> OLD.credential_ref"),
        "activate": ("UPDATE", LEDGER, "NEW.state = 'active'"),
        "retire": ("UPDATE", LEDGER, "NEW.state = 'retired'"),
    },
}
COMMITS = ("reserve", "activate")
"""The steps whose transactions are different ones."""
PLACES = (BEFORE_PUT, BEFORE_CHECK, IN_PUT, AFTER_PUT)

every_function = pytest.mark.parametrize("function", WRITES)
AGAIN = (False, True)
"""Whether the call is repeated afterwards, as the same operation, or given up."""


class Story:
    """Calls of one function, each of which may be killed, and the credentials that sources must have after them."""

    def __init__(self, scene: Scene, function: str) -> None:
        self.scene = scene
        self.function = function
        self.values: dict[tuple[str, str], Mapping[str, Any] | None] = {}
        self._numbers = count()
        scene.execute("DELETE FROM sources")
        ((self.tenant, self.space),) = scene.rows(
            "SELECT tenant_id, id::text FROM knowledge_spaces ORDER BY id LIMIT 1"
        )

    def prepare(self) -> None:
        """Choose a source, and for a rotate let it be there."""
        self.source = str(uuid4())
        self.operation = f"operation-{next(self._numbers)}"
        self.before: Mapping[str, Any] | None = None
        if self.function == "rotate_credentials":
            self.before = self._value()
            self.scene.call(self._create(self.before))
        self.after = self._value()

    def begin(self) -> Worker:
        """Start an application that makes the call."""
        return self.scene.start_application(self._call())

    def end(self, *, took_place: bool, again: bool) -> None:
        """Note what the source must have now; let another application make the same call, if `again`."""
        self.scene.check_always()
        self.values[self.tenant, self.source] = self.after if took_place or again else self.before
        if again:
            version = 1 if self.before is None else 2
            (answer,) = self.scene.call(self._call())
            assert (answer["source"], answer["version"]) == (self.source, version), "not done exactly once"
            self.scene.check_always()

    def check(self) -> None:
        """After recovery and cleanup: nothing is lost, and nothing is left."""
        self.scene.recover()
        self.scene.check_cleaned()
        self.scene.check_values(self.values)
        there = sum(value is not None for value in self.values.values())
        assert self.scene.value("SELECT count(credential_ref) FROM sources") == there

    def _call(self) -> Call:
        if self.function == "create_source":
            return self._create(self.after, operation_id=self.operation)
        arguments = {"tenant": self.tenant, "source_id": self.source, "credentials": self.after}
        return "rotate_credentials", {**arguments, "operation_id": self.operation}

    def _create(self, credentials: Mapping[str, Any], **more: str) -> Call:
        place = {"tenant": self.tenant, "space_id": self.space, "source_id": self.source}
        what = {"type": "online_drive", "name": "Made up", "uri": "", "credentials": credentials}
        return "create_source", {**place, **what, **more}

    def _value(self) -> Mapping[str, Any]:
        return {"token": f"made-up-{next(self._numbers)}"}


@pytest.mark.long
@every_function
def test_killed_in_a_statement(scene: Scene, function: str) -> None:
    story = Story(scene, function)
    for (event, table, condition), again in product(WRITES[function].values(), AGAIN):
        story.prepare()
        with scene.held_up(event, table, condition=condition) as hold_up:
            application = story.begin()
            backend = hold_up.wait(application)
            application.kill()
            hold_up.let_go()
            scene.wait_for_end_of(backend)
        story.end(took_place=False, again=again)
    story.check()


@pytest.mark.parametrize("commit", [pytest.param("rolled back", marks=pytest.mark.long), "carried out", "answered"])
@every_function
def test_killed_in_the_commit_and_after_it(scene: Scene, function: str, commit: str) -> None:
    """Under way when the application dies, it may take place or not; answered, the answer may not have been read."""
    story = Story(scene, function)
    for step, again in product(COMMITS, AGAIN):
        story.prepare()
        event, table, condition = WRITES[function][step]
        with scene.held_up(event, table, condition=condition, commit=True) as hold_up:
            application = story.begin()
            backend = hold_up.wait(application)
            assert scene.value("SELECT query FROM pg_stat_activity WHERE pid = %s", [backend]) == "COMMIT"
            if commit == "answered":
                application.freeze()
                hold_up.let_go()
                scene.wait_until_idle(application)
            application.kill()
            if commit == "carried out":
                hold_up.let_go()
            elif commit == "rolled back":
                scene.terminate(backend)
            scene.wait_for_end_of(backend)
        story.end(took_place=commit != "rolled back" and step == "activate", again=again)
    story.check()


@every_function
def test_killed_in_the_put(scene: Scene, function: str) -> None:
    story = Story(scene, function)
    for place, again in product(PLACES, AGAIN):
        story.prepare()
        with scene.gate(place) as gate:
            application = story.begin()
            gate.wait()
            application.kill()
        story.end(took_place=False, again=again)
    story.check()

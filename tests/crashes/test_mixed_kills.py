"""Applications, backfills and cleanups beside each other, killed or cut off from the database at random moments.

No secret is lost whose create or rotate was acknowledged, and nothing is done that was refused.

KFS_CRASHES=200 pytest tests/crashes/test_mixed_kills.py
"""

from __future__ import annotations

import random
import signal
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from tests.crashes.application import UNANSWERED
from tests.crashes.kills import ENDED, LIFE, ROUNDS, was_killed
from tests.crashes.scene import CLEAN, LATE, ORPHANED, OUT_OF_REACH, Call, Scene
from tests.crashes.workers import Worker

TENANT = "a tenant"
CALLS = 60
"""How many calls an application makes, unless it is killed before."""

GONE = "SourceNotFound"
REVOKED = "NoCredentials"
"""What `resolve_credentials` answers where there is nothing to resolve."""
GIVEN_UP = "OperationOver"
"""What an application is told if its reservation was taken back meanwhile."""

CUT_OFF = (*ENDED, OUT_OF_REACH)
"""Exit codes of a worker that has ended; the last one if it was cut off before it had begun."""

Value = str
"""The credentials' only member, or one of these."""


class Memory:
    """What each source must be: `values` has all that it may be, more than one where a call was cut off."""

    def __init__(self, space: str) -> None:
        self.space = space
        self.values: dict[str, set[Value]] = {}
        self.free: set[str] = set()
        """Sources that no application is at work on, of those that may be there."""
        self.acknowledged = 0
        self.cut_off = 0

    def add(self, source: str, value: Value) -> None:
        """Note a source that is there."""
        self.values[source] = {value}
        self.free.add(source)

    def take(self) -> list[str]:
        """Let one application have half of the free sources, so that nobody else changes them."""
        taken = random.sample(sorted(self.free), len(self.free) // 2)
        self.free.difference_update(taken)
        return taken


class Application:
    """A process that calls the services, each call chosen at random beforehand, on sources of its own."""

    def __init__(self, scene: Scene, memory: Memory) -> None:
        self.memory = memory
        self.sources = memory.take()
        self.plan: list[tuple[str, Value | None]] = []
        """For each call: the source, and what it must be afterwards; None if the call changes nothing."""
        calls = [self._call() for _ in range(CALLS)]
        self.process = scene.start_application(*calls)

    def settle(self) -> None:
        """Note what became of the calls, once the process has ended; all but one are certain."""
        answers = self.process.answers
        for (source, value), answer in zip(self.plan, answers, strict=False):
            self._note(source, value, answer)
        cut_off = None
        if len(answers) < len(self.plan):
            cut_off, value = self.plan[len(answers)]
            if value is not None:
                self.memory.values.setdefault(cut_off, {GONE}).add(value)
                self.memory.cut_off += 1
        own = {*self.sources, *(source for source, _ in self.plan)} & self.memory.values.keys()
        self.memory.free |= {source for source in own if self.memory.values[source] != {GONE}} - {cut_off}

    def _note(self, source: str, value: Value | None, answer: dict[str, Any]) -> None:
        values = self.memory.values.setdefault(source, {GONE})
        error = answer.get("error")
        if value is None:
            assert error == UNANSWERED or (error or answer["credentials"]["token"]) in values, source
        elif error is None:
            values.clear()
            values.add(value)
            self.memory.acknowledged += 1
        elif error == UNANSWERED:
            values.add(value)
            self.memory.cut_off += 1
        else:
            # Whatever is refused has not taken place.
            assert error == GIVEN_UP or GONE in values, (source, error)

    def _call(self) -> Call:
        kinds = [self._create, self._rotate, self._resolve, self._revoke, self._delete]
        return random.choices(kinds, [25, 35, 25, 5, 10])[0]()

    def _create(self) -> Call:
        source, value = str(uuid4()), str(uuid4())
        self.sources.append(source)
        what = {"type": "online_drive", "name": "Made up", "uri": "", "credentials": {"token": value}}
        place = {"space_id": self.memory.space, "source_id": source}
        return self._planned("create_source", source, value, **place, **what)

    def _rotate(self) -> Call:
        if not self.sources:
            return self._create()
        source, value = random.choice(self.sources), str(uuid4())
        return self._planned("rotate_credentials", source, value, source_id=source, credentials={"token": value})

    def _resolve(self) -> Call:
        if not self.sources:
            return self._create()
        source = random.choice(self.sources)
        return self._planned("resolve_credentials", source, None, source_id=source)

    def _revoke(self) -> Call:
        if not self.sources:
            return self._create()
        source = random.choice(self.sources)
        return self._planned("revoke_credentials", source, REVOKED, source_id=source)

    def _delete(self) -> Call:
        if not self.sources:
            return self._create()
        source = self.sources.pop(random.randrange(len(self.sources)))
        return self._planned("delete_source", source, GONE, source_id=source)

    def _planned(self, function: str, source: str, value: Value | None, **arguments: Any) -> Call:
        self.plan.append((source, value))
        return function, {"tenant": TENANT, **arguments}


class Crew:
    """Two applications, a backfill and two cleanups."""

    def __init__(self, scene: Scene, memory: Memory) -> None:
        self.scene = scene
        self.memory = memory
        self.applications: list[Application] = []
        self.workers: list[Worker] = []
        self.fill_up()

    def fill_up(self) -> None:
        """Let there be all of them."""
        for application in [one for one in self.applications if one.process.is_over]:
            self._settle(application)
        while len(self.applications) < 2:
            self.applications.append(Application(self.scene, self.memory))
        starts = [
            partial(self.scene.start, "--watch", BATCH_SIZE=random.randint(1, 4)),
            partial(self.scene.start_cleanup, "--watch", BATCH_SIZE=random.randint(1, 4), RECOVER_AFTER=0.2),
            partial(self.scene.start_cleanup, BATCH_SIZE=random.randint(1, 4)),
        ]
        for place, start in enumerate(starts):
            if place == len(self.workers):
                self.workers.append(start())
            elif self.workers[place].is_over:
                assert self.workers[place].wait() in (-signal.SIGKILL, *CUT_OFF), self.workers[place].printed
                self.workers[place] = start()

    def kill_one(self) -> bool:
        """Kill one of them at a random moment; return False if it has ended before."""
        victim = random.choice([*(one.process for one in self.applications), *self.workers])
        if victim.is_over:
            return False
        if self.scene.comes_to_work(victim):
            victim.ends_within(random.uniform(0, LIFE))
        return was_killed(victim, CUT_OFF)

    def _settle(self, application: Application) -> None:
        assert application.process.wait() in (-signal.SIGKILL, CLEAN), application.process.printed
        application.settle()
        self.applications.remove(application)

    def end(self) -> None:
        """Let the applications come to their ends, and kill the others."""
        for application in list(self.applications):
            self._settle(application)
        for worker in self.workers:
            if not worker.is_over:
                was_killed(worker, CUT_OFF)


@pytest.mark.parametrize("kills", ROUNDS)
def test_killed_at_random(scene: Scene, kills: int) -> None:
    """Legacy sources appear all the while, and others are deleted by somebody who tells nobody."""
    scene.settings |= {"LEASE": 1, "MAX_ATTEMPTS": 50}
    scene.database["CONN_MAX_AGE"] = None
    scene.execute("DELETE FROM sources")
    (space,) = scene.new_spaces(TENANT, 1)
    memory = Memory(space)
    crew = Crew(scene, memory)
    killed = 0
    while killed < kills:
        for source in scene.new_legacy_sources(space, 3):
            memory.add(source, source)
        if memory.free:
            source = random.choice(sorted(memory.free))
            scene.execute("DELETE FROM sources WHERE id = %s", [source])
            memory.free.remove(source)
            memory.values[source] = {GONE}
        killed += crew.kill_one()
        scene.check_meanwhile(ORPHANED, LATE)
        if random.random() < 0.3:
            scene.terminate_all()
        if random.random() < 0.2:
            scene.expire_reservations()  # those of living writers too: they are told
        crew.fill_up()
    crew.end()
    scene.expire_leases()
    scene.drain(CLEAN)
    scene.recover()
    scene.check_cleaned()
    check_values(scene, memory)


def check_values(scene: Scene, memory: Memory) -> None:
    """Every source is what it must be, as an application reads it."""
    calls = [("resolve_credentials", {"tenant": TENANT, "source_id": source}) for source in memory.values]
    found = [answer.get("error") or answer["credentials"]["token"] for answer in scene.call(*calls)]
    wrong = [
        (source, there, values)
        for (source, values), there in zip(memory.values.items(), found, strict=True)
        if there not in values
    ]
    assert wrong == []
    assert memory.acknowledged > memory.cut_off

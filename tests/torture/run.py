"""Rounds of torture on one database and store, one after the other, and what comes of each.

A round: everybody works on the same sources, and is killed, frozen or cut off at random moments and at each step; now
and then connections are ended, reservations run out, keys are changed, and once the server crashes. Then nothing
befalls anybody any more: all are killed, applications do again what was not answered, and one backfill, one cleanup and
an operator do what is left. The judge looks at everything, and the next round begins with what is there.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.conf import settings as django_settings
from django.db import connections

from tests.crashes.database import ALIAS
from tests.crashes.scene import BOTH, DANGLING, LATE, ORPHANED, UNDATED
from tests.invariants import check_invariants
from tests.torture.crew import Crew, Odds
from tests.torture.judge import Judge, Verdict
from tests.torture.keys import Keys
from tests.torture.memory import Memory
from tests.torture.old_application import OldApplication
from tests.torture.proxy import Proxy

if TYPE_CHECKING:
    from example_project import postgres
    from tests.crashes.scene import Scene

SPACES, SHARED, PER_SPACE = 8, 2, 6
MOST_SOURCES = 120
"""With more than that nothing is added by the old application."""
MEANWHILE = (ORPHANED, DANGLING, LATE, BOTH, UNDATED)
"""What may be found at any moment: it is for the next sweep or patrol, or for a person."""
STRIKES, ACTS = 2, 6
"""How many are struck, and how much the old application does, from one pause to the next."""
PAUSE = 0.03
"""Seconds of a pause, at most."""


class Torture:
    """All of it; `counts` has how much there was of what."""

    def __init__(self, scene: Scene, server: postgres.Server) -> None:
        self.scene = scene
        self.server = server
        self.memory = Memory()
        self.keys = Keys()
        self.old = OldApplication(scene, self.memory)
        self.judge = Judge(scene, self.memory)
        self.counts: Counter[str] = Counter()
        self.crew = Crew(scene, self.memory, self.keys)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let there be spaces, sources, and the way by the proxy."""
        self._take_keys()
        for _ in range(SPACES):
            self.old.add_space(PER_SPACE)
        for _ in range(SHARED):
            self.old.add_space(PER_SPACE, shared=True)
        path = f"{self.server.socket_directory}/.s.PGSQL.{self.server.port}"
        with Proxy(path, self.crew.decide, self.crew.act) as proxy:
            self.crew.tcp = {"HOST": "127.0.0.1", "PORT": str(proxy.port), "OPTIONS": {"sslmode": "disable"}}
            yield

    def round(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> Verdict:
        """Make one round of so many seconds, or until there is `enough`; return what the judge says."""
        self.crew.odds = Odds()
        until = time.monotonic() + seconds
        crashes_at = time.monotonic() + random.uniform(0.2, 0.8) * seconds
        self.crew.fill_up()
        while time.monotonic() < until and not enough():
            self._befall()
            if time.monotonic() > crashes_at:
                crashes_at = until
                self._crash_server()
            self.crew.wake()
            self.crew.fill_up()
            self._change_keys()
            time.sleep(random.uniform(0, PAUSE))
        self.check_meanwhile()
        return self._end()

    def _befall(self) -> None:
        for _ in range(ACTS):
            self.old.act()
        if len(self.memory.free) < 2 or sum(map(len, self.memory.spaces.values())) < MOST_SOURCES:
            self.old.add_space(PER_SPACE)
        for _ in range(STRIKES):
            self.crew.strike()
        if random.random() < 0.02:
            self.scene.terminate_all()
            self.counts["terminations"] += 1
        if random.random() < 0.02:
            with self.old.briefly():
                self.scene.expire_reservations()

    def _crash_server(self) -> None:
        self.server.restart("immediate")
        connections[ALIAS].close()
        self.counts["crashes"] += 1

    def _change_keys(self) -> None:
        before = self.keys.generation
        self.keys.change(min((process.generation for process in self.crew.processes), default=before))
        if self.keys.generation != before:
            self._take_keys()

    def _take_keys(self) -> None:
        """Let this process have the keys of those that are started now."""
        configured: Mapping[str, Any] = django_settings.KFS_CREDENTIALS
        django_settings.KFS_CREDENTIALS = {**configured, "KEYS": self.keys.ring}
        self.scene.keys = self.keys.ring

    def check_meanwhile(self) -> None:
        """What is true at any moment is true now: everybody is frozen, so that it is one moment."""
        alive = [process.worker for process in self.crew.processes if not process.worker.is_over]
        for worker in alive:
            self.crew.signal(worker, signal.SIGSTOP)
        for worker in alive:
            worker.wait_until_frozen()
        found = [what for what in check_invariants(ALIAS, self.scene.store) if not what.startswith(MEANWHILE)]
        self.memory.lost += found
        self.crew.wake(all_of_them=True)

    def _end(self) -> Verdict:
        self.crew.odds = Odds(0, 0, 0)
        self.crew.end()
        self.crew.settle_doubts()
        self.judge.finish()
        verdict = self.judge.verdict()
        verdict.leaked.extend(self.crew.leaked)
        verdict.failed.extend(self.crew.wrong)
        self.crew.leaked, self.crew.wrong = [], []
        return verdict

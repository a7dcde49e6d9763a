"""All processes: how they are started, found out about, killed and frozen, and what they may end with."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.crashes.workers import MANAGE, Worker
from tests.torture.applications import CALLS, Application, Planned
from tests.torture.judge import quotes
from tests.torture.proxy import CUTS, FREEZES, KILLS, Fate
from tests.torture.store import HERE
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.crashes.scene import Scene
    from tests.torture.keys import Keys
    from tests.torture.memory import Memory

PERFORM = "tests.torture.applications.perform"
STORE = "tests.torture.store.TorturedStore"

REFUSED = 1
"""The exit code of a process that does not begin, for one of the `REASONS`."""
REASONS = ("is closed", "Another reencrypt_secrets is at work")
MAY_END = (0, 3, 4, 5)
"""Exit codes of others: the last one of one that never got through to the database."""

BACKFILLS, CLEANUPS, APPLICATIONS = 2, 3, 3
LIFE = 0.5
"""Seconds that a process is left alone at first, at most: else few would come far."""
A_WHILE, MOST_FROZEN = 0.4, 2.5
"""Seconds that a process stays frozen: less than a lease, or longer than that, some reservations and some deadlines."""


@dataclass
class Odds:
    """How likely what is, each time that there is an occasion."""

    at_step: float = 0.03
    """To be killed at one step in the store; half as likely to be frozen."""
    at_commit: float = 0.03
    """Each of the things that can happen to a COMMIT."""
    at_message: float = 0.0005
    """To be cut off at any other message."""

    def of_message(self, *, is_commit: bool) -> Fate:
        """Return what happens to a message of a connection."""
        if not is_commit:
            return Fate.CUT if random.random() < self.at_message else Fate.NOTHING
        fates = [*KILLS, *FREEZES, *CUTS]
        place = int(random.random() / self.at_commit) if self.at_commit else len(fates)
        return fates[place] if place < len(fates) else Fate.NOTHING


@dataclass
class Process:
    """One of them; `application` if it is one."""

    worker: Worker
    generation: int
    """Of the keys that it has."""
    application: Application | None = None
    started_at: float = field(default_factory=time.monotonic)
    wakes_at: float | None = None
    """When it goes on; None if it is not frozen, as far as is known."""


@dataclass
class Crew:
    """Whoever is at work. `tcp`: the way to the database by the proxy, on top of the scene's own."""

    scene: Scene
    memory: Memory
    keys: Keys
    tcp: dict[str, Any] = field(default_factory=dict)
    odds: Odds = field(default_factory=Odds)
    processes: list[Process] = field(default_factory=list)
    doubts: list[Planned] = field(default_factory=list)
    """Calls over which an application died."""
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Processes that ended as none should, in sentences."""
    leaked: list[str] = field(default_factory=list)
    """Processes that have printed a value."""

    def __post_init__(self) -> None:
        # The proxy signals from a thread of its own; a handle that is closed may be another process's by then.
        self._signalling = threading.Lock()

    # Starting.

    def fill_up(self) -> None:
        """Let there be all of them, in the place of those that are over."""
        self.reap()
        roles = Counter(self._role(process) for process in self.processes)
        for role, number in (("backfill", BACKFILLS), ("cleanup", CLEANUPS), ("application", APPLICATIONS)):
            for _ in range(number - roles[role]):
                self._start(role)
        if self.keys.wants_run and not roles["reencryption"]:
            self._start("reencryption")

    def _role(self, process: Process) -> str:
        return process.worker.name.split("-")[0]

    def _start(self, role: str) -> None:
        if role == "application":
            self._start_application()
            return
        size = ["--batch-size", str(random.choice([1, 2, 3, 20]))]
        watch = ["--watch"] if random.random() < 0.7 else []
        commands = {
            "backfill": ["run_credential_backfill", *watch, *size],
            "cleanup": ["run_secret_cleanup", *watch, *size],
            "reencryption": ["reencrypt_secrets", *size],
        }
        self.processes.append(Process(self._fork(role, MANAGE, commands[role]), self.keys.generation))

    def _start_application(self, calls: int = CALLS) -> None:
        again = self.doubts.pop(0) if self.doubts else None
        spaces = random.sample(sorted(self.memory.free), min(2, len(self.memory.free)))
        if again is not None:
            spaces = [again.space, *spaces[:1]]
        spaces = list({*spaces, random.choice(sorted(self.memory.shared))})
        application = Application(self.memory, spaces, again, calls)
        worker = self._fork("application", PERFORM, application.order)
        self.processes.append(Process(worker, self.keys.generation, application))

    def _fork(self, role: str, function: str, arguments: Any) -> Worker:
        kill = self.odds.at_step
        way = self.tcp if random.random() < 0.7 else {}
        return self.scene.fork(
            role,
            function,
            arguments,
            store=(STORE, {"kill": kill, "freeze": kill / 2}),
            database=way,
            settings={
                "KEYS": self.keys.ring,
                "ERASE_GRACE": random.choice([0, 0.5, 2]),
                "LATE_WRITE_HORIZON": random.choice([0, 0.5]),
                "LEDGER_RETENTION": random.choice([0, 60]),
                "RECOVER_AFTER": random.choice([0.3, 1, 5]),
                "STORE_TIMEOUT": random.choice([1, 5]),
            },
        )

    # What befalls them.

    def strike(self) -> None:
        """Let one of them have lived for long enough: kill it, most of the time, or freeze it for a while."""
        old = time.monotonic() - random.uniform(0, LIFE)
        alive = [one for one in self.processes if one.started_at < old and not one.worker.is_over]
        if not alive:
            return
        process = random.choice(alive)
        if random.random() < 0.8:
            self.signal(process.worker, signal.SIGKILL)
        else:
            self.signal(process.worker, signal.SIGSTOP)

    def decide(self, name: str, is_commit: bool) -> Fate:
        """Return what happens to a message that the process of this name sends."""
        fate = self.odds.of_message(is_commit=is_commit)
        if fate is not Fate.NOTHING:
            self.counts[f"{fate.value} {'COMMIT' if is_commit else 'another message'}"] += 1
        return fate

    def act(self, name: str, fate: Fate) -> None:
        """Do what the proxy says to a process."""
        for process in list(self.processes):
            if process.worker.name == name:
                self.signal(process.worker, signal.SIGKILL if fate in KILLS else signal.SIGSTOP)

    def signal(self, worker: Worker, number: signal.Signals) -> None:
        """Send a signal, unless the process is over and was seen to be."""
        with self._signalling:
            if worker.code is None:
                with suppress(ProcessLookupError):
                    worker.send(number)

    def wake(self, *, all_of_them: bool = False) -> None:
        """Let those go on that were frozen for long enough, by whomever."""
        now = time.monotonic()
        for process in self.processes:
            if process.worker.is_over:
                continue
            if process.wakes_at is None and process.worker.is_frozen:
                process.wakes_at = now + random.uniform(0, random.choice([A_WHILE, MOST_FROZEN]))
                self.counts["freezes"] += 1
            if process.wakes_at is not None and (all_of_them or now >= process.wakes_at):
                process.wakes_at = None
                self.signal(process.worker, signal.SIGCONT)

    # How they end.

    def reap(self) -> None:
        """Note what became of those that are over."""
        for process in [process for process in self.processes if process.worker.is_over]:
            self.processes.remove(process)
            with self._signalling:
                code = process.worker.wait()
            self.counts["kills" if code == -signal.SIGKILL else "ends"] += 1
            if process.application is not None:
                self._settle(process.application, process.worker)
            if code == 0 and self._role(process) == "reencryption":
                self.keys.run_came_to_its_end(process.generation)
            self._judge(process.worker, code)

    def _settle(self, application: Application, worker: Worker) -> None:
        application.settle(worker.answers)
        if application.in_doubt is not None:
            self.doubts.append(application.in_doubt)
        self.counts["calls"] += application.acknowledged
        self.counts["refused"] += application.refused
        self.counts["retries"] += application.tried_again

    def _judge(self, worker: Worker, code: int) -> None:
        """Count where it was struck, and note it if it has ended as none should."""
        self.counts.update(line for line in worker.printed.splitlines() if line.startswith(HERE))
        if quotes(worker.printed, answers=worker.name.startswith("application")):
            self.leaked.append(f"{worker.name} has printed a value")
        refused = code == REFUSED and any(reason in worker.printed for reason in REASONS)
        if "Traceback" in worker.printed or (code not in (-signal.SIGKILL, *MAY_END) and not refused):
            self.wrong.append(f"{worker.name} ended with {code}:\n{worker.printed}")
        else:
            self.scene.forget(worker)

    def end(self) -> None:
        """Kill all of them."""
        for process in self.processes:
            self.signal(process.worker, signal.SIGKILL)
        for process in self.processes:
            process.worker.ends_within(PATIENCE)
        self.reap()

    def settle_doubts(self) -> None:
        """Let each call be made again over which an application died; nothing befalls anybody."""
        deadline = time.monotonic() + PATIENCE
        while self.doubts or self.processes:
            if time.monotonic() > deadline:
                self.wrong.append(f"{len(self.doubts)} calls are still not answered, though nothing befalls anybody")
                self.end()
                self.doubts.clear()
                return
            if self.doubts:
                self._start_application(calls=1)
            for process in self.processes:
                process.worker.ends_within(PATIENCE)
            self.reap()

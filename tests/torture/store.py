"""The encrypted store, in which its own process dies or freezes now and then, at any step of a call."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from typing import Any

from kfs_credentials.stores import Address, Resealed
from kfs_credentials.stores.calls import Deadline
from kfs_credentials.stores.outcomes import Outcomes
from kfs_credentials.stores.values import Probe
from tests.crashes.stores import AFTER_REPLACE, BEFORE_REPLACE, SteppedStore

BEFORE_PROBE = "before-probe"
AFTER_PROBE = "after-probe"

HERE = "killed or frozen "
"""What a process writes at the step at which it stands: this, and the place."""

dice = random.SystemRandom()
"""Not the module's own: a process that is forked has the state of the one that forked it."""


class TorturedStore(SteppedStore):
    """`kill`, `freeze`: how likely each of the two is, at each step."""

    def __init__(self, storage: dict[str, Any], *, kill: float, freeze: float) -> None:
        super().__init__(storage)
        self.kill = kill
        self.freeze = freeze

    def at(self, place: str) -> None:
        """Come to a step of a call, and perhaps no further."""
        chance = dice.random()
        if chance < self.kill + self.freeze:
            # Written at once, whatever else this process has still to print: there may be no time for that.
            os.write(1, f"{HERE}{place}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL if chance < self.kill else signal.SIGSTOP)

    def first_visible(self, number: int) -> int:
        """Return how many of `number` secrets are visible at `IN_PUT`: any number."""
        return dice.randint(0, max(0, number - 1))

    def first_gone(self, number: int) -> int:
        """Return how many of `number` objects are gone at `IN_DELETE`: any number."""
        return dice.randint(0, number)

    def _replace_many(
        self, addresses: Sequence[Address], *, rewritten: dict[int, Resealed], deadline: Deadline
    ) -> Outcomes[Resealed]:
        self.at(BEFORE_REPLACE)
        stepped = self.stepped(deadline, len(addresses))
        outcomes = super()._replace_many(addresses, rewritten=rewritten, deadline=stepped)
        self.at(AFTER_REPLACE)
        return outcomes

    def _replace_probe(self, probe: Probe, *, deadline: Deadline) -> None:
        self.at(BEFORE_PROBE)
        super()._replace_probe(probe, deadline=self.stepped(deadline, 1))
        self.at(AFTER_PROBE)

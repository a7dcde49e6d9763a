"""The encrypted store, in which its own process dies or freezes now and then, at any step of a call."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from typing import Any

from kfs_credentials.stores import Address, Entry, Receipt, Resealed
from kfs_credentials.stores.base import Deadline, Outcomes, Probe
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.crashes.stores import (
    AFTER_DELETE,
    AFTER_LIST,
    AFTER_PUT,
    AFTER_REPLACE,
    BEFORE_DELETE,
    BEFORE_PUT,
    BEFORE_REPLACE,
    IN_DELETE,
    GatedDeadline,
)

AFTER_READ_BACK = "after-read-back"
BEFORE_PROBE = "before-probe"
AFTER_PROBE = "after-probe"

HERE = "killed or frozen "
"""What a process writes at the step at which it stands: this, and the place."""

dice = random.SystemRandom()
"""Not the module's own: a process that is forked has the state of the one that forked it."""


class TorturedStore(EncryptedStore):
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

    def _watched(self, deadline: Deadline, number: int) -> Deadline:
        """Return a deadline that stops before the first thing becomes visible, and once more among `number` of them."""
        return GatedDeadline(deadline, self.at, dice.randint(1, max(1, number)))

    def _put_many(self, entries: Sequence[Entry], *, deadline: Deadline) -> Outcomes[Receipt]:
        self.at(BEFORE_PUT)
        outcomes = super()._put_many(entries, deadline=self._watched(deadline, len(entries)))
        self.at(AFTER_PUT)
        return outcomes

    def _read_back(
        self, entries: Sequence[Entry], receipts: Sequence[Receipt], *, deadline: Deadline
    ) -> Outcomes[Receipt]:
        outcomes = super()._read_back(entries, receipts, deadline=deadline)
        self.at(AFTER_READ_BACK)
        return outcomes

    def _delete_many(self, addresses: Sequence[Address], *, deadline: Deadline) -> Outcomes[bool]:
        self.at(BEFORE_DELETE)
        gone = dice.randint(0, len(addresses))
        outcomes = super()._delete_many(addresses[:gone], deadline=deadline) if gone else []
        self.at(IN_DELETE)
        # Without another look at the deadline, as the store itself goes on.
        outcomes += self.storage.remove_many([self._name(address) for address in addresses[gone:]])
        self.at(AFTER_DELETE)
        return outcomes

    def _replace_many(self, addresses: Sequence[Address], *, deadline: Deadline) -> Outcomes[Resealed]:
        self.at(BEFORE_REPLACE)
        outcomes = super()._replace_many(addresses, deadline=self._watched(deadline, len(addresses)))
        self.at(AFTER_REPLACE)
        return outcomes

    def _replace_probe(self, probe: Probe, *, deadline: Deadline) -> None:
        self.at(BEFORE_PROBE)
        super()._replace_probe(probe, deadline=self._watched(deadline, 1))
        self.at(AFTER_PROBE)

    def _list(self, after: str, *, deadline: Deadline) -> Sequence[str]:
        names = super()._list(after, deadline=deadline)
        self.at(AFTER_LIST)
        return names

"""The encrypted store, with gates at which a test can hold a worker up in a put, and a value that kills it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kfs_credentials.stores import Entry, Receipt
from kfs_credentials.stores.base import Deadline, Outcomes
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.crashes.gates import pass_gate

BEFORE_PUT = "before-put"
IN_PUT = "in-put"
AFTER_PUT = "after-put"

VISIBLE_AT_GATE = 2
"""How many secrets of a batch are visible, and not yet durable, at the gate `IN_PUT`."""


class GatedStore(EncryptedStore):
    """`gates`: the directory of the gates. `poison`: a text; a worker that is to put it dies on the spot."""

    def __init__(self, storage: dict[str, Any], *, gates: str, poison: str | None = None) -> None:
        super().__init__(storage)
        self.gates = Path(gates)
        self.poison = poison

    def _put_many(self, entries: Sequence[Entry], *, deadline: Deadline) -> Outcomes[Receipt]:
        if self.poison and any(self.poison.encode() in entry.plaintext.exact for entry in entries):
            os.kill(os.getpid(), signal.SIGKILL)
        pass_gate(self.gates, BEFORE_PUT)
        outcomes = super()._put_many(entries, deadline=GatedDeadline(deadline, self.gates))
        pass_gate(self.gates, AFTER_PUT)
        return outcomes


class GatedDeadline(Deadline):
    """A deadline with a gate: it is checked right before each secret becomes visible."""

    def __init__(self, deadline: Deadline, gates: Path) -> None:
        super().__init__(deadline.seconds, deadline.guard)
        self.at = deadline.at
        self.gates = gates
        self.checks = 0

    def check(self) -> None:
        """Check, then wait at the gate: whoever is frozen there has passed the check, and makes its secret visible."""
        super().check()
        self.checks += 1
        if self.checks == VISIBLE_AT_GATE + 1:
            pass_gate(self.gates, IN_PUT)

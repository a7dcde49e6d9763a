"""The encrypted store, with places at which a test can have something happen: gates, and a value that kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kfs_credentials.conf import key_ring
from kfs_credentials.crypto import Credentials, Plaintext, seal
from kfs_credentials.stores import Address, Entry, Receipt, Resealed
from kfs_credentials.stores.calls import Deadline
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.stores.outcomes import Outcomes
from tests.crashes.gates import pass_gate

BEFORE_PUT = "before-put"
BEFORE_CHECK = "before-check"
"""All is written, nothing is visible, and the deadline and the lease are still to be checked."""
IN_PUT = "in-put"
"""The check is past, whatever happens now: what waits here becomes visible, however late."""
AFTER_PUT = "after-put"
"""All is durable, and was read back."""

BEFORE_DELETE = "before-delete"
IN_DELETE = "in-delete"
"""The check is past, the first objects are gone, and the others go, however late."""
AFTER_DELETE = "after-delete"

BEFORE_REPLACE = "before-replace"
IN_REPLACE = "in-replace"
"""Half of a batch is replaced; the other half is sealed, and replaces what is there by then, however late."""
AFTER_REPLACE = "after-replace"

AFTER_LIST = "after-list"

VISIBLE_AT_GATE = 2
"""How many secrets of a batch are visible, and not yet durable, at the gate `IN_PUT`; of a single one, none."""
GONE_AT_GATE = 2
"""How many objects of a batch are gone at the gate `IN_DELETE`; of a single one, none."""


class SteppedStore(EncryptedStore):
    """It comes to a place at each step of its calls, for a test to have something happen there: see `at`."""

    def at(self, place: str) -> None:
        """Come to a place."""
        raise NotImplementedError

    def first_visible(self, number: int) -> int:
        """Return how many of `number` secrets are visible at `IN_PUT`; none or less: it does not come there."""
        return VISIBLE_AT_GATE if number > VISIBLE_AT_GATE else number - 1

    def first_gone(self, number: int) -> int:
        """Return how many of `number` objects are gone at `IN_DELETE`."""
        return min(GONE_AT_GATE, number - 1)

    def stepped(self, deadline: Deadline, number: int) -> Deadline:
        """Return a deadline for `number` of them that comes to places, too."""
        return SteppedDeadline(deadline, self.at, self.first_visible(number) + 1)

    def _put_many(self, entries: Sequence[Entry], *, deadline: Deadline) -> Outcomes[Receipt]:
        self.at(BEFORE_PUT)
        return super()._put_many(entries, deadline=self.stepped(deadline, len(entries)))

    def _read_back(
        self, entries: Sequence[Entry], receipts: Sequence[Receipt], *, deadline: Deadline
    ) -> Outcomes[Receipt]:
        outcomes = super()._read_back(entries, receipts, deadline=deadline)
        if not any(isinstance(receipt, Resealed) for receipt in receipts):
            self.at(AFTER_PUT)
        return outcomes

    def _delete_many(self, addresses: Sequence[Address], *, deadline: Deadline) -> Outcomes[bool]:
        self.at(BEFORE_DELETE)
        gone = self.first_gone(len(addresses))
        outcomes = super()._delete_many(addresses[:gone], deadline=deadline)
        self.at(IN_DELETE)
        # Without another look at the deadline, as the store itself goes on.
        outcomes += self.storage.remove_many([self._name(address) for address in addresses[gone:]])
        self.at(AFTER_DELETE)
        return outcomes

    def _list(self, after: str, *, deadline: Deadline) -> Sequence[str]:
        names = super()._list(after, deadline=deadline)
        self.at(AFTER_LIST)
        return names


class GatedStore(SteppedStore):
    """`gates`: the directory of the gates. `poison`: a text; a worker that is to put it dies on the spot."""

    def __init__(self, storage: dict[str, Any], *, gates: str, poison: str | None = None) -> None:
        super().__init__(storage)
        self.gates = Path(gates)
        self.poison = poison

    def at(self, place: str) -> None:
        """Come to a place: wait if there is a gate."""
        pass_gate(self.gates, place)

    def _put_many(self, entries: Sequence[Entry], *, deadline: Deadline) -> Outcomes[Receipt]:
        if self.poison and any(self.poison.encode() in entry.plaintext.exact for entry in entries):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._put_many(entries, deadline=deadline)

    def _replace_many(
        self, addresses: Sequence[Address], *, rewritten: dict[int, Resealed], deadline: Deadline
    ) -> Outcomes[Resealed]:
        self.at(BEFORE_REPLACE)
        half = len(addresses) // 2
        outcomes: Outcomes[Resealed] = []
        if half:
            outcomes = super()._replace_many(addresses[:half], rewritten=rewritten, deadline=deadline)
        # The others without another look: so does a store that cannot make its writes conditional.
        found = self._get_many(addresses[half:], deadline=Deadline(deadline.seconds))
        files = [
            (self._name(address), seal(key_ring(), address.scope, address.ref, secret))
            for address, secret in zip(addresses[half:], found, strict=True)
            if isinstance(secret, Credentials)
        ]
        deadline.check()
        self.at(IN_REPLACE)
        key_id = key_ring().primary.id
        done = [resealed(key_id, Plaintext.of(one)) if isinstance(one, Credentials) else one for one in found]
        rewritten |= {half + place: one for place, one in enumerate(done) if isinstance(one, Resealed)}
        self.storage.remove_many([name for name, _ in files])
        self.storage.create_many(files)
        outcomes += done
        self.at(AFTER_REPLACE)
        return outcomes


def resealed(key_id: str, plaintext: Plaintext) -> Resealed:
    """Return the receipt of what was sealed anew."""
    return Resealed(key_id, plaintext.size, rewritten=True, plaintext=plaintext)


class SteppedDeadline(Deadline):
    """A deadline that comes to places: it is checked right before each secret becomes visible."""

    def __init__(self, deadline: Deadline, at: Callable[[str], None], stop_at: int) -> None:
        super().__init__(deadline.seconds, deadline.guard, deadline.look)
        self.at = deadline.at
        self._at = at
        self.stop_at = stop_at
        self.checks = 0

    def check(self) -> None:
        """Check; `BEFORE_CHECK` comes before the first time, and `IN_PUT` right after as many as are told."""
        if not self.checks:
            self._at(BEFORE_CHECK)
        super().check()
        self.checks += 1
        if self.checks == self.stop_at:
            self._at(IN_PUT)

"""The gated store, with gates where an application and a look at the probe can be held up too."""

from __future__ import annotations

from collections.abc import Sequence

from kfs_credentials.crypto import Credentials
from kfs_credentials.stores.calls import Deadline
from kfs_credentials.stores.outcomes import Outcomes
from kfs_credentials.stores.values import Address, Probe, Sighting
from tests.crashes.gates import pass_gate
from tests.crashes.stores import GatedStore

BEFORE_GET = "before-get"
BEFORE_PROBE = "before-probe"
BEFORE_NEW_PROBE = "before-new-probe"
BEFORE_LIST = "before-list"


class GatedEverywhere(GatedStore):
    """Every call passes a gate."""

    def _get_many(self, addresses: Sequence[Address], *, deadline: Deadline) -> Outcomes[Credentials]:
        pass_gate(self.gates, BEFORE_GET)
        return super()._get_many(addresses, deadline=deadline)

    def _read_probe(self) -> Sighting:
        pass_gate(self.gates, BEFORE_PROBE)
        return super()._read_probe()

    def _replace_probe(self, probe: Probe, *, deadline: Deadline) -> None:
        pass_gate(self.gates, BEFORE_NEW_PROBE)
        super()._replace_probe(probe, deadline=deadline)

    def _list(self, after: str, *, deadline: Deadline) -> Sequence[str]:
        pass_gate(self.gates, BEFORE_LIST)
        return super()._list(after, deadline=deadline)

"""A store whose client quotes what it was given in each of its errors, as real ones do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kfs_credentials.errors import StoreDenied, StoreUnavailable
from kfs_credentials.stores import Entry, Receipt
from kfs_credentials.stores.base import Deadline, Outcomes
from tests.crashes.stores import GatedStore


class QuotingStore(GatedStore):
    """`fault`: what goes wrong: "unexpected", "denied", or "unavailable", which it is once."""

    def __init__(self, storage: dict[str, Any], *, gates: str, fault: str | None = None) -> None:
        super().__init__(storage, gates=gates)
        self.fault = fault

    def _put_many(self, entries: Sequence[Entry], *, deadline: Deadline) -> Outcomes[Receipt]:
        values = b"&".join(entry.plaintext.exact for entry in entries).decode()
        try:
            self._talk(f"POST https://store.example/put?{values}")
        except PermissionError as error:
            raise StoreDenied("the store does not know this key") from error
        except TimeoutError as error:
            self.fault = None
            raise StoreUnavailable("the store is busy") from error
        return super()._put_many(entries, deadline=deadline)

    def _talk(self, request: str) -> None:
        match self.fault:
            case "denied":
                raise PermissionError(f"403 Forbidden: {request}")
            case "unavailable":
                raise TimeoutError(f"504 Gateway Timeout: {request}")
            case "unexpected":
                raise RuntimeError(f"unexpected answer to {request}", request) from ValueError(request)

"""A store whose client quotes what it was given, and what it has read, in each of its errors, as real ones do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kfs_credentials.crypto import Credentials, Plaintext
from kfs_credentials.errors import StoreDenied, StoreUnavailable
from kfs_credentials.stores import Address, Entry, Receipt, Resealed
from kfs_credentials.stores.calls import Deadline
from kfs_credentials.stores.outcomes import Outcomes
from tests.crashes.stores import GatedStore
from tests.leaks.canary import CANARY, OTHER_CANARY


class QuotingStore(GatedStore):
    """`fault`: what fails, and how: "put denied", "get unexpected", or "delete unavailable", which it is once."""

    def __init__(self, storage: dict[str, Any], *, gates: str, fault: str = "") -> None:
        super().__init__(storage, gates=gates)
        self.fault = fault

    def _put_many(self, entries: Sequence[Entry], *, deadline: Deadline) -> Outcomes[Receipt]:
        self._talk("put", b"&".join(entry.plaintext.exact for entry in entries).decode())
        return super()._put_many(entries, deadline=deadline)

    def _get_many(self, addresses: Sequence[Address], *, deadline: Deadline) -> Outcomes[Credentials]:
        found = super()._get_many(addresses, deadline=deadline)
        read = [Plaintext.of(one).exact.decode() for one in found if isinstance(one, Credentials)]
        self._talk("get", "&".join(read))
        return found

    def _replace_many(
        self, addresses: Sequence[Address], *, rewritten: dict[int, Resealed], deadline: Deadline
    ) -> Outcomes[Resealed]:
        self._talk("replace", CANARY)  # of the request before, which its session still has
        return super()._replace_many(addresses, rewritten=rewritten, deadline=deadline)

    def _delete_many(self, addresses: Sequence[Address], *, deadline: Deadline) -> Outcomes[bool]:
        self._talk("delete", CANARY)
        return super()._delete_many(addresses, deadline=deadline)

    def _list(self, after: str, *, deadline: Deadline) -> Sequence[str]:
        self._talk("list", OTHER_CANARY)
        return super()._list(after, deadline=deadline)

    def _talk(self, operation: str, told: str) -> None:
        try:
            self._request(operation, f"https://store.example/{operation}?{told}")
        except PermissionError as error:
            raise StoreDenied("the store does not know this key") from error
        except TimeoutError as error:
            self.fault = ""
            raise StoreUnavailable("the store is busy") from error

    def _request(self, operation: str, request: str) -> None:
        match self.fault.split():
            case [failing, "denied"] if failing == operation:
                raise PermissionError(f"403 Forbidden: {request}")
            case [failing, "unavailable"] if failing == operation:
                raise TimeoutError(f"504 Gateway Timeout: {request}")
            case [failing, "unexpected"] if failing == operation:
                raise RuntimeError(f"unexpected answer to {request}", request) from ValueError(request)

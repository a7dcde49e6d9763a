"""What a secret store is: the protocol, and the batch forms on which everything else is built.

Stores know nothing of the models. They are given scopes and refs, and answer with receipts or with the errors
of `kfs_credentials.errors`, whatever a client library or a file system raises. What a store says that it has put,
replaced or erased is looked at again, in the same call, before anybody hears of it: see `read_back`.
"""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kfs_credentials.conf import settings
from kfs_credentials.crypto import Credentials, IntegrityReason, Plaintext, Scope, sensitive
from kfs_credentials.errors import KfsCredentialsError, SecretIntegrityError, StoreMisconfigured
from kfs_credentials.stores import read_back
from kfs_credentials.stores.calls import Call, Calls, Deadline
from kfs_credentials.stores.outcomes import Outcomes, alone, batch, each, unwrap
from kfs_credentials.stores.values import Address, Entry, Look, Probe, Receipt, Resealed, Sighting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime


T = TypeVar("T")
AddressT = TypeVar("AddressT", bound=Address)

TRIAL_SCOPE = Scope("kfs-credentials", "trial", "trial")
TRIAL_REFS = [f"source-secret:v1:00000000-0000-4000-8000-{number:012x}" for number in range(1, 17)]
"""Under these a store is tried out. No secret has them, and no list shows them: what is left there is erased by a later
trial. There are several, for processes that try it at the same moment."""
TRIAL_DIGESTS = {hashlib.sha256(ref.encode()).digest() for ref in TRIAL_REFS}
TRIALS = 3
"""How many of them have to fail: one may, if somebody else is at the same."""
TRIAL_IS_GONE_IN = 5.0
"""Seconds for the erasure of a trial, also where time is up, or the lease is lost."""


class SecretStore(ABC):
    """Keeps secrets under refs. Subclasses implement the underscored methods, for batches of valid refs.

    No method takes longer than STORE_TIMEOUT, after which it raises `StoreUnavailable`; `list` may take as
    long for each page. No method may be called with a transaction open.
    """

    alias = "default"
    can_list: ClassVar[bool] = True
    """Whether `list` works. Where it does not, no patrol can be made, and final ledger rows are kept for ever."""

    @cached_property
    def _calls(self) -> Calls:
        # Not made by `__init__`: a subclass may have its own, and forget this one.
        return Calls()

    @sensitive
    def put(
        self, scope: Scope, ref: str, credentials: Mapping[str, Any] | Plaintext, *, look: Look | None = None
    ) -> Receipt:
        """Store `credentials` under `ref`, once and durably; return its receipt. `look`: as for `start_put_many`.

        Putting exactly the same again is success, and makes durable what another process may have left
        unsynced. Raises `InvalidRef`, `InvalidCredentials` (NaN, infinities, not an object),
        `CredentialsTooLarge`, `SecretConflict` if other content is there (which stands),
        `SecretIntegrityError` if what is there is damaged or of another scope, `NotAsSaid` if the store says that
        it has put this and does not give it back, `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`;
        `SecretStoreError` itself if the store failed in a way that nobody foresaw.
        """
        (outcome,) = self.start_put_many([Entry(scope, ref, Plaintext.of(credentials))], look=look).result()
        return unwrap(outcome)

    def get(self, scope: Scope, ref: str) -> Credentials:
        """Return the credentials under `ref`, for exactly this scope.

        Raises `InvalidRef`, `SecretNotFound`, `SecretIntegrityError`, `StoreUnavailable`, `StoreDenied`,
        `StoreMisconfigured`, `SecretStoreError`. It never returns part of a secret, ciphertext, or None.
        """
        (outcome,) = self.get_many([Address(scope, ref)])
        return unwrap(outcome)

    def delete(self, scope: Scope, ref: str) -> bool:
        """Erase every version of the object; return whether there was one. Never reads or decrypts it.

        Raises `InvalidRef`, `SecretRetained` if the store keeps it or only hides it, `NotAsSaid` if the store says
        that it is gone and it is not, `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`, `SecretStoreError`.
        """
        (outcome,) = self.delete_many([Address(scope, ref)])
        return unwrap(outcome)

    def replace(self, scope: Scope, ref: str, *, look: Look | None = None) -> Resealed:
        """Seal what lies under `ref` anew, under the first key of the ring, durably; return its receipt.

        The plaintext stays the same. What is under that key already is left as it is, and made durable. Where an
        object is erased at the same moment, it may come back by this: look at its ledger row again afterwards.
        Raises `InvalidRef`, `SecretNotFound`, `SecretIntegrityError`, `NotAsSaid` if the store says that it has
        replaced this and shows something else, `SecretStoreError` itself if somebody else writes there at the same
        time, `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`.
        """
        (outcome,) = self.start_replace_many([Address(scope, ref)], look=look).result()
        return unwrap(outcome)

    def put_many(self, entries: Sequence[Entry]) -> Outcomes[Receipt]:
        """Put a batch, durable as a group; return a receipt or what `put` would raise for each, in order.

        A receipt is only given for what was read back exactly as it was put. Raises what concerns the store as a
        whole: `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured` (it gives back nothing of what it has put, too).
        """
        return self.start_put_many(entries).result()

    def start_put_many(
        self, entries: Sequence[Entry], *, guard: Callable[[], None] | None = None, look: Look | None = None
    ) -> Call[Outcomes[Receipt]]:
        """Start `put_many` and return at once.

        Nothing becomes visible after the deadline, or once `guard` raises: it is called right before each
        secret becomes visible, on the call's own thread, and what it raises is what `result` raises. `look` is called
        on that thread too, with the probe, before the first secret becomes visible and after the last, and through
        the handle by which these are put: what it raises keeps the secrets out, or the batch from being used.
        """
        deadline = Deadline(settings.STORE_TIMEOUT, guard, look)
        put = partial(read_back.put, self._put_many, self._read_back, works=self._works, deadline=deadline)
        return self._start(put, entries, deadline)

    def get_many(self, addresses: Sequence[Address]) -> Outcomes[Credentials]:
        """Get a batch; return the credentials or what `get` would raise for each, in order.

        Raises what concerns the store as a whole, as `put_many` does.
        """
        deadline = Deadline(settings.STORE_TIMEOUT)
        get = partial(self._get_many, deadline=deadline)
        return self._start(get, addresses, deadline).result()

    def replace_many(self, addresses: Sequence[Address]) -> Outcomes[Resealed]:
        """Replace a batch, durable as a group; return a receipt or what `replace` would raise for each, in order.

        Raises what concerns the store as a whole, as `put_many` does.
        """
        return self.start_replace_many(addresses).result()

    def start_replace_many(
        self, addresses: Sequence[Address], *, guard: Callable[[], None] | None = None, look: Look | None = None
    ) -> Call[Outcomes[Resealed]]:
        """Start `replace_many` and return at once. `guard`, `look`: as for `start_put_many`."""
        deadline = Deadline(settings.STORE_TIMEOUT, guard, look)
        replace = partial(
            read_back.replace,
            self._replace_many,
            self._read_back,
            self._put_back,
            works=self._works,
            deadline=deadline,
        )
        return self._start(replace, addresses, deadline)

    def delete_many(self, addresses: Sequence[Address]) -> Outcomes[bool]:
        """Erase a batch; return for each whether it was there, or what `delete` would raise, in order.

        Raises what concerns the store as a whole, as `put_many` does.
        """
        return self.start_delete_many(addresses).result()

    def start_delete_many(
        self, addresses: Sequence[Address], *, guard: Callable[[], None] | None = None, look: Look | None = None
    ) -> Call[Outcomes[bool]]:
        """Start `delete_many` and return at once. `guard`, `look`: as for `start_put_many`, before objects go."""
        deadline = Deadline(settings.STORE_TIMEOUT, guard, look)
        return self._start(self._erasure(self._delete_many, self._remain, deadline), addresses, deadline)

    def read_probe(self) -> Sighting:
        """Return the probe, an error if no key of the ring opens it, None if there is none.

        Raises `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`, `SecretStoreError`.
        """
        return self.start_read_probe().result()

    def start_read_probe(self) -> Call[Sighting]:
        """Start `read_probe` and return at once."""
        return self._calls.start(partial(alone, self._read_probe), Deadline(settings.STORE_TIMEOUT))

    def create_probe(self, probe: Probe) -> bool:
        """Write the probe durably, unless there is one; return whether it was written. Raises as `read_probe` does."""
        return self._call(partial(self._create_probe, probe))

    def start_replace_probe(self, probe: Probe, *, guard: Callable[[], None] | None = None) -> Call[None]:
        """Start to write the probe durably, whatever is in its place; return at once.

        The call raises as `read_probe` does, and what `guard` raises.

        Two processes must not do this at the same time: `guard` is called right before the probe becomes visible.
        """
        deadline = Deadline(settings.STORE_TIMEOUT, guard)
        replace = partial(read_back.write_probe, self._replace_probe, self._read_probe, probe, deadline=deadline)
        return self._calls.start(partial(alone, replace), deadline)

    def list(self, after: str = "") -> Iterator[str]:
        """Yield the object names that sort after `after`, in order. Foreign ones are left out.

        What a writer that died left behind of an object counts as that object, though nothing can be read there.
        An object that is put or erased meanwhile may or may not be among them; all others are, once.
        Raises `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`, `SecretStoreError`.
        """
        while page := self._page(after):
            yield from (name for name in page if self.digest(name) not in TRIAL_DIGESTS)
            after = page[-1]

    def _page(self, after: str) -> Sequence[str]:
        """Return the next page of the listing. Raises `StoreMisconfigured` where that would never come to its end."""
        deadline = Deadline(settings.STORE_TIMEOUT)
        listing = partial(self._list, after, deadline=deadline)
        page = self._calls.start(partial(alone, listing), deadline).result()
        for name in page:
            if name <= after:
                raise StoreMisconfigured("the secret store lists its objects in no order, or some of them twice")
            after = name
        return page

    @staticmethod
    def digest(name: str) -> bytes:
        """Return the SHA-256 of the ref whose object has this name, as `list` yields it."""
        return bytes.fromhex(name.removesuffix(".enc")[-64:])

    def modified_at(self, name: str) -> datetime | None:
        """Return when the object of this name, as `list` yields it, was written; None if that cannot be told.

        Raises `SecretNotFound` if there is none, `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`,
        `SecretStoreError`.
        """
        return self._call(partial(self._modified_at, name))

    def delete_named(self, names: Sequence[str], *, look: Look | None = None) -> Outcomes[bool]:
        """Erase the objects of these names, as `list` yields them, whose refs nobody knows.

        Returns for each whether it was there, or what `delete` would raise, in order. `look`: as for `start_put_many`,
        before objects go. Raises what concerns the store as a whole, as `put_many` does, and what `look` raises.
        """
        deadline = Deadline(settings.STORE_TIMEOUT, look=look)
        delete = self._erasure(self._delete_named, self._remain_named, deadline)
        return self._calls.start(partial(each, delete, names), deadline).result()

    def check(self) -> None:
        """Raise `StoreMisconfigured`, `StoreDenied` or `StoreUnavailable` if the store cannot be used now."""
        self._call(self._check)

    def _erasure(
        self, delete_many: Callable[..., Outcomes[bool]], remain: Callable[..., Sequence[bool]], deadline: Deadline
    ) -> Callable[[Sequence[Any]], Outcomes[bool]]:
        # The set is made here: what it notes holds for all tries of one call.
        return partial(read_back.erase, delete_many, remain, works=self._works, were_there=set(), deadline=deadline)

    def _start(
        self, function: Callable[[Sequence[AddressT]], Outcomes[T]], items: Sequence[AddressT], deadline: Deadline
    ) -> Call[Outcomes[T]]:
        ref = items[0].ref if len(items) == 1 else None  # of a batch nobody knows which one hangs
        return self._calls.start(partial(batch, function, items), deadline, ref)

    def _call(self, function: Callable[[], T]) -> T:
        return self._calls.start(partial(alone, function), Deadline(settings.STORE_TIMEOUT)).result()

    @sensitive
    def _works(self, *, deadline: Deadline) -> bool:
        """Put a secret that is none, read it back and erase it; return whether all of that is as the store says."""
        return any(self._passes(ref, deadline) for ref in secrets.SystemRandom().sample(TRIAL_REFS, TRIALS))

    @sensitive
    def _passes(self, ref: str, deadline: Deadline) -> bool:
        entry = Entry(TRIAL_SCOPE, ref, Plaintext.of({}))
        self._delete_many([entry], deadline=deadline)  # what a process left that died
        try:
            (receipt,) = self._put_many([entry], deadline=deadline)
            if isinstance(receipt, KfsCredentialsError):
                return False
            (seen,) = self._read_back([entry], [receipt], deadline=deadline)
        finally:
            (erased,) = self._delete_many([entry], deadline=Deadline(TRIAL_IS_GONE_IN, look=deadline.look))
        (remains,) = self._remain([entry], deadline=deadline)
        return isinstance(seen, Receipt) and erased is True and not remains

    @abstractmethod
    def _put_many(self, entries: Sequence[Entry], *, deadline: Deadline) -> Outcomes[Receipt]:
        """Put each; call `deadline.check` right before each becomes visible, and `deadline.look`."""

    @abstractmethod
    def _get_many(self, addresses: Sequence[Address], *, deadline: Deadline) -> Outcomes[Credentials]:
        """Get each."""

    @abstractmethod
    def _replace_many(
        self, addresses: Sequence[Address], *, rewritten: dict[int, Resealed], deadline: Deadline
    ) -> Outcomes[Resealed]:
        """Seal each anew; call `deadline.check` right before each becomes visible, and `deadline.look`.

        What was rewritten, or may have been, is noted in `rewritten` by its place at once, with its `plaintext`:
        whatever ends this call, what is in there is looked at, and put again if the store has lost it. Not what
        somebody else has erased, or written, before it could be.
        """

    @sensitive
    def _put_back(self, entries: Sequence[Entry], *, deadline: Deadline) -> None:
        """Put what was lost by a replacement: over what is damaged, where the store can, and whatever its size."""
        self._put_many(entries, deadline=deadline)

    @sensitive
    def _read_back(
        self, entries: Sequence[Entry], receipts: Sequence[Receipt], *, deadline: Deadline
    ) -> Outcomes[Receipt]:
        """Read what was put or rewritten; return what the store holds for each if it is exactly that, else an error.

        `receipts`: those that `_put_many` or `_replace_many` has returned. A store that knows the bytes which it has
        written may compare those.
        """
        found = self._get_many(entries, deadline=deadline)
        return [_compared(entry, one, receipt) for entry, one, receipt in zip(entries, found, receipts, strict=True)]

    @abstractmethod
    def _remain(self, addresses: Sequence[Address], *, deadline: Deadline) -> Sequence[bool]:
        """Return for each whether it is still there, in any version. Never reads or decrypts it."""

    @abstractmethod
    def _delete_many(self, addresses: Sequence[Address], *, deadline: Deadline) -> Outcomes[bool]:
        """Erase each; return whether it was there. Call `deadline.look`."""

    @abstractmethod
    def _read_probe(self) -> Sighting:
        """Do what `read_probe` says."""

    @abstractmethod
    def _create_probe(self, probe: Probe) -> bool:
        """Do what `create_probe` says."""

    @abstractmethod
    def _replace_probe(self, probe: Probe, *, deadline: Deadline) -> None:
        """Do what `start_replace_probe` says; call `deadline.check` right before it becomes visible."""

    @abstractmethod
    def _list(self, after: str, *, deadline: Deadline) -> Sequence[str]:
        """Return the first names after `after`, in order, as many as suits the store; none at the end.

        Call `deadline.check_time` now and then.
        """

    def _modified_at(self, name: str) -> datetime | None:
        """Return when it was written, an aware datetime; None where the store cannot tell."""
        return None

    def _delete_named(self, names: Sequence[str], *, deadline: Deadline) -> Outcomes[bool]:
        """Erase each, in every version; return whether it was there. Call `deadline.look`."""
        raise NotImplementedError

    def _remain_named(self, names: Sequence[str], *, deadline: Deadline) -> Sequence[bool]:
        """Return for each of what `_delete_named` has erased whether it is still there, in any version."""
        raise NotImplementedError

    @abstractmethod
    def _check(self) -> None:
        """Do what `check` says."""


@sensitive
def _compared(
    entry: Entry, found: Credentials | KfsCredentialsError, receipt: Receipt
) -> Receipt | KfsCredentialsError:
    if isinstance(found, KfsCredentialsError):
        return found
    there = Plaintext.of(found)
    if there.exact != entry.plaintext.exact:
        return SecretIntegrityError(IntegrityReason.NOT_AS_PUT)
    return Receipt(receipt.key_id, there.size)

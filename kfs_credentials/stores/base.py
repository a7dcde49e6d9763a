"""What a secret store is: the protocol, its deadline, and the batch forms on which everything else is built.

Stores know nothing of the models. They are given scopes and refs, and answer with receipts or with the errors
of `kfs_credentials.errors`, whatever a client library or a file system raises.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from kfs_credentials.conf import settings
from kfs_credentials.crypto import Credentials, Plaintext, Scope, sensitive, validate_ref
from kfs_credentials.errors import (
    InvalidRef,
    KfsCredentialsError,
    SecretIntegrityError,
    SecretStoreError,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

logger = logging.getLogger(__name__)

T = TypeVar("T")
AddressT = TypeVar("AddressT", bound="Address")
ErrorT = TypeVar("ErrorT", bound=BaseException)

Outcomes: TypeAlias = list[T | KfsCredentialsError]
"""What became of each item of a batch, in order: its result, or the error that it would raise alone."""


@dataclass(frozen=True, slots=True)
class Address:
    """Whose secret, and under which ref."""

    scope: Scope
    ref: str


@dataclass(frozen=True, slots=True)
class Entry(Address):
    """An address and what to put there. Its repr shows no value: `Plaintext` hides it."""

    plaintext: Plaintext


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the store holds after a put: the id of the key it is sealed under, and the plaintext's bytes."""

    key_id: str | None
    size: int


@dataclass(frozen=True, slots=True)
class Probe:
    """The store's half of a binding: which database it belongs to, and the epoch. See `kfs_credentials.binding`."""

    environment_id: uuid.UUID
    environment: str
    system_identifier: str
    database_oid: int
    epoch: int
    key_id: str | None = field(default=None, compare=False)
    """The key that opened it, where it was read."""


Sighting: TypeAlias = Probe | SecretIntegrityError | None
"""What was seen in the place of the probe: one that no key of the ring opens is an error, None is no object."""

Look: TypeAlias = "Callable[[Sighting], None]"
"""Called with what was seen; raises where that is not the right store."""


class Beside(NamedTuple):
    """A file to be looked at beside others: its name, and what to call with its content (None: there is none)."""

    name: str
    look: Callable[[bytes | None], None]


@dataclass(frozen=True, slots=True)
class Resealed(Receipt):
    """What the store holds after a replacement. `rewritten`: False if it was under the first key already."""

    rewritten: bool


class Deadline:
    """The moment by which one call has to be over, on a clock that runs on while the process is stopped.

    `guard`: another reason to stop (a lease), which raises when there is one. `look`: what to call with the probe,
    before and after all that the call writes or erases, and through the same handle.
    """

    def __init__(self, seconds: float, guard: Callable[[], None] | None = None, look: Look | None = None) -> None:
        self.seconds = seconds
        self.guard = guard
        self.look = look
        self.at = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left; 0 if there are none."""
        return max(0.0, self.at - time.monotonic())

    def check(self) -> None:
        """Raise `StoreUnavailable` if time is up. Call it right before a write becomes visible."""
        if self.guard is not None:
            self.guard()
        if not self.remaining:
            raise self.passed()

    def passed(self) -> StoreUnavailable:
        """Return the error that says that time is up."""
        return StoreUnavailable(
            f"the secret store did not answer within {self.seconds:g} s (KFS_CREDENTIALS['STORE_TIMEOUT'])"
        )


class Call(Generic[T]):
    """A call to the store, on a thread of its own: the caller waits as long as it likes, and no longer.

    A call that outlives its deadline cannot be stopped from outside; it looks at the deadline itself before
    it makes anything visible. The thread is a daemon: a call that hangs for ever keeps no process from
    ending.
    """

    def __init__(self, function: Callable[[], T], deadline: Deadline) -> None:
        self.deadline = deadline
        self._function = function
        self._done = threading.Event()
        self._result: T
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="kfs-credentials-store", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the waiting thread raises it
            self._error = bare(error)
        finally:
            del self._function
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return whether the call is over, by its end or by its deadline."""
        return self._done.wait(min(seconds, self.deadline.remaining)) or not self.deadline.remaining

    def result(self) -> T:
        """Return what the call returned or raise what it raised; `StoreUnavailable` if its time is up."""
        while not self._done.wait(remaining := self.deadline.remaining):
            if not remaining:
                raise self.deadline.passed()
        if self._error is not None:
            raise self._error
        return self._result


class SecretStore(ABC):
    """Keeps secrets under refs. Subclasses implement the underscored methods, for batches of valid refs.

    No method takes longer than STORE_TIMEOUT, after which it raises `StoreUnavailable`; `list` may take as
    long for each page. No method may be called with a transaction open.
    """

    alias = "default"
    can_list: ClassVar[bool] = True
    """Whether `list` works. Where it does not, no patrol can be made, and final ledger rows are kept for ever."""

    @sensitive
    def put(
        self, scope: Scope, ref: str, credentials: Mapping[str, Any] | Plaintext, *, look: Look | None = None
    ) -> Receipt:
        """Store `credentials` under `ref`, once and durably; return its receipt. `look`: as for `start_put_many`.

        Putting exactly the same again is success, and makes durable what another process may have left
        unsynced. Raises `InvalidRef`, `InvalidCredentials` (NaN, infinities, not an object),
        `CredentialsTooLarge`, `SecretConflict` if other content is there (which stands),
        `SecretIntegrityError` if what is there is damaged or of another scope, `StoreUnavailable`,
        `StoreDenied`, `StoreMisconfigured`; `SecretStoreError` itself if the store failed in a way that
        nobody foresaw.
        """
        (outcome,) = self.start_put_many([Entry(scope, ref, Plaintext.of(credentials))], look=look).result()
        return _unwrap(outcome)

    def get(self, scope: Scope, ref: str) -> Credentials:
        """Return the credentials under `ref`, for exactly this scope.

        Raises `InvalidRef`, `SecretNotFound`, `SecretIntegrityError`, `StoreUnavailable`, `StoreDenied`,
        `StoreMisconfigured`, `SecretStoreError`. It never returns part of a secret, ciphertext, or None.
        """
        (outcome,) = self.get_many([Address(scope, ref)])
        return _unwrap(outcome)

    def delete(self, scope: Scope, ref: str) -> bool:
        """Erase every version of the object; return whether there was one. Never reads or decrypts it.

        Raises `InvalidRef`, `SecretRetained` if the store keeps it or only hides it, `StoreUnavailable`,
        `StoreDenied`, `StoreMisconfigured`, `SecretStoreError`.
        """
        (outcome,) = self.delete_many([Address(scope, ref)])
        return _unwrap(outcome)

    def replace(self, scope: Scope, ref: str, *, look: Look | None = None) -> Resealed:
        """Seal what lies under `ref` anew, under the first key of the ring, durably; return its receipt.

        The plaintext stays the same. What is under that key already is left as it is, and made durable. Where an
        object is erased at the same moment, it may come back by this: look at its ledger row again afterwards.
        Raises `InvalidRef`, `SecretNotFound`, `SecretIntegrityError`, `SecretStoreError` itself if somebody else
        writes there at the same time, `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`.
        """
        (outcome,) = self.start_replace_many([Address(scope, ref)], look=look).result()
        return _unwrap(outcome)

    def put_many(self, entries: Sequence[Entry]) -> Outcomes[Receipt]:
        """Put a batch, durable as a group; return a receipt or what `put` would raise for each, in order.

        Raises what concerns the store as a whole: `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`.
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
        return Call(partial(_batch, partial(self._put_many, deadline=deadline), entries), deadline)

    def get_many(self, addresses: Sequence[Address]) -> Outcomes[Credentials]:
        """Get a batch; return the credentials or what `get` would raise for each, in order.

        Raises what concerns the store as a whole, as `put_many` does.
        """
        deadline = Deadline(settings.STORE_TIMEOUT)
        return Call(partial(_batch, partial(self._get_many, deadline=deadline), addresses), deadline).result()

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
        return Call(partial(_batch, partial(self._replace_many, deadline=deadline), addresses), deadline)

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
        return Call(partial(_batch, partial(self._delete_many, deadline=deadline), addresses), deadline)

    def read_probe(self) -> Sighting:
        """Return the probe, an error if no key of the ring opens it, None if there is none.

        Raises `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`, `SecretStoreError`.
        """
        return self.start_read_probe().result()

    def start_read_probe(self) -> Call[Sighting]:
        """Start `read_probe` and return at once."""
        return Call(partial(_alone, self._read_probe), Deadline(settings.STORE_TIMEOUT))

    def create_probe(self, probe: Probe) -> bool:
        """Write the probe durably, unless there is one; return whether it was written. Raises as `read_probe` does."""
        return self._call(partial(self._create_probe, probe))

    def start_replace_probe(self, probe: Probe, *, guard: Callable[[], None] | None = None) -> Call[None]:
        """Start to write the probe durably, whatever is in its place; return at once.

        The call raises as `read_probe` does, and what `guard` raises.

        Two processes must not do this at the same time: `guard` is called right before the probe becomes visible.
        """
        deadline = Deadline(settings.STORE_TIMEOUT, guard)
        return Call(partial(_alone, partial(self._replace_probe, probe, deadline=deadline)), deadline)

    def list(self, after: str = "") -> Iterator[str]:
        """Yield the object names that sort after `after`, in order. Foreign ones are left out.

        What a writer that died left behind of an object counts as that object, though nothing can be read there.
        An object that is put or erased meanwhile may or may not be among them; all others are, once.
        Raises `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`, `SecretStoreError`.
        """
        while page := self._call(partial(self._list, after)):
            yield from page
            after = page[-1]

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

    def delete_named(self, name: str) -> bool:
        """Erase the object of this name, as `list` yields it, whose ref nobody knows; return whether there was one.

        Raises what `delete` does.
        """
        return self._call(partial(self._delete_named, name))

    def check(self) -> None:
        """Raise `StoreMisconfigured`, `StoreDenied` or `StoreUnavailable` if the store cannot be used now."""
        self._call(self._check)

    def _call(self, function: Callable[[], T]) -> T:
        return Call(partial(_alone, function), Deadline(settings.STORE_TIMEOUT)).result()

    @abstractmethod
    def _put_many(self, entries: Sequence[Entry], *, deadline: Deadline) -> Outcomes[Receipt]:
        """Put each; call `deadline.check` right before each becomes visible, and `deadline.look`."""

    @abstractmethod
    def _get_many(self, addresses: Sequence[Address], *, deadline: Deadline) -> Outcomes[Credentials]:
        """Get each."""

    @abstractmethod
    def _replace_many(self, addresses: Sequence[Address], *, deadline: Deadline) -> Outcomes[Resealed]:
        """Seal each anew; call `deadline.check` right before each becomes visible, and `deadline.look`."""

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
    def _list(self, after: str) -> Sequence[str]:
        """Return the first names after `after`, in order, as many as suits the store; none at the end."""

    def _modified_at(self, name: str) -> datetime | None:
        """Return when it was written, an aware datetime; None where the store cannot tell."""
        return None

    def _delete_named(self, name: str) -> bool:
        """Erase it, in every version."""
        raise NotImplementedError

    @abstractmethod
    def _check(self) -> None:
        """Do what `check` says."""


class _UnforeseenError(SecretStoreError):
    """The store failed in a way that nobody foresaw: most likely there is a mistake in it."""


def _batch(function: Callable[[Sequence[AddressT]], Outcomes[T]], items: Sequence[AddressT]) -> Outcomes[T]:
    """Return the outcome of each item. The store sees only those whose ref is one."""
    refused = [_refusal(item.ref) for item in items]
    valid = [item for item, refusal in zip(items, refused, strict=True) if refusal is None]
    found = iter(_outcomes(function, valid) if valid else [])
    outcomes = [next(found) if refusal is None else refusal for refusal in refused]
    errors = [bare(outcome) for outcome in outcomes if isinstance(outcome, KfsCredentialsError)]
    if unforeseen := [error for error in errors if isinstance(error, _UnforeseenError)]:
        _log(unforeseen[0], f"{len(unforeseen)} of {len(items)} times, ")
    return outcomes


def _refusal(ref: str) -> InvalidRef | None:
    try:
        validate_ref(ref)
    except InvalidRef as error:
        return error
    return None


def _outcomes(function: Callable[[Sequence[AddressT]], Outcomes[T]], items: Sequence[AddressT]) -> Outcomes[T]:
    """Return the outcome of each item. If the store fails in an unforeseen way, find out at which of them."""
    try:
        return _translated(partial(function, items))
    except _UnforeseenError as error:
        if len(items) == 1:
            return [error]
    middle = len(items) // 2
    return _outcomes(function, items[:middle]) + _outcomes(function, items[middle:])


def _alone(function: Callable[[], T]) -> T:
    try:
        return _translated(function)
    except _UnforeseenError as error:
        _log(error)
        raise


def _translated(function: Callable[[], T]) -> T:
    """Return what `function` returns; turn what it should not raise into an error that quotes nothing."""
    try:
        return function()
    except KfsCredentialsError:
        raise
    except Exception as error:  # noqa: BLE001 - a client library may raise anything, with any text
        unforeseen = _UnforeseenError(f"the secret store failed in an unexpected way ({type(error).__name__})")
        unforeseen.__traceback__ = error.__traceback__
    raise unforeseen


def _log(error: _UnforeseenError, times: str = "") -> None:
    # The lines of code, not the foreign error: its text could quote anything.
    logger.error("%s%s:\n%s", times, error, "".join(traceback.format_tb(error.__traceback__)))


def bare(error: ErrorT) -> ErrorT:
    """Return the error without what led to it and without the variables of its frames."""
    traceback.clear_frames(error.__traceback__)
    error.__cause__ = error.__context__ = None
    return error


def _unwrap(outcome: T | KfsCredentialsError) -> T:
    if isinstance(outcome, KfsCredentialsError):
        raise outcome
    return outcome

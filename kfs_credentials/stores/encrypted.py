"""The secret store that encrypts by itself, over a Django storage.

The bytes and the addresses are those of the original (Dify's knowledge-fs): what it puts is read here, and
what is put here it reads.
"""

from __future__ import annotations

import heapq
import re
import uuid
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from django.core.files.storage import Storage
from django.utils import timezone

from kfs_credentials.conf import key_ring, settings
from kfs_credentials.crypto import (
    DEFAULT_PREFIX,
    Credentials,
    IntegrityReason,
    KeyRing,
    Plaintext,
    Scope,
    new_ref,
    object_name,
    seal,
    sensitive,
    unseal,
    unseal_and_tell_key,
)
from kfs_credentials.errors import (
    CredentialsTooLarge,
    KfsCredentialsError,
    NotAsSaid,
    SecretConflict,
    SecretIntegrityError,
    SecretNotFound,
    SecretStoreError,
    StoreDenied,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.stores.base import SecretStore
from kfs_credentials.stores.storage import create_once
from kfs_credentials.stores.threads import on_threads
from kfs_credentials.stores.values import Address, Beside, Entry, Look, Probe, Receipt, Resealed, Sighting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kfs_credentials.stores.calls import Deadline
    from kfs_credentials.stores.outcomes import Outcomes

PAGE = 100_000
"""The most names that are listed, and held in memory, at a time."""

# The probe is sealed as secrets are, under a scope and a ref that no secret has, and its name is none of theirs.
PROBE_SCOPE = Scope("kfs-credentials", "binding", "probe")
PROBE_REF = "source-secret:v1:00000000-0000-4000-8000-000000000000"
PROBE_NAME = "kfs-credentials-binding"


@dataclass(frozen=True, slots=True)
class _Written(Receipt):
    """A receipt for bytes that were written by this call, and these bytes."""

    blob: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Rewritten(Resealed):
    """The same of a replacement."""

    blob: bytes = field(default=b"", repr=False)


class _Reseal(NamedTuple):
    """An object as it was read, and the receipt once it is rewritten."""

    old: bytes
    receipt: _Rewritten


class EncryptedStore(SecretStore):
    """AES-256-GCM over a Django storage that can create a file once and durably.

    Options: `storage`, an alias of STORAGES or a dictionary with BACKEND and OPTIONS; `prefix` of the
    objects' names. The keys are those of KFS_CREDENTIALS['KEYS']. Raises `StoreMisconfigured` if there is no
    such storage, if it cannot create a file once, or if the prefix is too short or too long.
    """

    def __init__(self, storage: str | dict[str, Any] | Storage, *, prefix: str = DEFAULT_PREFIX) -> None:
        try:
            object_name(new_ref(), prefix=prefix)
        except ValueError as error:
            raise StoreMisconfigured(str(error)) from None
        self.storage = create_once(storage)
        self.prefix = prefix

    @sensitive
    def _put_many(self, entries: Sequence[Entry], *, deadline: Deadline) -> Outcomes[Receipt]:
        ring, limit = key_ring(), settings.MAX_SECRET_BYTES
        refused: dict[int, CredentialsTooLarge] = {}
        files: dict[int, tuple[str, bytes]] = {}
        for place, entry in enumerate(entries):
            try:
                blob = seal(ring, entry.scope, entry.ref, entry.plaintext, max_bytes=limit)
            except CredentialsTooLarge as error:
                refused[place] = error
            else:
                files[place] = (self._name(entry), blob)
        beside = self._beside(deadline.look)
        created = self.storage.create_many(list(files.values()), check=deadline.check, beside=beside)
        outcomes: dict[int, Receipt | KfsCredentialsError] = {**refused}
        taken = []
        for (place, (_, blob)), is_new in zip(files.items(), created, strict=True):
            if isinstance(is_new, SecretStoreError):
                outcomes[place] = is_new
            elif is_new:
                outcomes[place] = _Written(ring.primary.id, entries[place].plaintext.size, blob)
            else:
                taken.append(place)
                outcomes[place] = self._compare(ring, entries[place])
        same = [place for place in taken if isinstance(outcomes[place], Receipt)]
        # Whoever linked these may have died before they were durable.
        for place, problem in zip(same, self.storage.sync([files[place][0] for place in same]), strict=True):
            outcomes[place] = problem or outcomes[place]
        for place in taken:
            if isinstance(outcomes[place], SecretNotFound):
                outcomes[place] = NotAsSaid(
                    "something had this secret's place when it was to be put, and nothing is there now: it was erased "
                    "at this moment, or the storage does not say what it holds"
                )
        return [outcomes[place] for place in range(len(entries))]

    @sensitive
    def _read_back(
        self, entries: Sequence[Entry], receipts: Sequence[Receipt], *, deadline: Deadline
    ) -> Outcomes[Receipt]:
        ring = key_ring()
        blobs = self.storage.read_many([self._name(entry) for entry in entries], check=deadline.check_time)
        outcomes: Outcomes[Receipt] = []
        for entry, receipt, blob in zip(entries, receipts, blobs, strict=True):
            # The same bytes are the same secret.
            if isinstance(receipt, _Written | _Rewritten) and blob == receipt.blob:
                outcomes.append(Receipt(receipt.key_id, receipt.size))
                continue
            # So may others be: somebody has sealed it anew since.
            deadline.check_time()
            found = self._compare(ring, entry)
            is_other = isinstance(found, SecretConflict)
            outcomes.append(SecretIntegrityError(IntegrityReason.NOT_AS_PUT) if is_other else found)
        return outcomes

    @sensitive
    def _compare(self, ring: KeyRing, entry: Entry) -> Receipt | SecretStoreError:
        """Find out what has the entry's name already: the same secret, which is success, or another one."""
        try:
            blob = self._read(entry)
        except SecretStoreError as error:
            return _of_one(error)
        return _compared(ring, entry, blob)

    def _get_many(self, addresses: Sequence[Address], *, deadline: Deadline) -> Outcomes[Credentials]:
        ring = key_ring()

        @sensitive
        def get(address: Address) -> Credentials | SecretStoreError:
            deadline.check()
            try:
                blob = self._read(address)
                return unseal(ring, address.scope, address.ref, blob, max_bytes=max(1, len(blob)))
            except SecretStoreError as error:
                return _of_one(error)

        return on_threads(get, addresses)

    @sensitive
    def _replace_many(
        self, addresses: Sequence[Address], *, rewritten: dict[int, Resealed], deadline: Deadline
    ) -> Outcomes[Resealed]:
        ring, asked = key_ring(), dict(enumerate(addresses))
        outcomes = self._replaced(ring, asked, rewritten, deadline)
        # Somebody else has written, or erased, since it was read: what is there now counts, once.
        again = {place: asked[place] for place, outcome in outcomes.items() if outcome is None}
        outcomes |= self._replaced(ring, again, rewritten, deadline)
        busy = SecretStoreError("another process is writing this secret at the same time")
        return [outcomes[place] or busy for place in asked]

    @sensitive
    def _replaced(
        self,
        ring: KeyRing,
        addresses: Mapping[int, Address],
        rewritten: dict[int, Resealed],
        deadline: Deadline,
    ) -> dict[int, Resealed | KfsCredentialsError | None]:
        """Seal each anew that is not under the first key; None for what changed since it was read."""

        @sensitive
        def reseal(address: Address) -> Resealed | KfsCredentialsError | _Reseal:
            deadline.check()
            try:
                old = self._read(address)
                limit = max(1, len(old))  # whatever its size: it is in the store already
                there, key_id = unseal_and_tell_key(ring, address.scope, address.ref, old, max_bytes=limit)
            except SecretStoreError as error:
                return _of_one(error)
            plaintext = Plaintext.of(there)
            if key_id == ring.primary.id:
                return Resealed(key_id, plaintext.size, rewritten=False)
            new = seal(ring, address.scope, address.ref, plaintext, max_bytes=max(1, plaintext.size))
            return _Reseal(old, _Rewritten(ring.primary.id, plaintext.size, True, plaintext, new))  # noqa: FBT003

        found = dict(zip(addresses, on_threads(reseal, list(addresses.values())), strict=True)) if addresses else {}
        if deadline.look is not None and any(isinstance(outcome, SecretNotFound) for outcome in found.values()):
            # What is not there is only missing if this is the right store; where nothing is written, nobody else looks.
            deadline.look(self._read_probe())
        outcomes: dict[int, Resealed | KfsCredentialsError | None] = {
            place: None if isinstance(outcome, _Reseal) else outcome for place, outcome in found.items()
        }
        files = {place: outcome for place, outcome in found.items() if isinstance(outcome, _Reseal)}
        named = [(self._name(addresses[place]), file.old, file.receipt.blob) for place, file in files.items()]
        # Of those that have the same name, the first is the one that is replaced.
        places = {name: place for (name, *_), place in zip(reversed(named), reversed(files), strict=True)}

        @sensitive
        def done(name: str) -> None:
            rewritten[places[name]] = files[places[name]].receipt

        beside = self._beside(deadline.look)
        replaced = self.storage.replace_many(named, check=deadline.check, done=done, beside=beside)
        for (place, file), is_replaced in zip(files.items(), replaced, strict=True):
            if is_replaced is not False:
                # Where that failed, too: it may have been in the middle.
                rewritten[place] = file.receipt
                outcomes[place] = file.receipt if is_replaced is True else is_replaced
        # Whoever replaced these may have died before they were durable, and the old bytes could come back.
        whole = [place for place, outcome in found.items() if isinstance(outcome, Resealed)]
        synced = self.storage.sync([self._name(addresses[place]) for place in whole])
        for place, problem in zip(whole, synced, strict=True):
            if problem is not None:
                outcomes[place] = None if isinstance(problem, SecretNotFound) else problem
        return outcomes

    @sensitive
    def _put_back(self, entries: Sequence[Entry], *, deadline: Deadline) -> None:
        ring, beside = key_ring(), self._beside(deadline.look)
        files = []
        for entry in entries:
            most = max(1, entry.plaintext.size)  # whatever its size: it was in the store already
            blob = seal(ring, entry.scope, entry.ref, entry.plaintext, max_bytes=most)
            files.append((self._name(entry), blob))
        created = self.storage.create_many(files, check=deadline.check, beside=beside)
        damaged = []
        for entry, (name, blob), is_new in zip(entries, files, created, strict=True):
            if is_new is False and (there := self._damaged(ring, entry)) is not None:
                damaged.append((name, there, blob))
        self.storage.replace_many(damaged, check=deadline.check, beside=beside)

    @sensitive
    def _damaged(self, ring: KeyRing, entry: Entry) -> bytes | None:
        """Return the bytes that have the entry's name if they are no secret; None if they may be somebody's."""
        try:
            there = self._read(entry)
        except SecretStoreError as error:
            _of_one(error)
            return None
        found = _compared(ring, entry, there)
        if not isinstance(found, SecretIntegrityError) or found.reason == IntegrityReason.UNKNOWN_KEY:
            return None
        return there

    def _delete_many(self, addresses: Sequence[Address], *, deadline: Deadline) -> Outcomes[bool]:
        return self._delete_named([self._name(address) for address in addresses], deadline=deadline)

    def _remain(self, addresses: Sequence[Address], *, deadline: Deadline) -> Sequence[bool]:
        return self._remain_named([self._name(address) for address in addresses], deadline=deadline)

    def _read_probe(self) -> Sighting:
        try:
            return _opened(self.storage.read(self._probe_name))
        except SecretNotFound:
            return None

    def _create_probe(self, probe: Probe) -> bool:
        (created,) = self.storage.create_many([(self._probe_name, _sealed(probe))])
        if isinstance(created, SecretStoreError):
            raise StoreUnavailable(f"the probe of the secret store cannot be written: {created}")
        return created

    def _replace_probe(self, probe: Probe, *, deadline: Deadline) -> None:
        try:
            old = self.storage.read(self._probe_name)
        except SecretNotFound:
            (created,) = self.storage.create_many([(self._probe_name, _sealed(probe))], check=deadline.check)
            written = created
        else:
            (written,) = self.storage.replace_many([(self._probe_name, old, _sealed(probe))], check=deadline.check)
        if isinstance(written, SecretStoreError):
            raise StoreUnavailable(f"the probe of the secret store cannot be replaced: {written}")
        if not written:
            raise StoreUnavailable("another process wrote the probe of the secret store at the same time")

    @property
    def _probe_name(self) -> str:
        return self.prefix + PROBE_NAME

    def _beside(self, look: Look | None) -> Beside | None:
        if look is None:
            return None
        return Beside(self._probe_name, lambda blob: look(None if blob is None else _opened(blob)))

    def _list(self, after: str, *, deadline: Deadline) -> Sequence[str]:
        directory, start = self._parts
        ours = re.compile(re.escape(start) + r"[0-9a-f]{64}\.enc")

        def listed() -> Iterator[str]:
            for name in self.storage.names(directory):
                deadline.check_time()  # a listing that goes round in circles has no end
                yield name

        names = (directory + name for name in listed() if ours.fullmatch(name))
        return list(dict.fromkeys(heapq.nsmallest(PAGE, (name for name in names if name > after))))

    def _modified_at(self, name: str) -> datetime | None:
        if not isinstance(self.storage, Storage):
            return None
        try:
            at = self.storage.get_modified_time(name)
        except NotImplementedError:
            return None
        except FileNotFoundError:
            raise SecretNotFound("the secret store holds nothing of this name") from None
        if not isinstance(at, datetime):
            return None
        try:
            return at if timezone.is_aware(at) else timezone.make_aware(at)  # naive where USE_TZ is off
        except (OverflowError, ValueError):
            return None  # no moment of this calendar

    def _delete_named(self, names: Sequence[str], *, deadline: Deadline) -> Outcomes[bool]:
        deadline.check()
        return [*self.storage.remove_many(names, check=deadline.check, beside=self._beside(deadline.look))]

    def _remain_named(self, names: Sequence[str], *, deadline: Deadline) -> Sequence[bool]:
        return self.storage.present(names)

    def _check(self) -> None:
        """Raise a store error if files cannot be made, `InvalidKey` if the keys are not right."""
        self.storage.check(self._parts[0])
        key_ring()

    def _read(self, address: Address) -> bytes:
        """Return the bytes of an object. If only this one cannot be read, its error is one of those `_of_one`."""
        return self.storage.read(self._name(address), beside=self._probe_name)

    def _name(self, address: Address) -> str:
        return object_name(address.ref, prefix=self.prefix)

    @property
    def _parts(self) -> tuple[str, str]:
        """The prefix as a directory, slash included, and what the names of the files in it begin with."""
        directory, slash, start = self.prefix.rpartition("/")
        return directory + slash, start


@sensitive
def _compared(ring: KeyRing, entry: Entry, blob: bytes) -> Receipt | SecretStoreError:
    """Return the receipt of an object if it holds exactly this secret, else what is wrong with it."""
    try:
        # Whatever its size: a limit that was lowered does not make it another secret.
        credentials, key_id = unseal_and_tell_key(ring, entry.scope, entry.ref, blob, max_bytes=max(1, len(blob)))
    except SecretIntegrityError as error:
        return error
    there = Plaintext.of(credentials)
    if there.exact == entry.plaintext.exact:
        return Receipt(key_id, there.size)
    return SecretConflict(rounding_only=there.rounded == entry.plaintext.rounded)


def _of_one(error: SecretStoreError) -> SecretStoreError:
    """Return the error that is about one object; raise it if it concerns the store as a whole."""
    if isinstance(error, StoreUnavailable | StoreDenied | StoreMisconfigured):
        raise error
    return error


def _sealed(probe: Probe) -> bytes:
    members = {
        "environmentId": str(probe.environment_id),
        "environment": probe.environment,
        "system": probe.system_identifier,
        "database": probe.database_oid,
        "epoch": probe.epoch,
    }
    return seal(key_ring(), PROBE_SCOPE, PROBE_REF, members)


def _opened(blob: bytes) -> Probe | SecretIntegrityError:
    ring = key_ring()
    try:
        members, key_id = unseal_and_tell_key(ring, PROBE_SCOPE, PROBE_REF, blob)
        return Probe(
            uuid.UUID(members["environmentId"]),
            str(members["environment"]),
            str(members["system"]),
            int(members["database"]),
            int(members["epoch"]),
            key_id,
        )
    except SecretIntegrityError as error:
        return error
    except (LookupError, TypeError, ValueError):
        return SecretIntegrityError(IntegrityReason.NOT_CREDENTIALS)  # of a later version, perhaps

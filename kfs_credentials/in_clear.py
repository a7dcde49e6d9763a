"""What lies in clear where nothing should: beside a ref, or in a shape that is not supported.

It is looked at, compared in this process, and taken away under locks, if it still is what was looked at.

- Beside a ref (an old writer brought it back): `compared` tells whether it is the value that the ref resolves to,
  `scrub_same` removes it where it is, `keep_ref` and `keep_plaintext` settle the others.
- Of another shape than an object: `wrap` moves it into the store as `{key: value}`.

What moves a value reserves a ref, commits, puts, and lets the source name it in a second transaction, as a rotate does.
Killed at any point, it leaves the value where it was, or where it was to be; and a reservation, which the cleanup takes
back.
"""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from django.db import DatabaseError, InterfaceError
from psycopg.errors import LockNotAvailable

from kfs_credentials import keys, sql
from kfs_credentials.audit import record
from kfs_credentials.batch import Legacy, made
from kfs_credentials.binding import Watch, check_bound, ensure_bound
from kfs_credentials.conf import settings
from kfs_credentials.crypto import Credentials, Plaintext, Scope, parse_json, sensitive
from kfs_credentials.crypto.sensitive import hide
from kfs_credentials.errors import (
    BeingDeleted,
    CredentialsTooLarge,
    InvalidCredentials,
    InvalidScope,
    MutationFailed,
    SecretIntegrityError,
    SecretNotFound,
    SecretStoreError,
    ServiceError,
    StoreDenied,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.ledger import Moved, Operation, check_admission, ledger, point, reserve
from kfs_credentials.models import Acknowledgement, EventKind, Purpose, RefState, Shape
from kfs_credentials.models.knowledge_space import being_deleted
from kfs_credentials.models.source import UNSUPPORTED
from kfs_credentials.operations import in_batches
from kfs_credentials.stores import Address, Receipt, secret_stores
from kfs_credentials.transactions import Fault, fault, short_transaction

logger = logging.getLogger(__name__)

AT_A_TIME = 100
"""Secrets that are read from the store in one call."""


class Verdict(enum.Enum):
    """What lies in clear beside a ref, compared with what the ref resolves to."""

    SAME = "same"
    DIFFERENT = "different"
    NOT_COMPARED = "not compared"  # the ref cannot be read, or the value is too large to be


class Settled(enum.Enum):
    """What became of a value in clear."""

    DONE = "done"
    BEFORE = "done before"
    CHANGED = "changed meanwhile"
    BUSY = "held by somebody else"
    LEAVING = "being deleted"
    TOO_LARGE = "too large"
    INVALID = "not to be stored"  # nested too deep, a tenant id that is no scope
    NOT_TAKEN = "not taken by the store"
    UNREADABLE = "ref unreadable"
    REFUSED = "refused by the database"


class InClear(NamedTuple):
    """A source as it was looked at. Its repr shows no value."""

    source: uuid.UUID
    tenant: str
    space: uuid.UUID
    version: int
    ref: str | None
    shape: str | None
    """What `metadata->'credentials'` is, in the words of `jsonb_typeof`; None if there is no such key."""
    value: Value
    in_use: bool
    """The ledger has the ref as this source's, and active."""
    store: str
    leaving: bool
    """The source or its space is being deleted."""

    @classmethod
    def of(
        cls,
        source: uuid.UUID,
        tenant: str,
        space: uuid.UUID,
        version: int,
        ref: str | None,
        shape: str | None,
        credentials: str | None,
        digest: bytes | None,
        in_use: bool,  # noqa: FBT001
        store: str,
        leaving: bool,  # noqa: FBT001
    ) -> InClear:
        """Make it of the columns of `read.sql`."""
        value = Value(credentials, digest)
        return cls(source, tenant, space, version, ref, shape, value, in_use, store, leaving)

    @property
    def scope(self) -> Scope:
        """Whose secret it is; raises `InvalidScope`."""
        return Scope(self.tenant, self.space, self.source)


class Value(Legacy):
    """Credentials of any shape, as PostgreSQL printed them. Its repr shows nothing.

    `text` is None if they are larger than a batch may be: then there is their `digest`.
    """

    __slots__ = ("_digest",)

    def __init__(self, text: str | None, digest: bytes | None) -> None:
        super().__init__(text)
        self._digest = hide(None if digest is None else bytes(digest))

    def is_still(self, before: Value) -> bool:
        """Return whether it is the same value as `before`, whether or not it was read."""
        return self.same_as(before) and self._digest() == before._digest()

    @sensitive
    def wrapped(self, key: str) -> Plaintext:
        """Return the canonical bytes of `{key: value}`; raises `InvalidCredentials`, `CredentialsTooLarge`."""
        text = self._text()
        if text is None:
            raise CredentialsTooLarge("the credentials are larger than KFS_CREDENTIALS['BATCH_BYTES']")
        return Plaintext.of({key: parse_json(text)})


class _Now(NamedTuple):
    """A source under its lock."""

    version: int
    ref: str | None
    shape: str | None
    value: Value

    @classmethod
    def by_id(
        cls,
        source: uuid.UUID,
        version: int,
        ref: str | None,
        shape: str | None,
        credentials: str | None,
        digest: bytes | None,
    ) -> tuple[uuid.UUID, _Now]:
        """Make it of the columns of `lock.sql`; with the id of the source."""
        return source, cls(version, ref, shape, Value(credentials, digest))

    def is_what_was_looked_at(self, found: InClear) -> bool:
        """Return whether ref and value are as they were. Not by the version: an old writer leaves it as it is."""
        return (self.ref, self.shape) == (found.ref, found.shape) and self.value.is_still(found.value)

    def is_bare(self, found: InClear) -> bool:
        """Return whether it names the ref that was looked at, and nothing lies in clear beside it any more."""
        return (self.ref, self.shape) == (found.ref, None)


# Look.


def read(using: str, sources: Sequence[uuid.UUID], *, tenant: str | None = None) -> Iterator[list[InClear]]:
    """Yield these sources as they are now, in id order, no more than BATCH_BYTES of values at a time. Locks nothing.

    Sources that are gone, or not of the tenant, are left out. Raises a database error.
    """
    for start in range(0, len(sources), AT_A_TIME):
        waiting = set(sources[start : start + AT_A_TIME])
        while waiting:
            found = made(
                InClear.of,
                sql.query(
                    using,
                    "in_clear/read",
                    sources=list(waiting),
                    tenant=tenant,
                    leaving=being_deleted(using),
                    bytes=settings.BATCH_BYTES,
                ),
            )
            if not found:
                break  # the others are gone
            yield found
            waiting -= {one.source for one in found}


def compared(using: str, sources: Sequence[uuid.UUID]) -> Iterator[tuple[InClear, Verdict]]:
    """Yield those of these sources that have a ref and a value in clear, each with what comparing them says.

    As `compared_in_parts` does it.
    """
    for part in compared_in_parts(using, sources):
        yield from part


def compared_in_parts(using: str, sources: Sequence[uuid.UUID]) -> Iterator[list[tuple[InClear, Verdict]]]:
    """Yield the same in parts, none of which holds more than BATCH_BYTES of values.

    Reads the refs' objects; a ref that cannot be read is `NOT_COMPARED`. No transaction is open meanwhile. Raises what
    concerns the store as a whole: then nothing can be said about any of them; and a database error.
    """
    for found in read(using, sources):
        both = [one for one in found if one.ref is not None and one.shape not in (None, Shape.NULL) and not one.leaving]
        stored = _stored(both)
        yield [(one, _verdict(one, stored.get(one.source))) for one in both]


@sensitive
def _stored(both: Sequence[InClear]) -> dict[uuid.UUID, Credentials]:
    """Return, by source, what the refs resolve to, where they can be read."""
    stored: dict[uuid.UUID, Credentials] = {}
    for alias in {one.store for one in both}:
        addresses = {}
        for one in both:
            if one.store == alias and one.in_use and one.shape == Shape.OBJECT:
                try:
                    addresses[one.source] = Address(one.scope, one.ref or "")
                except InvalidScope:
                    continue
        outcomes = secret_stores[alias].get_many(list(addresses.values())) if addresses else []
        read = zip(addresses, outcomes, strict=True)
        stored |= {source: outcome for source, outcome in read if isinstance(outcome, Credentials)}
    return stored


@sensitive
def _verdict(found: InClear, stored: Credentials | None) -> Verdict:
    if found.shape != Shape.OBJECT:
        return Verdict.DIFFERENT  # what is in the store is an object
    if stored is None:
        return Verdict.NOT_COMPARED
    try:
        same = Plaintext.of(stored).exact == found.value.plaintext().exact
    except InvalidCredentials:
        return Verdict.NOT_COMPARED
    return Verdict.SAME if same else Verdict.DIFFERENT


# Remove what is the same.


def scrub_same(using: str, found: Sequence[InClear]) -> set[uuid.UUID]:
    """Remove what lies in clear from these sources, of which `compared` said that it is the same.

    Returns those that have their ref alone now. Not from those that have changed since, or that somebody has locked.
    BATCH_SIZE sources in one transaction, which locks their ledger rows, then the sources, SKIP LOCKED. A source that
    the database refuses to change is left alone. Raises a database error where the database is out of reach.
    """
    scrubbed: set[uuid.UUID] = set()

    def work(part: Sequence[InClear]) -> None:
        try:
            with short_transaction(using):
                for store in {one.store for one in part}:
                    Watch.begin(using, store)
                done = _scrub(using, part, detail="the same value as the ref's")
        except DatabaseError as error:
            if fault(error) is not Fault.DATA:
                raise
        else:
            scrubbed.update(done)
            return
        # A constraint or trigger refused one: find out which. Out here, where the error is gone: it quotes rows.
        if len(part) > 1:
            work(part[: len(part) // 2])
            work(part[len(part) // 2 :])

    in_batches(using, found, work)
    return scrubbed


def _scrub(using: str, found: Sequence[InClear], *, detail: str) -> set[uuid.UUID]:
    """Do it, inside the caller's transaction; return the sources that name their ref, and have nothing in clear now.

    Also those that had nothing any more: somebody was faster, or the commit of an earlier try was not answered.
    """
    refs = [one.ref for one in found if one.ref is not None]
    locked = ledger(using).filter(credential_ref__in=refs).lock(skip_locked=True)
    owners = {
        ref: (tenant, space, source)
        for ref, tenant, space, source, state in locked.values_list(
            "credential_ref", "tenant_id", "knowledge_space_id", "source_id", "state"
        )
        if state == RefState.ACTIVE
    }
    ours = [one for one in found if one.ref and owners.get(one.ref) == (one.tenant, one.space, one.source)]
    now = _locked(using, [one.source for one in ours])
    same = [one for one in ours if one.source in now and now[one.source].is_what_was_looked_at(one)]
    changed = sql.query(using, "in_clear/scrub", sources=[one.source for one in same], refs=[one.ref for one in same])
    record(using, EventKind.SCRUBBED, [ref for _, ref in changed], detail=detail)
    bare = {one.source for one in ours if one.source in now and now[one.source].is_bare(one)}
    return bare | {source for source, _ in changed}


def _locked(using: str, sources: Collection[uuid.UUID]) -> dict[uuid.UUID, _Now]:
    """Lock these sources, SKIP LOCKED; return those that were free, as they are now."""
    if not sources:
        return {}
    # The rows hold values: no variable here ever does.
    query = {"sources": list(sources), "bytes": settings.BATCH_BYTES}
    return dict(made(_Now.by_id, sql.query(using, "in_clear/lock", **query)))


# Settle one that is not the same.


def keep_ref(using: str, found: InClear) -> Settled:
    """Remove what lies in clear beside a ref, whatever it is, once the ref has been read; return what became of it.

    Only if the source is as it was looked at. Locks the ledger row, then the source, SKIP LOCKED. Raises what concerns
    the store as a whole, and a database error.
    """
    if found.leaving:
        return Settled.LEAVING
    if found.ref is None or not found.in_use:
        return Settled.UNREADABLE
    try:
        secret_stores[found.store].get(found.scope, found.ref)
    except (SecretNotFound, SecretIntegrityError, InvalidScope):
        return Settled.UNREADABLE  # what lies in clear is all there is

    watch = check_bound(using, found.store)

    def scrub() -> Settled:
        with short_transaction(using):
            watch.end()
            return Settled.DONE if _scrub(using, [found], detail="a person kept the ref") else Settled.CHANGED

    return _settled(using, scrub)


def keep_plaintext(using: str, found: InClear) -> Settled:
    """Give a source that has a ref what lies in clear there, under a fresh ref; the old one is retired.

    Returns what became of it; only if the source is as it was looked at. Locks as `services.rotate_credentials` does.
    Raises what concerns the store as a whole, and a database error.
    """
    return _move(using, found, found.value.plaintext, detail="a person kept the plaintext")


def wrap(using: str, found: InClear, key: str) -> Settled:
    """Move credentials of a shape that is not supported into the store, as `{key: value}`; return what became of it.

    Only if the source is as it was looked at, and has no ref. Locks as `services.rotate_credentials` does. Raises what
    concerns the store as a whole, and a database error.
    """
    if found.ref is not None and found.in_use and found.shape in (None, Shape.NULL):
        return Settled.BEFORE
    if found.ref is not None or found.shape not in UNSUPPORTED:
        return Settled.CHANGED
    return _move(using, found, lambda: found.value.wrapped(key), detail="moved as the value of a key")


def _move(using: str, found: InClear, make: Callable[[], Plaintext], *, detail: str) -> Settled:
    """Reserve, commit, put, and let the source name the fresh ref, if what lies in clear is what was put."""
    operation = Operation(Purpose.ROTATE, found.tenant, found.space, found.source)
    store = secret_stores["default"]
    try:
        scope, plaintext = operation.scope, make()
    except CredentialsTooLarge:
        return Settled.TOO_LARGE
    except (InvalidCredentials, InvalidScope):
        return Settled.INVALID
    if plaintext.size > settings.MAX_SECRET_BYTES:
        return Settled.TOO_LARGE  # before anything is reserved

    def begin() -> Settled:
        with short_transaction(using):
            keys.hold(using)
            check_admission(using, found.space, found.source)
            keys.refuse_closed(using)
            reserve(using, operation, store=store.alias, size=plaintext.size)
        return Settled.DONE

    if found.leaving:
        return Settled.LEAVING
    watch = ensure_bound(using, store.alias)
    begun = _settled(using, begin)
    if begun is not Settled.DONE:
        return begun
    try:
        receipt = store.put(scope, operation.ref, plaintext, look=watch.look)
    except (StoreUnavailable, StoreDenied, StoreMisconfigured):
        raise
    except SecretStoreError as error:
        logger.warning("what lies in clear in source %s is left there: %s", found.source, error)
        return Settled.NOT_TAKEN  # this one alone; what is reserved is taken back

    def activate() -> Settled:
        with short_transaction(using):
            settled = _activate(using, found, operation, receipt, detail)
            watch.end()
        return settled

    return _settled(using, activate)


def _activate(using: str, found: InClear, operation: Operation, receipt: Receipt, detail: str) -> Settled:
    """Do it, inside the caller's transaction, if what lies in clear is what was looked at."""
    refs = [operation.ref, *([found.ref] if found.ref else [])]
    keys.hold(using)
    # As `point` does it next; but what lies in clear has to be looked at under the locks before it removes it.
    list(ledger(using).filter(credential_ref__in=refs).lock(nowait=True).values_list("pk"))
    now = _locked(using, [found.source]).get(found.source)
    if now is None:
        return Settled.BUSY
    if now.ref == operation.ref:
        return Settled.DONE  # the commit of an earlier try was not answered, and took place
    if not now.is_what_was_looked_at(found):
        return Settled.CHANGED
    point(
        using,
        tenant=found.tenant,
        source=found.source,
        operation=operation,
        ref=operation.ref,
        receipt=receipt,
        why_scrubbed=detail,
    )
    # It was about what is gone now: what lies in clear later has to be looked at again.
    Acknowledgement.objects.using(using).filter(pk=found.source).delete()
    return Settled.DONE


def _settled(using: str, work: Callable[[], Settled]) -> Settled:
    """Do `work`, which is one transaction; again where the database was busy. Raises a database error."""
    result = Settled.BUSY

    def once(_: Sequence[None]) -> None:
        nonlocal result
        result = work()

    try:
        in_batches(using, [None], once)
    except BeingDeleted:
        return Settled.LEAVING
    except MutationFailed:
        return Settled.REFUSED  # a trigger left the source as it was
    except (Moved, ServiceError):
        return Settled.CHANGED
    except (DatabaseError, InterfaceError) as error:
        if isinstance(error.__cause__, LockNotAvailable):
            result = Settled.BUSY
        elif fault(error) is Fault.DATA:
            result = Settled.REFUSED
        else:
            raise
    return result

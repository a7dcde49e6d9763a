"""The two transactions that put a ref into use: reserve and point. Create, rotate, revoke and the rescue share them.

Between them the store keeps the secret, and no transaction is open. What is reserved and never used is taken back by
the cleanup, past `recover_after`; nothing here is ever undone.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Now

from kfs_credentials import keys, sql
from kfs_credentials.audit import announce, current_actor, record, record_sources
from kfs_credentials.conf import key_ring, settings
from kfs_credentials.crypto import Scope, new_ref, validate_ref
from kfs_credentials.errors import (
    BeingDeleted,
    InvalidRef,
    MutationFailed,
    OperationOver,
    SourceNotFound,
    SpaceNotFound,
    VersionConflict,
)
from kfs_credentials.models import EventKind, Purpose, RefState, SecretObject, Shape, Source, SourceCredentialBackfill
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.models.knowledge_space import being_deleted
from kfs_credentials.models.ledger import RESERVED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfs_credentials.models.ledger import LedgerQuerySet
    from kfs_credentials.stores import Receipt

OPERATIONS = uuid.UUID("6d1d3f0e-5a53-4f4e-9a0c-8f1d6f2b7a11")
"""The namespace of the ids that are made of an operation's id (RFC 9562, version 5)."""


AT_A_TIME = 10_000
"""The most refs in one statement: a space may have a million."""


class Moved(Exception):
    """The source names another ref than it did a moment ago: the transaction has to begin anew."""


@dataclass(frozen=True)
class Operation:
    """One create or rotate: whose secret, under which new ref. Repeated with the same id, it is the same operation."""

    purpose: Purpose
    tenant: str
    space: uuid.UUID
    source: uuid.UUID
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    ref: str = field(default_factory=new_ref)

    @property
    def row_id(self) -> uuid.UUID:
        """The id of its ledger row."""
        return operation_uuid(self.purpose, self.tenant, self.id)

    @property
    def scope(self) -> Scope:
        """Whose secret it is; raises `InvalidScope`."""
        return Scope(self.tenant, self.space, self.source)


def operation_uuid(purpose: str, tenant: str, operation_id: str) -> uuid.UUID:
    """Return the UUID that stands for an operation of this tenant."""
    return uuid.uuid5(OPERATIONS, f"{purpose}\n{tenant}\n{operation_id}")


class Reserved(NamedTuple):
    """The ledger row of an operation: its own ref, or that of the first call with the same id."""

    ref: str
    state: str


def ledger(using: str) -> LedgerQuerySet:
    """Return the ledger of alias `using`."""
    rows: LedgerQuerySet = LedgerRow.objects.using(using).all()
    return rows


def check_admission(using: str, space: uuid.UUID, source: uuid.UUID | None = None) -> None:
    """Raise `BeingDeleted` if a deletion is at work on the space or the source. Locks nothing."""
    if {space, source}.intersection(being_deleted(using)):
        raise BeingDeleted


def lock_space(using: str, tenant: str, space: uuid.UUID) -> None:
    """Keep the space from being deleted until this transaction is over.

    Locks it FOR KEY SHARE, NOWAIT. Raises `SpaceNotFound`, `BeingDeleted`.
    """
    if not sql.query(using, "services/lock_space", tenant=tenant, space=space):
        raise SpaceNotFound
    check_admission(using, space)


def reserve(
    using: str, operation: Operation, *, store: str, size: int, event: EventKind = EventKind.RESERVED
) -> Reserved:
    """Reserve the operation's ref, unless an earlier call with the same id has; return the row that counts.

    Inside the caller's transaction, to be committed before a byte is written. `size`: of the plaintext, in bytes.
    `event`: how it came about. Raises `OperationOver` if the id was used for another source, or if its ref was given up
    meanwhile.
    """
    reserved = sql.query(
        using,
        "services/reserve",
        id=operation.row_id,
        tenant=operation.tenant,
        space=operation.space,
        source=operation.source,
        ref=operation.ref,
        operation=operation.id,
        purpose=operation.purpose.value,
        recover_after=settings.RECOVER_AFTER,
        store=store,
        key_id=key_ring().primary.id,
        size=size,
        event=event.value,
        actor=current_actor(),
    )
    announce(using, event, [ref for (ref,) in reserved])
    fields = ("tenant_id", "knowledge_space_id", "source_id", "credential_ref", "state")
    *owner, ref, state = ledger(using).filter(pk=operation.row_id).values_list(*fields).get()
    if owner != [operation.tenant, operation.space, operation.source]:
        raise OperationOver(f"operation '{operation.id}' is about another source: give each operation its own id")
    return Reserved(ref, _usable(operation, state))


def lock_reserved(using: str, operation: Operation, ref: str) -> str:
    """Lock the operation's ledger row, NOWAIT; return its state, `staged` or `active`. Raises `OperationOver`."""
    row = ledger(using).filter(credential_ref=ref).lock(nowait=True).values_list("state", flat=True)
    return _usable(operation, next(iter(row), RefState.DELETED))


def _usable(operation: Operation, state: str) -> str:
    if state not in (RefState.STAGED, RefState.ACTIVE):
        raise OperationOver(
            f"operation '{operation.id}' was not finished in time (KFS_CREDENTIALS['RECOVER_AFTER']), or what it made "
            "was replaced since: begin a new one"
        )
    return state


def note_receipt(using: str, ref: str, receipt: Receipt) -> None:
    """Note what the store has put, if it is not what was reserved: the key ring may have changed in between.

    Inside the caller's transaction, which has locked the ledger row.
    """
    objects = SecretObject.objects.using(using).filter(pk=ref).exclude(key_id=receipt.key_id, size=receipt.size)
    objects.update(key_id=receipt.key_id, size=receipt.size, updated_at=Now())


def note_claim(using: str, rows: LedgerQuerySet) -> dict[str, tuple[str, bool]]:
    """Note that these refs are claimed for erasure, or were; return by ref its store and whether its horizon is over.

    The caller has locked the rows, and changes them afterwards.
    """
    ids = list(rows.values_list("pk", flat=True))
    found = sql.query(using, "cleanup/claimed", rows=ids, horizon=settings.LATE_WRITE_HORIZON)
    return {ref: (store, confirms) for ref, store, confirms in found}


def held(using: str) -> LedgerQuerySet:
    """Return the refs that are reserved, in use, or without a time for their erasure: whose owner has to let them go.

    What a person has given up on is nobody's any more.
    """
    abandoned = SecretObject.objects.filter(pk=OuterRef("credential_ref"), abandoned_at__isnull=False)
    undated = Q(~Exists(abandoned), state=RefState.RETIRED, next_delete_at__isnull=True)
    return ledger(using).filter(Q(state__in=(*RESERVED, RefState.ACTIVE)) | undated)


def let_go(using: str, refs: Sequence[str]) -> None:
    """Retire these refs, which the caller has locked and found among those that are `held`."""
    for start in range(0, len(refs), AT_A_TIME):
        some = refs[start : start + AT_A_TIME]
        ledger(using).filter(credential_ref__in=some).retire()
        SecretObject.objects.using(using).needing_attention().mark(some, None)


def point(
    using: str,
    *,
    tenant: str,
    source: uuid.UUID,
    operation: Operation | None,
    ref: str | None,
    expected_version: int | None = None,
    from_ref: str | None = None,
    scrub: bool = True,
    receipt: Receipt | None = None,
    event: EventKind = EventKind.ACTIVATED,
    why_scrubbed: str | None = None,
) -> None:
    """Let a source name `ref` (reserved by `operation`), or none, and retire what it named before.

    Inside the caller's transaction. `expected_version`: the only version that will do, if any. `from_ref`: the only
    ref that the source may name now, if any. `scrub`: remove what lies in clear, in the same moment; that
    leaves an event of its own, with `why_scrubbed`. `receipt`: of the put; it is noted, and its key must not be closed.
    `event`: how `ref` came into use. Repeating what was committed before changes nothing.

    Locks, all NOWAIT: the ledger rows of both refs, in id order, then the source. Raises `SourceNotFound`,
    `BeingDeleted`, `VersionConflict`, `OperationOver`, `MutationFailed` if a trigger keeps the source as it is,
    `KeyClosed`, and `Moved` if the source names another ref meanwhile. With a receipt it holds the keys: see `keys`.
    """
    if receipt is not None:
        keys.hold(using)
    # Without a lock first: the ledger's rows come before the source's, and which rows these are, the source says.
    seen = sql.query(using, "services/find", tenant=tenant, source=source)
    if not seen:
        raise SourceNotFound
    ((space, version, before, _),) = seen
    own = held(using).filter(tenant_id=tenant, knowledge_space_id=space, source_id=source)
    # Whoever revokes lets go of everything, what waits for a person included.
    others = own.retired().exclude(credential_ref=before)
    waiting = [] if ref is not None else list(others.values_list("credential_ref", flat=True))
    refs = [one for one in (ref, before, *waiting) if one]
    locked = {row.credential_ref: row for row in ledger(using).filter(credential_ref__in=refs).lock(nowait=True)}
    if operation is not None and ref is not None:
        state = _usable(operation, locked[ref].state if ref in locked else RefState.DELETED)
        if state == RefState.ACTIVE:
            # The commit of an earlier call was not answered, and took place.
            return
    source_now = sql.query(using, "services/lock_source", tenant=tenant, source=source)
    if not source_now:
        raise SourceNotFound
    _, version, named, status, shape = source_now[0]
    if named != before or from_ref not in (None, named):
        raise Moved
    if status == Source.DELETING:
        raise BeingDeleted
    check_admission(using, space, source)
    waiting = list(own.retired().filter(credential_ref__in=waiting).values_list("credential_ref", flat=True))
    if ref is None and named is None and shape is None and not waiting:
        return
    if expected_version is not None and version != expected_version:
        raise VersionConflict(expected_version, version)
    if receipt is not None:
        keys.refuse_closed(using, receipt.key_id)
    version = _point_source(using, tenant, source, ref, scrub=scrub)
    if ref is not None:
        ledger(using).filter(credential_ref=ref).activate(version, event=event)
        if receipt is not None:
            note_receipt(using, ref, receipt)
    if scrub and shape not in (None, Shape.NULL):
        _note_scrub(using, source, ref, why_scrubbed)
    if named not in (None, ref):  # a source may name already what is only reserved for it
        _retire(using, named, tenant=tenant, space=space, source=source)
    let_go(using, waiting)
    _supersede(using, source)


def _point_source(using: str, tenant: str, source: uuid.UUID, ref: str | None, *, scrub: bool) -> int:
    """Do it, and return the version that the source has now; raises `MutationFailed`."""
    if scrub or ref is None:
        pointed = [version for (version,) in sql.query(using, "services/point_source", source=source, ref=ref)]
    else:
        sql.run_block(using, "services/point_source_only", source=str(source), ref=ref)
        found = sql.query(using, "services/find", tenant=tenant, source=source)
        pointed = [version for _, version, named, _ in found if named == ref]
    if not pointed:
        raise MutationFailed("a trigger of the database left the source as it was")
    return int(pointed[0])


def _note_scrub(using: str, source: uuid.UUID, ref: str | None, why: str | None) -> None:
    """Note that what lay in clear in a source is in dead rows from now on: by this, verify_credentials knows of it."""
    if ref is None:
        record_sources(using, EventKind.SCRUBBED, [source], detail=why)
    else:
        record(using, EventKind.SCRUBBED, [ref], detail=why)


def _retire(using: str, ref: str, *, tenant: str, space: uuid.UUID, source: uuid.UUID) -> None:
    """Retire the ref that the source named, if it is its own and nothing else became of it before."""
    rows = ledger(using).filter(credential_ref=ref)
    if not rows.exists():
        _adopt_retired(using, ref, tenant=tenant, space=space, source=source)
        return
    if held(using).filter(credential_ref=ref, tenant_id=tenant, knowledge_space_id=space, source_id=source).exists():
        let_go(using, [ref])


def _adopt_retired(using: str, ref: str, *, tenant: str, space: uuid.UUID, source: uuid.UUID) -> None:
    """Give a ref that the ledger does not know its row, so that its object is erased too."""
    try:
        validate_ref(ref)
    except InvalidRef:
        return  # no object can be there
    adopted = Operation(Purpose.ROTATE, tenant, space, source, id=f"legacy-source:{source}:{ref}", ref=ref)
    reserve(using, adopted, store="default", size=0, event=EventKind.ADOPTED)
    SecretObject.objects.using(using).filter(pk=ref).update(key_id=None, size=None)
    ledger(using).filter(credential_ref=ref).retire()


def _supersede(using: str, source: uuid.UUID) -> None:
    """End the source's failed job: there is nothing left that it could move. A running one finds out by itself."""
    # After the source, against the order, and so SKIP LOCKED.
    jobs = SourceCredentialBackfill.objects.using(using)
    failed = jobs.filter(source_id=source).failed().select_for_update(skip_locked=True, no_key=True)
    jobs.filter(pk__in=list(failed.values_list("pk", flat=True))).supersede()

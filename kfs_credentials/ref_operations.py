"""What an operator decides about refs: to erase again, to give up, and which one of two a source names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from django.db import OperationalError
from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Now
from psycopg.errors import LockNotAvailable

from kfs_credentials import sql
from kfs_credentials.errors import ServiceError
from kfs_credentials.ledger import Moved, ledger, point
from kfs_credentials.models import (
    Attention,
    EventKind,
    RefError,
    RefState,
    SecretObject,
    Source,
    SourceSecretLifecycleRef,
)
from kfs_credentials.models.ledger import RESERVED
from kfs_credentials.models.secret_object import PARKED
from kfs_credentials.operations import in_batches
from kfs_credentials.transactions import short_transaction

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Sequence

    from kfs_credentials.models.ledger import LedgerQuerySet

    Rows = Sequence[tuple[uuid.UUID, int | None]]
    """Ids of ledger rows with their row versions; None takes any version."""


@dataclass
class RefResult:
    """What became of the refs that were chosen: how many of each."""

    done: int = 0
    changed: int = 0
    """Somebody else was faster: the row version differs, it is nothing to decide about any more, or it is locked."""
    missing: int = 0

    def __add__(self, other: RefResult) -> RefResult:
        return RefResult(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


# Which refs there is something to decide about.


def parked(refs: LedgerQuerySet) -> LedgerQuerySet:
    """Return those whose object the store does not erase, and which nobody has given up on."""
    waiting = SecretObject.objects.filter(
        pk=OuterRef("credential_ref"), attention__in=PARKED, abandoned_at__isnull=True
    )
    return refs.retired().filter(Exists(waiting))


def abandonable(refs: LedgerQuerySet) -> LedgerQuerySet:
    """Return the parked ones that no source names."""
    return parked(refs).unnamed()


def discardable(refs: LedgerQuerySet) -> LedgerQuerySet:
    """Return the displaced ones that no source names."""
    return refs.filter(_is_displaced()).unnamed()


def restorable(refs: LedgerQuerySet) -> LedgerQuerySet:
    """Return those that their source could name again: it names another ref now.

    They are the displaced ones; and active ones that can be read, while what their source names is not in use. Never
    one that was claimed for erasure: whoever claimed it may still act.
    """
    names_another = Source.objects.referenced().filter(
        ~Q(credential_ref=OuterRef("credential_ref")),
        pk=OuterRef("source_id"),
        knowledge_space_id=OuterRef("knowledge_space_id"),
        knowledge_space__tenant_id=OuterRef("tenant_id"),
    )
    in_use = SourceSecretLifecycleRef.objects.filter(
        credential_ref=OuterRef("credential_ref"), source_id=OuterRef("pk"), state__in=(*RESERVED, RefState.ACTIVE)
    )
    active = Q(Exists(names_another.filter(~Exists(in_use))), state=RefState.ACTIVE)
    return refs.never_claimed().filter(active | (_is_displaced() & Q(Exists(names_another))))


def _is_displaced() -> Q:
    """Return the condition that a ref waits, since an old writer brought back an older one."""
    waiting = SecretObject.objects.filter(pk=OuterRef("credential_ref"), attention=Attention.DISPLACED)
    return Q(Exists(waiting), state=RefState.RETIRED, next_delete_at__isnull=True)


# The decisions. Each works in transactions of its own, and raises a database error where the database is out of
# reach, or busy for too long; what was done before stays done. Rows that somebody has locked are not waited for.


def erase_again(using: str, rows: Rows) -> RefResult:
    """Let parked refs be erased as soon as a worker comes to it; return how many.

    Their attempts stay counted, so that one more failure parks them again. Locks BATCH_SIZE ledger rows at a time,
    SKIP LOCKED.
    """

    def move(refs: LedgerQuerySet, objects: Sequence[str]) -> None:
        refs.erase_again(EventKind.ERASE_AGAIN)
        SecretObject.objects.using(using).mark(objects, None)

    return _decide(using, rows, parked, move)


def abandon(using: str, rows: Rows, *, by: str, reason: str) -> RefResult:
    """Give up on parked refs; return how many. Each is recorded as not erased, and is never due again.

    A ref that some source names is left alone. `by`: who decides. Raises `ValueError` if no reason is given. Locks
    BATCH_SIZE ledger rows at a time, SKIP LOCKED.
    """
    if not reason.strip() or "\x00" in reason:
        raise ValueError(
            "Give a reason, as text without the character U+0000: nothing else will tell why these secrets were not "
            "erased."
        )

    def move(refs: LedgerQuerySet, objects: Sequence[str]) -> None:
        refs.keep(RefError.ABANDONED)
        SecretObject.objects.using(using).filter(pk__in=objects).update(
            abandoned_at=Now(), abandoned_by=by, abandoned_reason=reason.strip(), attention=None, updated_at=Now()
        )

    return _decide(using, rows, abandonable, move)


def discard(using: str, rows: Rows) -> RefResult:
    """Let displaced refs go: they are erased after the grace; return how many.

    A ref that some source names is left alone. Locks BATCH_SIZE ledger rows at a time, SKIP LOCKED.
    """

    def move(refs: LedgerQuerySet, objects: Sequence[str]) -> None:
        refs.retire(event=EventKind.DISCARDED)
        SecretObject.objects.using(using).mark(objects, None)

    return _decide(using, rows, discardable, move)


def restore(using: str, rows: Rows) -> RefResult:
    """Let the sources of these refs name them again; return how many. What they name now is retired.

    A ref whose source is gone, is being deleted, or names none is left alone. One transaction each: locks the ledger
    rows of both refs, in id order, then the source, all NOWAIT.
    """
    result = RefResult()

    def work(part: Rows) -> None:
        nonlocal result
        ((row, version),) = part
        result += _restore(using, row, version)

    in_batches(using, rows, work, size=1)
    return result


def _decide(
    using: str,
    rows: Rows,
    which: Callable[[LedgerQuerySet], LedgerQuerySet],
    move: Callable[[LedgerQuerySet, Sequence[str]], None],
) -> RefResult:
    """Make one `move` of all of these rows that are among `which` once they are locked."""
    result = RefResult()

    def work(part: Rows) -> None:
        nonlocal result
        versions = dict(part)
        refs = ledger(using).filter(pk__in=list(versions))
        with short_transaction(using):
            known = refs.count()
            locked = refs.lock(skip_locked=True).values_list("pk", "row_version")
            seen = [row for row, version in locked if versions[row] in (None, version)]
            # In a second statement: what was committed before the lock was granted is seen by it.
            chosen = dict(which(refs.filter(pk__in=seen)).values_list("pk", "credential_ref"))
            move(refs.filter(pk__in=list(chosen)), list(chosen.values()))
        result += RefResult(len(chosen), known - len(chosen), len(versions) - known)

    in_batches(using, rows, work)
    return result


def _restore(using: str, row: uuid.UUID, version: int | None) -> RefResult:
    """Restore one ref, and count it."""
    refs = ledger(using)
    try:
        with short_transaction(using):
            found = refs.filter(pk=row).values_list("tenant_id", "source_id", "credential_ref").first()
            if found is None:
                return RefResult(missing=1)
            tenant, source, ref = found
            seen = sql.query(using, "services/find", tenant=tenant, source=source)
            before = seen[0][2] if seen else None
            both = refs.filter(credential_ref__in=[one for one in (ref, before) if one]).lock(nowait=True)
            now = dict(both.values_list("pk", "row_version"))
            # Locked before it is looked at: by then nothing of what `restorable` asks about can change.
            sql.query(using, "services/lock_source", tenant=tenant, source=source)
            if now.get(row) is None or version not in (None, now[row]) or not restorable(refs.filter(pk=row)).exists():
                return RefResult(changed=1)
            point(
                using,
                tenant=tenant,
                source=source,
                operation=None,
                ref=ref,
                from_ref=before,
                scrub=False,
                event=EventKind.RESTORED,
            )
            SecretObject.objects.using(using).mark([ref], None)
    except (ServiceError, Moved):
        return RefResult(changed=1)
    except OperationalError as error:
        if not isinstance(error.__cause__, LockNotAvailable):
            raise
        return RefResult(changed=1)
    return RefResult(done=1)

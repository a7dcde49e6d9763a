"""What an operator decides: to try a failed job again, or to leave credentials where they are."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from django.db import DatabaseError, InterfaceError, connections
from django.db.models.functions import Now

from kfs_credentials.audit import record, record_sources
from kfs_credentials.backfill import (
    finish,
    lock_ledger,
    lock_sources,
    locked_elsewhere,
    requeue_with_fresh_candidates,
)
from kfs_credentials.batch import Item
from kfs_credentials.conf import settings
from kfs_credentials.keys import hold
from kfs_credentials.models import (
    AcknowledgedShape,
    Acknowledgement,
    EventKind,
    RefState,
    RunState,
    SourceCredentialBackfill,
)
from kfs_credentials.selection import Selection, is_acknowledged
from kfs_credentials.transactions import TRIES, Fault, fault, pause_before_try, short_transaction

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Collection, Iterator, Sequence

T = TypeVar("T")


@dataclass
class RetryResult:
    """What became of the jobs that were to be retried: how many of each."""

    queued: int = 0
    ended: int = 0
    """Nothing is left to move: the source is gone, has a ref, or has no legacy credentials. The job succeeded."""
    changed: int = 0
    """Somebody else was faster: the row version differs, it is not failed any more, or it is locked now."""
    missing: int = 0

    def __add__(self, other: RetryResult) -> RetryResult:
        return RetryResult(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


def retry_failed_jobs(
    using: str, rows: Sequence[tuple[uuid.UUID, int | None]], *, store: str = "default"
) -> RetryResult:
    """Queue failed jobs again, each with a fresh candidate; return how many became what.

    `rows`: pairs of job id and row version; a job whose version is another one by now is left alone, None takes
    any. Works in transactions of its own, BATCH_SIZE jobs each. Locks ledger rows, then jobs and sources (SKIP
    LOCKED). Raises a database error where the database is out of reach, or busy for too long; the batches before
    are done then.
    """
    result = RetryResult()
    in_batches(using, rows, lambda part: _retry(using, dict(part), store, result))
    return result


def _retry(using: str, versions: dict[uuid.UUID, int | None], store: str, result: RetryResult) -> None:
    jobs = SourceCredentialBackfill.objects.using(using)
    with short_transaction(using):
        hold(using)
        # Read first, to know which ledger rows to lock; the jobs, which come after them, are then looked at again.
        fields = ("id", "tenant_id", "knowledge_space_id", "source_id")
        refs = ("candidate_credential_ref", "secret_fingerprint")
        items = [Item(*row) for row in jobs.filter(pk__in=list(versions)).values_list(*fields, *refs)]
        lock_ledger(using, items)
        locked = jobs.failed().filter(pk__in=list(versions)).order_by("id")
        now = {
            job: (version, ref)
            for job, version, ref in locked.select_for_update(skip_locked=True, no_key=True).values_list(
                "id", "row_version", "candidate_credential_ref"
            )
        }
        ours = [
            item
            for item in items
            if item.job_id in now
            and now[item.job_id][1] == item.ref
            and versions[item.job_id] in (None, now[item.job_id][0])
        ]
        sources = lock_sources(using, ours)
        elsewhere = locked_elsewhere(using, ours, sources)
        again, over, named = [], [], []
        for item in ours:
            source = sources.get(item.source_id)
            if source is None:
                if item.source_id not in elsewhere:
                    over.append(item)
            elif source.ref == item.ref:
                item.version = source.version
                named.append(item)
            elif source.ref is not None or source.legacy is None:
                over.append(item)
            else:
                item.version, item.legacy = source.version, source.legacy
                again.append(item)
        if again:
            requeue_with_fresh_candidates(using, store, again)
            record(using, EventKind.JOB_RETRIED, [item.ref for item in again])
        finish(using, over, RunState.SUCCEEDED, RefState.RETIRED)
        finish(using, named, RunState.SUCCEEDED, RefState.ACTIVE)
    result.queued += len(again)
    result.ended += len(over) + len(named)
    result.missing += len(versions) - len(items)
    result.changed += len(items) - len(again) - len(over) - len(named)


@dataclass(frozen=True)
class Unsettled:
    """A source whose credentials cannot be moved as they are, and which nobody has acknowledged."""

    source_id: uuid.UUID
    tenant_id: str
    shape: str
    """A value of `AcknowledgedShape`."""


def unsettled(using: str, *, tenant: str | None = None, space: uuid.UUID | None = None) -> Iterator[Unsettled]:
    """Yield the sources whose credentials are unsupported or too large and not acknowledged, each of them once.

    First the unsupported ones, then the too large ones, by id. Sources that are being deleted are left out.
    """
    rows = Selection.of(using, tenant=tenant, space=space)
    unsupported = rows.unsupported().exclude(is_acknowledged("pk", "shape"))
    for found in unsupported.order_by("pk").values_list("pk", "knowledge_space__tenant_id", "shape"):
        yield Unsettled(*found)
    too_large = rows.too_large().exclude(is_acknowledged("source_id", AcknowledgedShape.TOO_LARGE))
    for source_id, tenant_id in too_large.order_by("source_id").values_list("source_id", "tenant_id"):
        yield Unsettled(source_id, tenant_id, AcknowledgedShape.TOO_LARGE.value)


def settled(using: str, sources: Collection[uuid.UUID]) -> set[uuid.UUID]:
    """Return those of these sources that are acknowledged as they are now."""
    rows = Selection.of(using)
    unsupported = rows.unsupported().filter(is_acknowledged("pk", "shape"), pk__in=sources)
    too_large = rows.too_large().filter(
        is_acknowledged("source_id", AcknowledgedShape.TOO_LARGE), source_id__in=sources
    )
    return {*unsupported.values_list("pk", flat=True), *too_large.values_list("source_id", flat=True)}


def acknowledge(using: str, found: Sequence[Unsettled], *, by: str) -> int:
    """Note that `by` has seen these; return how many. They stay where they are, in clear, and count as looked at.

    What is noted is the shape that was seen: credentials that have another one by now are not acknowledged. Works
    in transactions of its own, BATCH_SIZE sources each; raises as `retry_failed_jobs` does.
    """

    def note(part: Sequence[Unsettled]) -> None:
        with short_transaction(using):
            Acknowledgement.objects.using(using).bulk_create(
                [
                    Acknowledgement(source_id=one.source_id, shape=one.shape, acknowledged_by=by, acknowledged_at=Now())
                    for one in part
                ],
                update_conflicts=True,
                unique_fields=["source_id"],
                update_fields=["shape", "acknowledged_by", "acknowledged_at"],
            )
            for shape in sorted({one.shape for one in part}):
                same = [one.source_id for one in part if one.shape == shape]
                record_sources(using, EventKind.ACKNOWLEDGED, same, detail=shape)

    in_batches(using, found, note)
    return len(found)


def in_batches(
    using: str, rows: Sequence[T], work: Callable[[Sequence[T]], object], *, size: int | None = None
) -> None:
    """Call `work`, which is one transaction, with a batch of rows at a time; again where the database was busy.

    `size`: of a batch (default: BATCH_SIZE). Raises a database error where nothing helps.
    """
    start, size, failures = 0, size or settings.BATCH_SIZE, 0
    while part := rows[start : start + size]:
        try:
            work(part)
        except (DatabaseError, InterfaceError) as error:
            meaning = fault(error)
            failures += 1
            if failures == TRIES or meaning not in (Fault.PASSING, Fault.TOO_MUCH):
                raise
        else:
            start, failures = start + len(part), 0
            continue
        connections[using].close_if_unusable_or_obsolete()
        if meaning is Fault.TOO_MUCH:
            size = max(1, size // 2)
        time.sleep(pause_before_try(failures))

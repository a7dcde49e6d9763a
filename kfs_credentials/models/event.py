"""Table `kfs_credentials_event`: who did what to which ref, and when. Never a value. Rows are added, and purged."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, Never

from django.db import models, transaction
from django.utils.translation import gettext_lazy as _

from kfs_credentials import sql
from kfs_credentials.actor import current_actor
from kfs_credentials.models.schema import SeedIndex
from kfs_credentials.signals import refs_moved


class EventKind(models.TextChoices):
    """What can have happened. Claiming, renewing and releasing a lease are no events."""

    # To a ref.
    RESERVED = "reserved", _("reserved")
    ACTIVATED = "activated", _("activated")
    RETIRED = "retired", _("retired")
    ERASED = "erased", _("erased")
    CONFIRMED = "confirmed", _("erasure confirmed")
    ERASURE_FAILED = "erasure_failed", _("erasure failed")
    PARKED = "parked", _("erasure parked")
    RETAINED = "retained", _("retained by the store")
    HELD = "held", _("held, since a source names it")
    REINSTATED = "reinstated", _("brought back by a stale save")
    DISPLACED = "displaced", _("displaced")
    UNREADABLE = "unreadable", _("named, and cannot be read")
    RESCUED = "rescued", _("activated as a rescued copy")
    ADOPTED = "adopted", _("registered, since a source names it")
    LATE_WRITE = "late_write", _("found after its erasure")
    FORGOTTEN = "forgotten", _("forgotten")
    REENCRYPTED = "reencrypted", _("re-encrypted")
    SCRUBBED = "scrubbed", _("plaintext removed")
    # By a person.
    ERASE_AGAIN = "erase_again", _("to be erased again, on request")
    ABANDONED = "abandoned", _("abandoned")
    RESTORED = "restored", _("restored")
    DISCARDED = "discarded", _("discarded")
    # To a job, and so to its candidate.
    JOB_FAILED = "job_failed", _("backfill failed")
    JOB_RETRIED = "job_retried", _("backfill retried, on request")
    # To a source without a ref, or to the whole.
    ACKNOWLEDGED = "acknowledged", _("acknowledged")
    BOUND = "bound", _("bound")
    PAUSED = "paused", _("paused")
    RESUMED = "resumed", _("resumed")
    KEY_CLOSED = "key_closed", _("key closed")
    KEY_OPENED = "key_opened", _("key opened again")


def announce(using: str, kind: EventKind, refs: Collection[str], *, detail: str | None = None) -> None:
    """Send `refs_moved` once the caller's transaction is committed; nothing, if it is rolled back."""
    if refs:
        moved = {"using": using, "kind": kind, "refs": tuple(refs), "actor": current_actor(), "detail": detail}
        transaction.on_commit(partial(refs_moved.send_robust, Event, **moved), using=using, robust=True)


class EventQuerySet(models.QuerySet["Event"]):
    """Which events. There is no way to change one."""

    def note(self, kind: EventKind, refs: Collection[str], *, detail: str | None = None) -> None:
        """Write that this has become of these refs of the ledger, in one statement; announce it after the commit."""
        if refs:
            parameters = {"kind": kind.value, "actor": current_actor(), "refs": list(refs), "detail": detail}
            written = sql.query(self.db, "audit/record", **parameters)
            announce(self.db, kind, [ref for (ref,) in written], detail=detail)

    def purge(self, older_than: float, limit: int) -> int:
        """Delete those of the `limit` oldest that are older, in seconds; return how many. Locks them, SKIP LOCKED."""
        return len(sql.query(self.db, "audit/purge", retention=older_than, limit=limit))

    def update(self, **_: Any) -> Never:
        """Refuse."""
        raise TypeError(APPEND_ONLY)

    def delete(self) -> Never:
        """Refuse."""
        raise TypeError(APPEND_ONLY)


APPEND_ONLY = "events are never changed, and only deleted when EVENT_RETENTION is over: the cleanup does that"


class Event(models.Model):
    """One move of one ref, or one act of an operator. Written in the transaction of the move itself."""

    id = models.BigAutoField(primary_key=True)
    created_at = models.DateTimeField(_("at"))
    kind = models.TextField(_("event"))  # an EventKind: no choices, so that a new kind is no migration
    actor = models.TextField(_("actor"))
    credential_ref = models.TextField(_("credential ref"), null=True, blank=True)  # noqa: DJ001 - NULL: not about a ref
    tenant_id = models.TextField(_("tenant"), null=True, blank=True)  # noqa: DJ001 - NULL: not about a source
    knowledge_space_id = models.UUIDField(_("knowledge space"), null=True, blank=True)
    source_id = models.UUIDField(_("source"), null=True, blank=True)
    detail = models.TextField(_("detail"), null=True, blank=True)  # noqa: DJ001 - NULL: nothing to add

    objects = EventQuerySet.as_manager()

    class Meta:
        db_table = "kfs_credentials_event"
        verbose_name = _("event")
        verbose_name_plural = _("events")
        indexes = [
            SeedIndex(fields=["credential_ref", "id"], name="kfs_credentials_event_ref_idx"),
            SeedIndex(fields=["kind", "created_at"], name="kfs_credentials_event_kind_idx"),
        ]

    def __str__(self) -> str:
        return self.kind

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Add it; refuse to change one."""
        if not self._state.adding:
            raise TypeError(APPEND_ONLY)
        super().save(*args, **kwargs)

    def delete(self, *_: Any, **__: Any) -> Never:
        """Refuse."""
        raise TypeError(APPEND_ONLY)

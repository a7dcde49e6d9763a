r"""Table `source_secret_lifecycle_refs`, the ledger: one row per ref, no foreign keys, outlives its source.

    staged ----> active ----> retired ----> deleting ----> deleted ----> (horizon) deleting -> deleted: final
    candidate -> active          ^              |
        \------> retired         +--------------+ retry later

A ref that was ever `deleting` is never active again: an eraser that was frozen since may still act.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

from django.db import models
from django.db.models import Case, Count, Exists, F, Min, OuterRef, Q, Value, When
from django.db.models.functions import Greatest, Least, Now
from django.utils.translation import gettext_lazy as _

from kfs_credentials.conf import settings
from kfs_credentials.leases import ErrorCode, LeasedQuerySet, LeasedRow, seconds_from_now
from kfs_credentials.models.backfill import RunState, SourceCredentialBackfill
from kfs_credentials.models.event import Event, EventKind
from kfs_credentials.models.schema import SeedIndex
from kfs_credentials.models.secret_object import Attention, Receipt, SecretObject
from kfs_credentials.models.source import Source
from kfs_credentials.redaction import short_ref

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfs_credentials.leases import Lease


class RefState(models.TextChoices):
    """The states of a ref, each with the moves that leave it."""

    STAGED = "staged", _("staged")  # create, rotate -> active; unused past recover_after -> retired
    CANDIDATE = "candidate", _("candidate")  # activate -> active; refresh, abandon, fail -> retired
    ACTIVE = "active", _("active")  # rotate, revoke, delete; no source names it any more -> retired
    RETIRED = "retired", _("retired")  # due, claimed for erasure -> deleting; named, never claimed -> active
    DELETING = "deleting", _("deleting")  # the store confirms -> deleted; it does not -> retired, later
    DELETED = "deleted", _("deleted")  # after the horizon, once more -> deleting -> deleted: final; -> purged


class Purpose(models.TextChoices):
    """What a ref was reserved for."""

    CREATE = "create", _("create")
    ROTATE = "rotate", _("rotate")
    BACKFILL = "backfill", _("backfill")


class RefError(ErrorCode):
    """`last_error_code` and what it tells an operator; the only texts that are ever written to a ledger row."""

    CHANGED = "SOURCE_CREDENTIALS_CHANGED", _("The credentials changed before this ref was used.")
    DELETE_FAILED = "SOURCE_SECRET_DELETE_FAILED", _("The secret store could not erase the object; tried again later.")
    NEEDS_ATTENTION = "SOURCE_SECRET_NEEDS_ATTENTION", _("The erasure failed PARK_AFTER times.")
    RETAINED = "SOURCE_SECRET_RETAINED", _("The secret store may not erase the object yet.")
    DISPLACED = "SOURCE_SECRET_DISPLACED", _("An old writer brought back an older ref; this one waits for a person.")
    UNREADABLE = "SOURCE_CREDENTIAL_UNAVAILABLE", _("A source names this ref, and its object cannot be read.")
    ABANDONED = "SOURCE_SECRET_ABANDONED", _("A person gave up on the erasure: the object was not erased.")


RESERVED = (RefState.STAGED, RefState.CANDIDATE)

KEPT = {
    RefError.DISPLACED: EventKind.DISPLACED,
    RefError.UNREADABLE: EventKind.UNREADABLE,
    RefError.ABANDONED: EventKind.ABANDONED,
}
"""What has become of a ref that is kept for this reason."""
FAILED = {RefError.DELETE_FAILED: EventKind.ERASURE_FAILED, RefError.NEEDS_ATTENTION: EventKind.PARKED}
"""What has become of a ref whose erasure failed like this."""


# What every move of a row writes.
MOVED: dict[str, Any] = {"row_version": F("row_version") + 1, "updated_at": Now()}


def _naming() -> models.QuerySet[Source]:
    """Return, as a subquery, the sources that name a ref, whichever they are."""
    return Source.objects.filter(credential_ref=OuterRef("credential_ref"))


def _live_jobs() -> models.QuerySet[SourceCredentialBackfill]:
    """Return, as a subquery, the jobs that wait or run and have a ref as their candidate."""
    return SourceCredentialBackfill.objects.filter(
        candidate_credential_ref=OuterRef("credential_ref"), run_state__in=(RunState.QUEUED, RunState.RUNNING)
    )


class LedgerQuerySet(LeasedQuerySet):
    """Which refs, and the moves of rows that the caller has locked."""

    leased_state = RefState.DELETING
    state_field = "state"

    def of(self, tenant: str | None = None, space: uuid.UUID | None = None) -> Self:
        """Narrow down to one tenant and one space, where given."""
        rows = self if tenant is None else self.filter(tenant_id=tenant)
        return rows if space is None else rows.filter(knowledge_space_id=space)

    # Which.

    def unused(self) -> Self:
        """Return the reservations whose `recover_after` has passed."""
        return self.filter(state__in=RESERVED, recover_after__lte=Now())

    def retired(self) -> Self:
        """Return the refs whose objects are to be erased, now or later."""
        return self.filter(state=RefState.RETIRED)

    def tombstones(self) -> Self:
        """Return the refs whose objects are erased."""
        return self.filter(state=RefState.DELETED)

    def due(self) -> Self:
        """Return those whose `next_delete_at` has passed."""
        return self.filter(next_delete_at__lte=Now())

    def final(self) -> Self:
        """Return the erased refs whose erasure is confirmed."""
        return self.tombstones().filter(next_delete_at__isnull=True)

    def with_live_job(self) -> Self:
        """Return those that are the candidate of a job that waits or runs."""
        return self.filter(Exists(_live_jobs()))

    def named(self) -> Self:
        """Return those that some source names, whichever: none of these may be erased."""
        return self.filter(Exists(_naming()))

    def unnamed(self) -> Self:
        """Return those that no source names."""
        return self.filter(~Exists(_naming()))

    def never_claimed(self) -> Self:
        """Return those that nobody ever claimed for erasure: by our table, and by what the Node service counts."""
        claimed = SecretObject.objects.claimed().filter(pk=OuterRef("credential_ref"))
        return self.filter(~Exists(claimed), delete_attempts=0)

    def orphaned(self) -> Self:
        """Return the active refs that no source names any more, by whatever way it came about.

        Not those whose source names a ref that is not active, or not its own: that one is looked after first. An old
        writer may have brought it back, and this one is the newer secret.
        """
        active = self.model.objects.filter(
            credential_ref=OuterRef("credential_ref"), source_id=OuterRef("pk"), state=RefState.ACTIVE
        )
        broken = Source.objects.filter(pk=OuterRef("source_id"), credential_ref__isnull=False).filter(~Exists(active))
        return self.filter(~Exists(_naming()), ~Exists(broken), state=RefState.ACTIVE)

    def displaced(self) -> Self:
        """Return the active refs that no source names, since theirs names one that is older.

        An old writer brought that one back, and the ledger had not retired it: a source was set to NULL and given these
        since the last sweep. Older: reserved before them, or in use before them; `updated_at` of an active row is when
        the ledger took note of that, which a reconciliation or a repair may do late.
        """
        older = self.model.objects.filter(
            Q(created_at__lte=OuterRef(OuterRef("created_at"))) | Q(updated_at__lte=OuterRef(OuterRef("updated_at"))),
            credential_ref=OuterRef("credential_ref"),
            source_id=OuterRef("pk"),
            state=RefState.ACTIVE,
        )
        source = Source.objects.filter(pk=OuterRef("source_id"), knowledge_space_id=OuterRef("knowledge_space_id"))
        return self.filter(~Exists(_naming()), Exists(source.filter(Exists(older))), state=RefState.ACTIVE)

    def undated(self) -> Self:
        """Return the retired refs that have no time for their erasure, and nothing to wait for.

        Abandoned ones have; displaced ones while their source is there; any while a source names them.
        """
        objects = SecretObject.objects.filter(pk=OuterRef("credential_ref"))
        source = Source.objects.filter(pk=OuterRef("source_id"), knowledge_space_id=OuterRef("knowledge_space_id"))
        return self.filter(
            ~Exists(objects.filter(abandoned_at__isnull=False)),
            ~(Exists(objects.filter(attention=Attention.DISPLACED)) & Exists(source)),
            ~Exists(_naming()),
            state=RefState.RETIRED,
            next_delete_at__isnull=True,
        )

    def unfinished(self) -> Self:
        """Return the refs that have a next move at a known time, which is not up to a live job or a person.

        A parked one, which is tried again once a day, counts on that day.
        """
        parked = Q(
            state=RefState.RETIRED,
            last_error_code__in=(RefError.NEEDS_ATTENTION, RefError.RETAINED),
            last_error_code__isnull=False,
            next_delete_at__gt=Now(),
        )
        return self.filter(
            ~parked,
            Q(state__in=(RefState.RETIRED, RefState.DELETED), next_delete_at__isnull=False)
            | Q(state=RefState.DELETING)
            | Q(state=RefState.STAGED)
            | (Q(state=RefState.CANDIDATE) & ~Exists(_live_jobs())),
        )

    def overdue(self) -> Self:
        """Return the refs whose next move is due by the database's clock and has not been made."""
        return self.unfinished().filter(
            Q(state__in=(RefState.RETIRED, RefState.DELETED), next_delete_at__lte=Now())
            | Q(state=RefState.DELETING, lease_expires_at__lte=Now())
            | Q(state__in=RESERVED, recover_after__lte=Now())
        )

    def ahead(self) -> tuple[int, timedelta | None]:
        """Return how many refs are unfinished, and how long it is until the next of their moves is due.

        The time is below zero if it is due, None if there are none.
        """
        soonest = Least(
            Min("next_delete_at", filter=Q(state__in=(RefState.RETIRED, RefState.DELETED))),
            Min("lease_expires_at"),
            Min("recover_after", filter=Q(state__in=RESERVED)),
        )
        found = self.unfinished().aggregate(count=Count("pk"), next_move_in=soonest - Now())
        return found["count"], found["next_move_in"]

    # Locks and moves.

    def lock(self, *, skip_locked: bool = False, nowait: bool = False) -> Self:
        """Lock these rows in id order. Waits for them, unless told otherwise, for LOCK_TIMEOUT at most."""
        return self.order_by("id").select_for_update(no_key=True, of=("self",), skip_locked=skip_locked, nowait=nowait)

    def _move(self, event: EventKind, *, detail: str | None = None, **columns: Any) -> int:
        """Change these rows, which the caller has locked, and write an event for each, in one statement for all."""
        rows = dict(self.values_list("pk", "credential_ref"))
        if not rows:
            return 0
        Event.objects.using(self.db).note(event, list(rows.values()), detail=detail)
        return self.model.objects.using(self.db).filter(pk__in=rows).update(**columns)  # type: ignore[no-any-return]

    def activate(self, version: int, *, event: EventKind = EventKind.ACTIVATED) -> int:
        """Note that a source of this version names these refs. `event`: how it came about."""
        return self._move(
            event,
            state=RefState.ACTIVE,
            source_version=version if version >= 1 else None,
            next_delete_at=None,
            last_error_code=None,
            last_error_message=None,
            **MOVED,
        )

    def retire(self, *, event: EventKind = EventKind.RETIRED) -> int:
        """Let these refs, which nobody uses any more, be erased after the grace. `event`: how it came about."""
        return self._move(
            event,
            state=RefState.RETIRED,
            next_delete_at=seconds_from_now(settings.ERASE_GRACE),
            last_error_code=None,
            last_error_message=None,
            **MOVED,
        )

    def keep(self, error: RefError) -> int:
        """Retire these refs, or leave them retired, without a time for their erasure: a person has to choose.

        No time rather than a late one: the Node service's cleanup erases whatever is due.
        """
        return self._move(
            KEPT[error],
            detail=error.value,
            state=RefState.RETIRED,
            next_delete_at=None,
            deleted_at=None,
            last_error_code=error,
            last_error_message=error.message,
            **MOVED,
        )

    def hold(self) -> int:
        """Leave these refs, which sources name, without a time for their erasure, until that is repaired.

        Not put off: the Node service's cleanup takes whatever is due, and makes a ref that a source names active, also
        one that was claimed for erasure before.
        """
        unleased = {**LeasedRow.RELEASED, "deleted_at": None}
        return self._move(EventKind.HELD, state=RefState.RETIRED, next_delete_at=None, **unleased)

    def recover_later(self) -> int:
        """Let these reservations be looked at again after another RECOVER_AFTER."""
        return self.update(recover_after=seconds_from_now(max(settings.RECOVER_AFTER, 1.0)), **MOVED)

    def postpone(self, seconds: float) -> int:
        """Let what is due be looked at again later."""
        return self.update(next_delete_at=seconds_from_now(seconds), **MOVED)

    def erase_again(self, event: EventKind) -> int:
        """Let these be erased as soon as a worker comes to them. `event`: why."""
        return self._move(event, next_delete_at=Now(), **MOVED)

    def claim(self, lease: Lease, *, crashed_alone: bool) -> int:
        """Lease these rows for erasure. `crashed_alone` counts an attempt."""
        return self.update(
            state=RefState.DELETING,
            worker_id=lease.worker_id,
            lease_token=lease.token,
            lease_expires_at=seconds_from_now(lease.duration),
            heartbeat_at=Now(),
            deleted_at=None,
            delete_attempts=F("delete_attempts") + int(crashed_alone),
            **MOVED,
        )

    def release(self) -> int:
        """Give these rows back, as due as they were: an erasure that was not made leaves nothing known to be gone."""
        return self.update(state=RefState.RETIRED, **LeasedRow.RELEASED)

    def erased(self, receipt: Receipt, *, confirm_after: float | None) -> int:
        """Note that the store said that these are gone. `confirm_after`: seconds, None if that was the confirmation."""
        due = None if confirm_after is None else seconds_from_now(confirm_after)
        return self._move(
            EventKind.CONFIRMED if confirm_after is None else EventKind.ERASED,
            detail=receipt.value,
            state=RefState.DELETED,
            deleted_at=Now(),
            next_delete_at=due,
            last_error_code=None,
            last_error_message=None,
            **LeasedRow.RELEASED,
        )

    def retain(self, until: Mapping[uuid.UUID, datetime], seconds: float) -> int:
        """Note that the store keeps these: until a moment, by id, or, where that is not known, for so many seconds.

        A moment that is past is none: its clock and ours differ, and it is asked again after RETRY_BASE.
        """
        soonest = seconds_from_now(settings.RETRY_BASE)
        known = [When(pk=row, then=Greatest(Value(moment), soonest)) for row, moment in until.items()]
        return self._move(
            EventKind.RETAINED,
            detail=RefError.RETAINED.value,
            state=RefState.RETIRED,
            next_delete_at=Case(*known, default=seconds_from_now(seconds)),
            last_error_code=RefError.RETAINED,
            last_error_message=RefError.RETAINED.message,
            **LeasedRow.RELEASED,
        )

    def retry_later(self, error: RefError, seconds: float) -> int:
        """Let the erasure of these be tried again after so many seconds; this attempt counts."""
        return self._move(
            FAILED[error],
            detail=error.value,
            state=RefState.RETIRED,
            next_delete_at=seconds_from_now(seconds),
            delete_attempts=F("delete_attempts") + 1,
            last_error_code=error,
            last_error_message=error.message,
            **LeasedRow.RELEASED,
        )


class SourceSecretLifecycleRef(LeasedRow):
    """One ref, from its reservation to its confirmed erasure."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant_id = models.TextField(_("tenant"))
    knowledge_space_id = models.UUIDField(_("knowledge space"))
    source_id = models.UUIDField(_("source"))
    credential_ref = models.TextField(_("credential ref"))
    operation_id = models.TextField(_("operation"))
    purpose = models.TextField(_("purpose"), choices=Purpose)
    state = models.TextField(_("state"), choices=RefState)
    source_version = models.IntegerField(_("source version"), null=True, blank=True)
    recover_after = models.DateTimeField(_("recover after"))
    next_delete_at = models.DateTimeField(_("next erasure at"), null=True, blank=True)
    delete_attempts = models.IntegerField(_("erasure attempts"))
    deleted_at = models.DateTimeField(_("erased at"), null=True, blank=True)

    objects = LedgerQuerySet.as_manager()

    class Meta:
        db_table = "source_secret_lifecycle_refs"
        verbose_name = _("credential ref")
        verbose_name_plural = _("credential refs")
        permissions = [
            ("view_full_ref", "Can view full refs"),
            ("settle_sourcesecretlifecycleref", "Can retry erasures and choose between displaced refs"),
            ("abandon_sourcesecretlifecycleref", "Can give up on erasures that fail"),
        ]
        base_manager_name = "objects"
        constraints = [
            models.CheckConstraint(
                condition=Q(source_version__isnull=True) | Q(source_version__gte=1),
                name="source_secret_lifecycle_refs_source_version_ck",
            ),
            models.CheckConstraint(
                condition=Q(purpose__in=["create", "rotate", "backfill"]),
                name="source_secret_lifecycle_refs_purpose_ck",
            ),
            models.CheckConstraint(
                condition=Q(delete_attempts__gte=0, row_version__gte=0), name="source_secret_lifecycle_refs_counts_ck"
            ),
            models.CheckConstraint(
                condition=Q(state__in=["staged", "candidate", "active", "retired", "deleting", "deleted"]),
                name="source_secret_lifecycle_refs_state_ck",
            ),
            models.CheckConstraint(
                condition=Q(
                    state="deleting",
                    worker_id__isnull=False,
                    lease_token__isnull=False,
                    lease_expires_at__isnull=False,
                    heartbeat_at__isnull=False,
                    deleted_at__isnull=True,
                )
                | Q(
                    ~Q(state="deleting"),
                    worker_id__isnull=True,
                    lease_token__isnull=True,
                    lease_expires_at__isnull=True,
                    heartbeat_at__isnull=True,
                ),
                name="source_secret_lifecycle_refs_lease_ck",
            ),
            models.CheckConstraint(
                condition=Q(state="deleted", deleted_at__isnull=False)
                | Q(~Q(state="deleted"), deleted_at__isnull=True),
                name="source_secret_lifecycle_refs_terminal_ck",
            ),
            models.UniqueConstraint(fields=["credential_ref"], name="source_secret_lifecycle_refs_ref_uq"),
        ]
        indexes = [
            SeedIndex(fields=["operation_id", "state", "id"], name="source_secret_lifecycle_refs_operation_idx"),
            SeedIndex(
                fields=["state", "next_delete_at", "lease_expires_at", "updated_at", "id"],
                name="source_secret_lifecycle_refs_claim_idx",
            ),
            SeedIndex(fields=["state", "recover_after", "id"], name="source_secret_lifecycle_refs_recovery_idx"),
            SeedIndex(
                fields=["tenant_id", "knowledge_space_id", "source_id", "id"],
                name="source_secret_lifecycle_refs_scope_idx",
            ),
        ]

    def __str__(self) -> str:
        return f"{short_ref(self.credential_ref)} ({self.state})"

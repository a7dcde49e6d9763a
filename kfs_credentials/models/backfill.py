r"""Table `source_credential_backfills`: the jobs, at most one per source.

discover -> queued -> running -> succeeded
^         |   \-> failed   (retry by an operator: queued again, fresh candidate)
+---------+ release, retry later, refresh, lease expired
succeeded -> queued: legacy credentials are back on a source without ref; same row, fresh candidate
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Self

from django.db import models
from django.db.models import Case, Exists, ExpressionWrapper, F, OuterRef, Q, Value, When
from django.db.models.functions import Least, Now, Power
from django.utils.translation import gettext_lazy as _

from kfs_credentials.conf import settings
from kfs_credentials.leases import ErrorCode, Lease, LeasedQuerySet, LeasedRow, interval, seconds_from_now
from kfs_credentials.models.knowledge_space import KnowledgeSpace
from kfs_credentials.models.schema import FixedCharField, SeedIndex
from kfs_credentials.models.source import Source

NOT_FINGERPRINTED = "0" * 64
"""`secret_fingerprint` of credentials that no fingerprint was made of: too large to read, or not valid."""


class RunState(models.TextChoices):
    """The states of a job, each with the moves that leave it."""

    QUEUED = "queued", _("queued")  # claim -> running
    RUNNING = "running", _("running")  # activate, abandon -> succeeded; release, retry, refresh -> queued; or failed
    SUCCEEDED = "succeeded", _("succeeded")  # legacy credentials are back -> running, by discovery
    FAILED = "failed", _("failed")  # retry by an operator -> queued; nothing left to move -> succeeded


class JobError(ErrorCode):
    """`last_error_code` and what it tells an operator; the only texts that are ever written to a job."""

    TOO_LARGE = "SOURCE_SECRET_TOO_LARGE", _("The credentials are larger than MAX_SECRET_BYTES.")
    INVALID = "SOURCE_CREDENTIALS_INVALID", _("The credentials cannot be stored: nested too deeply or out of range.")
    SCOPE_INVALID = "SOURCE_SCOPE_INVALID", _("The tenant id is blank or longer than 255 characters.")
    CONFLICT = "SOURCE_SECRET_REF_CONFLICT", _("The candidate ref already holds a different secret.")
    INTEGRITY = "SOURCE_SECRET_INTEGRITY_FAILED", _("The object at the candidate ref is damaged or another's.")
    LEDGER_MISSING = "CANDIDATE_LIFECYCLE_MISSING", _("The candidate ref has no ledger row of this source.")
    TRANSITION_CONFLICT = (
        "SOURCE_CREDENTIAL_BACKFILL_TRANSITION_CONFLICT",
        _("The source names the candidate already, and the store holds nothing readable under it."),
    )
    UNSTABLE = "SOURCE_CREDENTIALS_UNSTABLE", _("The credentials changed during every attempt.")
    WORKER_LOST = "SOURCE_CREDENTIAL_WORKER_LOST", _("The worker died or froze each time it held this job alone.")
    ROW_REJECTED = "SOURCE_ROW_REJECTED", _("The database refused the change to this source (a constraint or trigger).")
    NOT_AS_SAID = (
        "SOURCE_SECRET_STORE_CONTRADICTED",
        _("The secret store said that it had put the secret, and does not give it back."),
    )
    UNEXPECTED = "SOURCE_CREDENTIAL_BACKFILL_FAILED", _("The secret store failed in an unexpected way.")


class BackfillQuerySet(LeasedQuerySet):
    """Which jobs."""

    leased_state = RunState.RUNNING
    state_field = "run_state"

    def queued(self) -> Self:
        """Return the jobs that wait for a worker, delayed ones included."""
        # No queued job has a lease (a CHECK says so); with this the claim index has them in the order of their age.
        return self.filter(run_state=RunState.QUEUED, lease_expires_at__isnull=True)

    def failed(self) -> Self:
        """Return the jobs that wait for an operator."""
        return self.filter(run_state=RunState.FAILED)

    def of(self, tenant: str | None = None, space: uuid.UUID | None = None) -> Self:
        """Narrow down to one tenant and one space, where given."""
        jobs = self if tenant is None else self.filter(tenant_id=tenant)
        return jobs if space is None else jobs.filter(knowledge_space_id=space)

    def due(self) -> Self:
        """Return the queued jobs whose delay is over.

        The delay grows with `retry_count`: RETRY_BASE, doubled each time, at most RETRY_MAX, from the last move on.
        """
        delay = Least(
            Value(settings.RETRY_BASE) * Power(2.0, Least(F("retry_count") - 1, 30)),
            Value(settings.RETRY_MAX),
            output_field=models.FloatField(),
        )
        due_at = Case(
            When(retry_count=0, then=F("updated_at")),
            default=ExpressionWrapper(F("updated_at") + delay * interval(1), models.DateTimeField()),
            output_field=models.DateTimeField(),
        )
        return self.queued().alias(due_at=due_at).filter(due_at__lte=Now())

    def of_open_sources(self, leaving: Sequence[uuid.UUID]) -> Self:
        """Leave out the jobs whose source or space is being deleted: they wait, and block nobody.

        `leaving`: what `being_deleted` says; what the source's own status says is looked at here.
        """
        marked = Source.objects.filter(pk=OuterRef("source_id"), status=Source.DELETING)
        return self.filter(~Exists(marked), ~Q(knowledge_space_id__in=leaving), ~Q(source_id__in=leaving))

    def lock_for_claim(self, limit: int) -> Self:
        """Lock at most `limit` of these jobs, oldest first; those that somebody else has locked are passed over."""
        oldest_first = self.order_by("updated_at", "id")
        return oldest_first.select_for_update(skip_locked=True, no_key=True, of=("self",))[:limit]

    def claim(self, lease: Lease, *, crashed_alone: bool) -> int:
        """Lease these jobs, which the caller has locked. `crashed_alone` counts an attempt."""
        return self.update(
            run_state=RunState.RUNNING,
            worker_id=lease.worker_id,
            lease_token=lease.token,
            lease_expires_at=seconds_from_now(lease.duration),
            heartbeat_at=Now(),
            retry_count=F("retry_count") + int(crashed_alone),
            row_version=F("row_version") + 1,
            updated_at=Now(),
        )

    def release(self) -> int:
        """Give these jobs back, as if they had never been claimed."""
        return self.update(run_state=RunState.QUEUED, **LeasedRow.RELEASED)

    def supersede(self) -> int:
        """End these failed jobs, which the caller has locked: their sources have new credentials, or none."""
        return self.update(
            run_state=RunState.SUCCEEDED,
            last_error_code=None,
            last_error_message=None,
            row_version=F("row_version") + 1,
            updated_at=Now(),
            completed_at=Now(),
        )

    def retry_later(self, error: JobError) -> int:
        """Queue these jobs again after an attempt that failed; `due()` says when they may run."""
        return self.update(
            run_state=RunState.QUEUED,
            retry_count=F("retry_count") + 1,
            last_error_code=error.value,
            last_error_message=error.message,
            **LeasedRow.RELEASED,
        )


class SourceCredentialBackfill(LeasedRow):
    """One job: move the legacy credentials of one source to its candidate ref."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant_id = models.TextField(_("tenant"))
    # Both keys are composite in the database (with the tenant, with the space), ON DELETE CASCADE.
    knowledge_space = models.ForeignKey(
        KnowledgeSpace,
        models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="+",
        verbose_name=_("knowledge space"),
    )
    source = models.ForeignKey(
        Source,
        models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="backfills",
        verbose_name=_("source"),
    )
    source_version = models.IntegerField(_("source version"))
    candidate_credential_ref = models.TextField(_("candidate ref"))
    secret_fingerprint = FixedCharField(_("fingerprint"), max_length=64)
    run_state = models.TextField(_("state"), choices=RunState)
    retry_count = models.IntegerField(_("retry count"))
    completed_at = models.DateTimeField(_("completed at"), null=True, blank=True)

    objects = BackfillQuerySet.as_manager()

    class Meta:
        db_table = "source_credential_backfills"
        verbose_name = _("backfill job")
        verbose_name_plural = _("backfill jobs")
        permissions = [("retry_sourcecredentialbackfill", "Can retry failed backfill jobs")]
        base_manager_name = "objects"
        constraints = [
            models.CheckConstraint(
                condition=Q(source_version__gte=1), name="source_credential_backfills_source_version_ck"
            ),
            models.CheckConstraint(
                condition=Q(retry_count__gte=0, row_version__gte=0), name="source_credential_backfills_counts_ck"
            ),
            models.CheckConstraint(
                condition=Q(run_state__in=["queued", "running", "succeeded", "failed"]),
                name="source_credential_backfills_state_ck",
            ),
            models.CheckConstraint(
                condition=Q(
                    run_state="running",
                    worker_id__isnull=False,
                    lease_token__isnull=False,
                    lease_expires_at__isnull=False,
                    heartbeat_at__isnull=False,
                    completed_at__isnull=True,
                )
                | Q(
                    ~Q(run_state="running"),
                    worker_id__isnull=True,
                    lease_token__isnull=True,
                    lease_expires_at__isnull=True,
                    heartbeat_at__isnull=True,
                ),
                name="source_credential_backfills_lease_ck",
            ),
            models.CheckConstraint(
                condition=Q(run_state__in=["succeeded", "failed"], completed_at__isnull=False)
                | Q(run_state__in=["queued", "running"], completed_at__isnull=True),
                name="source_credential_backfills_terminal_ck",
            ),
            models.UniqueConstraint(
                fields=["tenant_id", "knowledge_space", "source"], name="source_credential_backfills_source_uq"
            ),
            models.UniqueConstraint(
                fields=["candidate_credential_ref"], name="source_credential_backfills_candidate_ref_uq"
            ),
        ]
        indexes = [
            SeedIndex(
                fields=["run_state", "lease_expires_at", "updated_at", "id"],
                name="source_credential_backfills_claim_idx",
            ),
            SeedIndex(
                fields=["tenant_id", "knowledge_space", "source", "id"], name="source_credential_backfills_scope_idx"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.source_id} ({self.run_state})"

r"""Table `source_secret_lifecycle_refs`, the ledger: one row per ref, no foreign keys, outlives its source.

staged ----> active ----> retired ----> deleting ----> deleted
candidate -> active          ^              |
\\------> retired         +--------------+ retry later
"""

from __future__ import annotations

import uuid
from typing import Self

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from kfs_credentials.leases import LeasedQuerySet, LeasedRow
from kfs_credentials.models.schema import SeedIndex
from kfs_credentials.redaction import short_ref


class RefState(models.TextChoices):
    """The states of a ref, each with the moves that leave it."""

    STAGED = "staged", _("staged")  # create, rotate -> active; unused past recover_after -> retired
    CANDIDATE = "candidate", _("candidate")  # activate -> active; refresh, abandon, fail -> retired
    ACTIVE = "active", _("active")  # no source names it any more -> retired
    RETIRED = "retired", _("retired")  # due, claimed for erasure -> deleting
    DELETING = "deleting", _("deleting")  # the store confirms -> deleted; it does not -> retired, later
    DELETED = "deleted", _("deleted")  # after the horizon, once more -> deleting -> deleted: final


class Purpose(models.TextChoices):
    """What a ref was reserved for."""

    CREATE = "create", _("create")
    ROTATE = "rotate", _("rotate")
    BACKFILL = "backfill", _("backfill")


class LedgerQuerySet(LeasedQuerySet):
    """Which refs."""

    leased_state = RefState.DELETING
    state_field = "state"

    def of(self, tenant: str | None = None, space: uuid.UUID | None = None) -> Self:
        """Narrow down to one tenant and one space, where given."""
        rows = self if tenant is None else self.filter(tenant_id=tenant)
        return rows if space is None else rows.filter(knowledge_space_id=space)

    def overdue(self) -> Self:
        """Return the refs whose next move is due by the database's clock and has not been made."""
        return self.filter(
            Q(state__in=(RefState.RETIRED, RefState.DELETED), next_delete_at__lte=Now())
            | Q(state=RefState.DELETING, lease_expires_at__lte=Now())
            | Q(state=RefState.STAGED, recover_after__lte=Now())
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
        permissions = [("view_full_ref", "Can view full refs")]
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

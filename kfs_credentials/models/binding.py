"""Table `kfs_credentials_binding`: which store is this database's own, and the epoch that both of them know."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Self

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from kfs_credentials.leases import seconds_from_now

if TYPE_CHECKING:
    from kfs_credentials.leases import Lease


class BindingQuerySet(models.QuerySet["Binding"]):
    """Which bindings, and who may advance their epoch."""

    def lease(self, lease: Lease, **changes: Any) -> int:
        """Lease these, unless somebody else has; return how many. Waits for whoever is changing one.

        What this worker has leased before, and could not give back as the database was gone, is its own.
        """
        free = Q(lease_expires_at__isnull=True) | Q(lease_expires_at__lte=Now())
        return self.filter(free | Q(worker_id=lease.worker_id)).update(
            worker_id=lease.worker_id,
            lease_token=lease.token,
            lease_expires_at=seconds_from_now(lease.duration),
            **changes,
        )

    def fenced(self, lease: Lease) -> Self:
        """Return those that are still this lease's."""
        return self.filter(lease_token=lease.token, lease_expires_at__gt=Now())

    def advance(self, lease: Lease) -> int:
        """Begin the next epoch, now that the store shows this one; return how many of these are still this lease's."""
        return self.fenced(lease).update(epoch=F("epoch") + 1, shown_epoch=F("epoch"))

    def release(self, lease: Lease, *, shown: bool) -> int:
        """Give the lease back. `shown`: the store shows this epoch now."""
        changes: dict[str, Any] = {"shown_epoch": F("epoch")} if shown else {}
        return self.filter(lease_token=lease.token).update(**changes, **Binding.RELEASED)

    def confirm(self) -> int:
        """Note that the store shows what is recorded here."""
        return self.filter(confirmed_at__isnull=True).update(confirmed_at=Now())


class Binding(models.Model):
    """The database's half of what it and one of its stores know of each other. The store's half is the probe.

    A clone or a restored copy has this row too: that is why it says which database it was written in, and counts
    epochs.
    """

    RELEASED = {"worker_id": None, "lease_token": None, "lease_expires_at": None}

    store = models.TextField(_("store alias"), primary_key=True)
    environment_id = models.UUIDField(_("environment id"), default=uuid.uuid4)
    environment = models.TextField(_("environment"))
    system_identifier = models.TextField(_("system identifier of the server"))
    database_oid = models.BigIntegerField(_("OID of the database"))
    epoch = models.BigIntegerField(_("epoch"))
    # The store has it, for certain: the epoch, or the one before while an advance is under way or was cut short.
    shown_epoch = models.BigIntegerField(_("epoch that the store has shown"))
    bound_at = models.DateTimeField(_("bound at"))
    bound_by = models.TextField(_("bound by"))
    # NULL: the store has not been seen with its half yet.
    confirmed_at = models.DateTimeField(_("confirmed at"), null=True, blank=True)
    worker_id = models.TextField(_("worker"), null=True, blank=True)  # noqa: DJ001 - NULL: nobody
    lease_token = models.UUIDField(_("lease token"), null=True, blank=True)
    lease_expires_at = models.DateTimeField(_("lease expires at"), null=True, blank=True)

    objects = BindingQuerySet.as_manager()

    class Meta:
        db_table = "kfs_credentials_binding"
        verbose_name = _("binding")
        verbose_name_plural = _("bindings")

    def __str__(self) -> str:
        return f"{self.store} ({self.environment_id})"

"""Table `kfs_credentials_round`: who goes through all refs, or all objects, and when that was last done to the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from kfs_credentials.leases import seconds_from_now

if TYPE_CHECKING:
    from kfs_credentials.leases import Lease


class RoundQuerySet(models.QuerySet["Round"]):
    """Which rounds."""

    def claim(self, lease: Lease, *, every: float) -> int:
        """Begin these rounds, of which the caller has locked the rows; return how many.

        Not those that another worker has leased, nor those that were begun less than `every` seconds ago and made
        to the end.
        """
        free = Q(lease_expires_at__isnull=True) | Q(lease_expires_at__lte=Now())
        due = Q(covers_until__isnull=True) | Q(covers_until__lte=seconds_from_now(-every))
        return self.filter(free, due).update(
            worker_id=lease.worker_id,
            lease_token=lease.token,
            lease_expires_at=seconds_from_now(lease.duration),
            started_at=Now(),
        )

    def fenced(self, lease: Lease) -> Self:
        """Return the rounds that are still this lease's: if it ran out, and nobody has begun anew, they are."""
        return self.filter(lease_token=lease.token)

    def renew(self, lease: Lease) -> int:
        """Extend the lease; return 0 if another worker has begun anew."""
        return self.fenced(lease).update(lease_expires_at=seconds_from_now(lease.duration))

    def complete(self, lease: Lease, *, found: int) -> int:
        """Note that all was seen that was there when the round began; return 0 if another worker has begun anew."""
        return self.fenced(lease).update(
            covers_until=F("started_at"), completed_at=Now(), found=found, **Round.RELEASED
        )

    def release(self, lease: Lease) -> int:
        """Give up a round that was not made to the end: the next worker begins anew."""
        return self.fenced(lease).update(**Round.RELEASED)


class Round(models.Model):
    """One kind of round: the sweep, the patrol of one store, a re-encryption. At most one worker at a time makes it."""

    SWEEP = "sweep"
    PATROL = "patrol:"
    REENCRYPTION = "re-encryption"
    RELEASED = {"worker_id": None, "lease_token": None, "lease_expires_at": None}

    name = models.TextField(_("name"), primary_key=True)
    worker_id = models.TextField(_("worker"), null=True, blank=True)  # noqa: DJ001 - NULL: nobody
    lease_token = models.UUIDField(_("lease token"), null=True, blank=True)
    lease_expires_at = models.DateTimeField(_("lease expires at"), null=True, blank=True)
    started_at = models.DateTimeField(_("started at"), null=True, blank=True)
    # What happened before this moment was seen by the last round that was made to the end.
    covers_until = models.DateTimeField(_("covers until"), null=True, blank=True)
    completed_at = models.DateTimeField(_("completed at"), null=True, blank=True)
    found = models.IntegerField(_("found"))

    objects = RoundQuerySet.as_manager()

    class Meta:
        db_table = "kfs_credentials_round"
        verbose_name = _("round")
        verbose_name_plural = _("rounds")

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def patrol(store: str) -> str:
        """Return the name of the patrol of a store, by its alias."""
        return f"{Round.PATROL}{store}"

"""Table `kfs_credentials_event`: who did what to which ref, and when. Never a value. Rows are added, and purged."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from kfs_credentials.models.schema import SeedIndex


class EventKind(models.TextChoices):
    """What can have happened."""

    RESERVED = "reserved", _("reserved")
    ACTIVATED = "activated", _("activated")
    RETIRED = "retired", _("retired")
    ERASED = "erased", _("erased")
    CONFIRMED = "confirmed", _("erasure confirmed")
    PARKED = "parked", _("erasure parked")
    RETAINED = "retained", _("retained by the store")
    DISPLACED = "displaced", _("displaced")
    ABANDONED = "abandoned", _("abandoned")
    RESTORED = "restored", _("restored")
    DISCARDED = "discarded", _("discarded")
    REENCRYPTED = "reencrypted", _("re-encrypted")
    SCRUBBED = "scrubbed", _("plaintext removed")
    BOUND = "bound", _("bound")
    PAUSED = "paused", _("paused")
    RESUMED = "resumed", _("resumed")
    KEY_CLOSED = "key_closed", _("key closed")
    KEY_OPENED = "key_opened", _("key opened again")


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

"""Table `kfs_credentials_pause`: one row while the workers of this database are paused, none while they are not."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from kfs_credentials.redaction import redacted_text


class Pause(models.Model):
    """Who has paused the workers, and why. Read by each of them in the transaction in which it claims."""

    ID = 1

    id = models.SmallIntegerField(primary_key=True, default=ID, editable=False)
    paused_at = models.DateTimeField(_("paused at"))
    paused_by = models.TextField(_("paused by"))
    reason = models.TextField(_("reason"))

    class Meta:
        db_table = "kfs_credentials_pause"
        verbose_name = _("pause")
        verbose_name_plural = _("pauses")
        constraints = [models.CheckConstraint(condition=Q(id=1), name="kfs_credentials_pause_id_ck")]

    def __str__(self) -> str:
        return redacted_text(f"{self.paused_by}: {self.reason}")  # a person wrote that

"""Table `kfs_credentials_checkpoint`: how far a long command has got, so that it can be taken up again."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _


class Checkpoint(models.Model):
    """The position of one kind of run, by its name; `data` holds counts and ids, never a value."""

    name = models.TextField(_("name"), primary_key=True)
    position = models.TextField(_("position"))
    data = models.JSONField(_("data"), default=dict)
    started_at = models.DateTimeField(_("started at"))
    updated_at = models.DateTimeField(_("updated at"))

    class Meta:
        db_table = "kfs_credentials_checkpoint"
        verbose_name = _("checkpoint")
        verbose_name_plural = _("checkpoints")

    def __str__(self) -> str:
        return self.name

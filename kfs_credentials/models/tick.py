"""Tables `kfs_credentials_tick` and `kfs_credentials_refusal`: when workers were last at work, and what kept them."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _


class Tick(models.Model):
    """When a worker of this role last came to the end of a step."""

    role = models.TextField(_("role"), primary_key=True)
    worker_id = models.TextField(_("worker"))
    ticked_at = models.DateTimeField(_("last tick"))

    class Meta:
        db_table = "kfs_credentials_tick"
        verbose_name = _("tick")
        verbose_name_plural = _("ticks")

    def __str__(self) -> str:
        return self.role


class Refusal(models.Model):
    """How often workers of a role have refused to work, by the class of the reason, and when they last did."""

    role = models.TextField(_("role"))
    reason = models.TextField(_("reason"))
    count = models.BigIntegerField(_("count"))
    refused_at = models.DateTimeField(_("last refused at"))

    class Meta:
        db_table = "kfs_credentials_refusal"
        verbose_name = _("refusal")
        verbose_name_plural = _("refusals")
        constraints = [models.UniqueConstraint(fields=["role", "reason"], name="kfs_credentials_refusal_uq")]

    def __str__(self) -> str:
        return f"{self.role}: {self.reason}"

"""Tables `kfs_credentials_tick` and `kfs_credentials_refusal`: when workers were last at work, and what kept them."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _


class WorkerRole(models.TextChoices):
    """What a worker is at work on. New ones are no migration."""

    BACKFILL = "backfill", _("backfill")
    CLEANUP = "cleanup", _("cleanup")
    REENCRYPT = "reencrypt", _("re-encryption")
    VERIFY = "verify", _("verification")


class RefusalReason(models.TextChoices):
    """Why a worker has refused to work, or waits: what errors have as their `refusal`. New ones are no migration."""

    STORE_UNAVAILABLE = "store_unavailable", _("the secret store is out of reach")
    STORE_DENIED = "store_denied", _("the secret store denies access")
    STORE_MISCONFIGURED = "store_misconfigured", _("the secret store is not what the settings say")
    WRONG_STORE = "wrong_store", _("the secret store is not this database's")
    KEY_CLOSED = "key_closed", _("the key is closed")
    PAUSED = "paused", _("paused")
    DATABASE_REFUSED = "database_refused", _("the database refused a statement")
    DATABASE_UNREACHABLE = "database_unreachable", _("the database is out of reach")
    ROWS_HIDDEN = "rows_hidden", _("row-level security hides rows")
    NOT_MIGRATED = "not_migrated", _("the database is not migrated")
    INVALID_INDEX = "invalid_index", _("an index is invalid")
    MISCONFIGURED = "misconfigured", _("the settings are wrong")


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

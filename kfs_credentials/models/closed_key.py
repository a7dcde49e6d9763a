"""Table `kfs_credentials_closed_key`: keys under which nothing comes into use any more."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _


class ClosedKey(models.Model):
    """A key that `reencrypt_secrets` moves everything away from. What is sealed under it is not activated.

    Looked at by every activation in a statement after the one that took the lock on closing: see `keys`.
    """

    key_id = models.TextField(_("key id"), primary_key=True)
    closed_at = models.DateTimeField(_("closed at"))
    closed_by = models.TextField(_("closed by"))

    class Meta:
        db_table = "kfs_credentials_closed_key"
        verbose_name = _("closed key")
        verbose_name_plural = _("closed keys")

    def __str__(self) -> str:
        return self.key_id

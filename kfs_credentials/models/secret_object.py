"""Table `kfs_credentials_secret_object`: what the seed's ledger has no column for, one row per ref."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from kfs_credentials.redaction import short_ref


class SecretObject(models.Model):
    """Where the object of a ref lies, and what it is sealed under. Written with the ledger row's own moves.

    A ref that the Node service reserved has no row here; then nothing of this is known, and nothing depends on it.
    """

    credential_ref = models.TextField(_("credential ref"), primary_key=True)
    store = models.TextField(_("store alias"))
    key_id = models.TextField(_("key id"), null=True, blank=True)  # noqa: DJ001 - NULL: not known
    size = models.IntegerField(_("size in bytes"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"))
    updated_at = models.DateTimeField(_("updated at"))

    class Meta:
        db_table = "kfs_credentials_secret_object"
        verbose_name = _("secret object")
        verbose_name_plural = _("secret objects")

    def __str__(self) -> str:
        return short_ref(self.credential_ref)

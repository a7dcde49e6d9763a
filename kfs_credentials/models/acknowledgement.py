"""Table `kfs_credentials_acknowledgement`: credentials that stay in clear, because a person said so."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from kfs_credentials.models.source import Shape


class AcknowledgedShape(models.TextChoices):
    """What was acknowledged. A source whose credentials take another shape has to be looked at again."""

    STRING = Shape.STRING.value, Shape.STRING.label
    NUMBER = Shape.NUMBER.value, Shape.NUMBER.label
    BOOLEAN = Shape.BOOLEAN.value, Shape.BOOLEAN.label
    ARRAY = Shape.ARRAY.value, Shape.ARRAY.label
    TOO_LARGE = "too_large", _("too large")


class Acknowledgement(models.Model):
    """An operator has seen that this source's credentials cannot be moved as they are.

    No foreign key: it would put a trigger on the host's `sources`. A row whose source is gone says nothing.
    """

    source_id = models.UUIDField(_("source"), primary_key=True)
    shape = models.TextField(_("shape"), choices=AcknowledgedShape)
    acknowledged_by = models.TextField(_("acknowledged by"))
    acknowledged_at = models.DateTimeField(_("acknowledged at"))

    class Meta:
        db_table = "kfs_credentials_acknowledgement"
        verbose_name = _("acknowledgement")
        verbose_name_plural = _("acknowledgements")

    def __str__(self) -> str:
        return f"{self.source_id} ({self.shape})"

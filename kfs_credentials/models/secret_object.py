"""Table `kfs_credentials_secret_object`: what the seed's ledger has no column for, one row per ref."""

from __future__ import annotations

from collections.abc import Collection

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from kfs_credentials.models.schema import SeedIndex
from kfs_credentials.redaction import short_ref


class Attention(models.TextChoices):
    """Why a ref needs a person."""

    ERASURE_FAILS = "erasure_fails", _("its erasure failed PARK_AFTER times; tried again once a day")
    RETAINED = "retained", _("the store may not erase it yet")
    DISPLACED = "displaced", _("an old writer brought back an older ref; readable until a person chooses")
    UNREADABLE = "unreadable", _("a source names it, and it can neither be used again nor be copied")


PARKED = (Attention.ERASURE_FAILS, Attention.RETAINED)
"""The object is not erased, and the reason lies with the store."""


class Receipt(models.TextChoices):
    """What the store said when the object was to be erased."""

    ERASED = "erased", _("erased")
    ABSENT = "absent", _("already absent")


class Digest(models.Func):
    """The SHA-256 of a ref, which is the middle of its object's name; give it the column. Uses the index."""

    template = r"sha256((replace(%(expressions)s, '\', ''))::bytea)"
    output_field = models.BinaryField()
    arity = 1


class SecretObjectQuerySet(models.QuerySet["SecretObject"]):
    """Which objects."""

    def needing_attention(self) -> SecretObjectQuerySet:
        """Return those that need a person. Uses the partial index."""
        return self.filter(attention__isnull=False)

    def claimed(self) -> SecretObjectQuerySet:
        """Return those that were claimed for erasure at any time: they are never in use again."""
        return self.filter(first_claimed_at__isnull=False)

    def mark(self, refs: Collection[str], attention: Attention | None) -> int:
        """Note why these refs need a person, or that they do not any more. The ledger rows are locked."""
        return self.filter(pk__in=refs).update(attention=attention, updated_at=Now())


class SecretObject(models.Model):
    """Where the object of a ref lies, what it is sealed under, and what became of it.

    Written with the ledger row's own moves, and after it is locked. A ref that the Node service reserved gets its row
    from the cleanup's sweep.
    """

    credential_ref = models.TextField(_("credential ref"), primary_key=True)
    store = models.TextField(_("store alias"))
    key_id = models.TextField(_("key id"), null=True, blank=True)  # noqa: DJ001 - NULL: not known
    size = models.IntegerField(_("size in bytes"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"))
    updated_at = models.DateTimeField(_("updated at"))
    first_claimed_at = models.DateTimeField(_("first claimed for erasure at"), null=True, blank=True)
    first_erased_at = models.DateTimeField(_("first erased at"), null=True, blank=True)
    receipt = models.TextField(_("receipt"), null=True, blank=True, choices=Receipt)  # noqa: DJ001 - NULL: none yet
    attention = models.TextField(_("attention"), null=True, blank=True, choices=Attention)  # noqa: DJ001 - NULL: none
    abandoned_at = models.DateTimeField(_("abandoned at"), null=True, blank=True)
    abandoned_by = models.TextField(_("abandoned by"), null=True, blank=True)  # noqa: DJ001 - NULL: nobody
    abandoned_reason = models.TextField(_("reason"), null=True, blank=True)  # noqa: DJ001 - NULL: none

    objects = SecretObjectQuerySet.as_manager()

    class Meta:
        db_table = "kfs_credentials_secret_object"
        verbose_name = _("secret object")
        verbose_name_plural = _("secret objects")
        indexes = [
            SeedIndex(Digest("credential_ref"), name="kfs_credentials_secret_object_digest_idx"),
            SeedIndex(
                fields=["attention"],
                condition=Q(attention__isnull=False),
                name="kfs_credentials_secret_object_attention_idx",
            ),
        ]

    def __str__(self) -> str:
        return short_ref(self.credential_ref)

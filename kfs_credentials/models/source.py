"""Table `sources`: what has credentials, in clear (legacy) or in the secret store under a ref."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from kfs_credentials.crypto import sensitive
from kfs_credentials.errors import CredentialsInClearWarning
from kfs_credentials.models.knowledge_space import KnowledgeSpace
from kfs_credentials.models.schema import ExactJSONDecoder, ExactJSONEncoder, SeedIndex, exact_json_field
from kfs_credentials.redaction import redacted, redacted_text

CREDENTIALS = "credentials"
"""The key of metadata under which credentials lie in clear."""


class Shape(models.TextChoices):
    """What `metadata->'credentials'` is, in the words of `jsonb_typeof`."""

    OBJECT = "object", _("object")  # legacy credentials
    NULL = "null", _("JSON null")  # no credentials
    STRING = "string", _("string")  # these four are unsupported: never touched, never passed over silently
    NUMBER = "number", _("number")
    BOOLEAN = "boolean", _("boolean")
    ARRAY = "array", _("array")


UNSUPPORTED = (Shape.STRING, Shape.NUMBER, Shape.BOOLEAN, Shape.ARRAY)


class CredentialsShape(models.Func):
    """`jsonb_typeof(metadata -> 'credentials')`; give it the column: `CredentialsShape("metadata")`."""

    template = "jsonb_typeof(%(expressions)s -> 'credentials')"
    output_field = models.TextField()
    arity = 1


class HasLegacyCredentials(models.Func):
    """True for legacy credentials, with the literal that partial indexes need to see.

    As a parameter, 'object' would keep a generic plan from proving the predicate of `kfs_credentials_legacy_idx`.
    """

    template = "jsonb_typeof(%(expressions)s -> 'credentials') = 'object'"
    output_field = models.BooleanField()
    arity = 1


class MetadataField(models.JSONField):
    """`sources.metadata`. Whoever serializes it before the credentials are moved is warned, as `dumpdata` is.

    Django's serializers ask here; what reads the attribute (`values`, an API's own serializers) does not.

    They are not left out: a dump that is loaded again would have lost them, and nobody would know.
    """

    @sensitive  # the warning may have been made an error
    def value_to_string(self, obj: models.Model) -> Any:
        """Return what every serializer of Django asks for, with a warning where credentials are in it."""
        value = super().value_to_string(obj)
        if isinstance(value, dict) and value.get(CREDENTIALS) is not None:
            warnings.warn(
                "a source is being serialized with its credentials in clear, which it still has in metadata: whatever "
                "is made of it holds them too. Move them first (run_credential_backfill, credential_status), or leave "
                "sources out (dumpdata --exclude kfs_credentials.source); for an API there is Source.shown().",
                CredentialsInClearWarning,
                stacklevel=4,  # past what hides the value
            )
        return value

    def deconstruct(self) -> Any:
        """Return what migrations write: Django's own field, which it is to the database."""
        name, _, arguments, options = super().deconstruct()
        return name, "django.db.models.JSONField", arguments, options


class SourceQuerySet(models.QuerySet["Source"]):
    """Which sources. Writes that would touch `credential_ref` are refused: only the state machines move refs."""

    def legacy(self) -> SourceQuerySet:
        """Return the sources whose credentials are in clear, and which have no ref. Uses the partial index."""
        return self.filter(HasLegacyCredentials("metadata"), credential_ref__isnull=True)

    def unsupported(self) -> SourceQuerySet:
        """Return the sources whose credentials are neither an object nor absent nor JSON null."""
        return self.annotate(shape=CredentialsShape("metadata")).filter(shape__in=UNSUPPORTED)

    def referenced(self) -> SourceQuerySet:
        """Return the sources that have a ref."""
        return self.filter(credential_ref__isnull=False)

    def update(self, **kwargs: Any) -> int:
        """Update as Django does; raises `ValueError` if `credential_ref` is among the columns."""
        _refuse_ref(kwargs)
        return super().update(**kwargs)

    def bulk_update(self, objs: Iterable[Source], fields: Iterable[str], batch_size: int | None = None) -> int:
        """Update as Django does; raises `ValueError` if `credential_ref` is among the columns."""
        fields = list(fields)
        _refuse_ref(fields)
        return super().bulk_update(objs, fields, batch_size)

    # By position, `update_fields` could pass unseen: so the options are keywords here.
    def bulk_create(  # type: ignore[override]
        self, objs: Iterable[Source], batch_size: int | None = None, **options: Any
    ) -> list[Source]:
        """Insert as Django does; raises `ValueError` if one of the sources has a ref."""
        objs = list(objs)
        if any(source.credential_ref is not None for source in objs):
            _refuse_ref(["credential_ref"])
        _refuse_ref(options.get("update_fields") or ())
        return super().bulk_create(objs, batch_size, **options)


def _refuse_ref(names: Collection[str]) -> None:
    if "credential_ref" in names:
        raise ValueError(
            "Source.credential_ref is never written through the model: a stale object would bring back an old ref "
            "and lose a secret. Leave it out; the backfill and the services move refs."
        )


class Source(models.Model):
    """A data source.

    `save()` never writes `credential_ref`: a whole-row save of an object that was read before a rotation would bring
    back the old ref. It writes `metadata` as it was read, which can bring back credentials that were moved since; so
    save with `update_fields`.
    """

    DELETING = "deleting"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    # The key is in the database, with ON DELETE CASCADE: Django need not collect what PostgreSQL deletes by itself.
    knowledge_space = models.ForeignKey(
        KnowledgeSpace,
        models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="sources",
        verbose_name=_("knowledge space"),
    )
    type = models.TextField(_("type"))
    status = models.TextField(_("status"))
    name = models.TextField(_("name"))
    uri = models.TextField(_("URI"))
    metadata = MetadataField(_("metadata"), encoder=ExactJSONEncoder, decoder=ExactJSONDecoder)
    permission_scope = exact_json_field(verbose_name=_("permission scope"))
    version = models.IntegerField(_("version"))
    created_at = models.DateTimeField(_("created at"))
    updated_at = models.DateTimeField(_("updated at"))
    credential_ref = models.TextField(_("credential ref"), null=True, blank=True, editable=False)  # noqa: DJ001 - the seed's

    objects = SourceQuerySet.as_manager()

    class Meta:
        db_table = "sources"
        verbose_name = _("source")
        verbose_name_plural = _("sources")
        base_manager_name = "objects"
        constraints = [
            models.UniqueConstraint(fields=["knowledge_space", "id"], name="sources_space_id_uq"),
            models.UniqueConstraint(
                fields=["credential_ref"],
                condition=Q(credential_ref__isnull=False),
                name="sources_credential_ref_uq",
            ),
        ]
        indexes = [
            SeedIndex(fields=["knowledge_space", "status"], name="sources_space_status_idx"),
            SeedIndex(
                fields=["id"],
                condition=Q(credential_ref__isnull=True),
                name="sources_credential_backfill_discovery_idx",
            ),
            # Ours, and the only one: discovery and an idle worker cost nothing that grows with the table. It makes
            # updates of metadata non-HOT while it exists.
            SeedIndex(
                fields=["id"],
                condition=Q(("credential_ref__isnull", True), HasLegacyCredentials("metadata")),
                name="kfs_credentials_legacy_idx",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def save(self, *, update_fields: Iterable[str] | None = None, **options: Any) -> None:
        """Save as Django does, without `credential_ref`; raises `ValueError` if asked to write it."""
        if update_fields is not None:
            update_fields = list(update_fields)
            _refuse_ref(update_fields)
        elif options.get("force_insert") or (self._state.adding and not options.get("force_update")):
            if self.credential_ref is not None:
                _refuse_ref(["credential_ref"])
        else:
            update_fields = _columns_saved(self)
        super().save(update_fields=update_fields, **options)

    @sensitive
    def shown(self) -> dict[str, Any]:
        """Return what an API may answer and a log may have: the columns by name, and no secret.

        Credentials are left out, wherever they are; instead `has_credentials` says whether there are some. So is the
        ref. What looks like a secret elsewhere is hidden, at any depth: see `redaction`.
        """
        metadata, in_clear = self.metadata, None
        if isinstance(metadata, dict):
            in_clear = metadata.get(CREDENTIALS)
            metadata = {key: value for key, value in metadata.items() if key != CREDENTIALS}
        return {
            "id": self.pk,
            "knowledge_space": self.knowledge_space_id,
            "type": self.type,
            "status": self.status,
            "name": redacted_text(self.name),
            "uri": redacted_text(self.uri),
            "metadata": redacted(metadata),
            "permission_scope": redacted(self.permission_scope),
            "version": self.version,
            "created_at": self.created_at,
            "updated_at": self.updated_at,
            "has_credentials": self.credential_ref is not None or in_clear is not None,
        }


def _columns_saved(source: Source) -> Sequence[str]:
    deferred = source.get_deferred_fields()
    return [
        field.name
        for field in source._meta.concrete_fields
        if not field.primary_key and field.name != "credential_ref" and field.attname not in deferred
    ]

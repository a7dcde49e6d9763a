"""The rows that status and operators look at: which sources and jobs are open, which of them need a person."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from django.db import models
from django.db.models import Exists, OuterRef, Q
from django.db.models.lookups import GreaterThan

from kfs_credentials.conf import settings
from kfs_credentials.models import (
    AcknowledgedShape,
    Acknowledgement,
    JobError,
    KnowledgeSpace,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from kfs_credentials.models.knowledge_space import being_deleted
from kfs_credentials.models.source import HasLegacyCredentials

if TYPE_CHECKING:
    import uuid

    from django.db.models import QuerySet

    from kfs_credentials.models.backfill import BackfillQuerySet
    from kfs_credentials.models.ledger import LedgerQuerySet
    from kfs_credentials.models.source import SourceQuerySet


class CredentialsSize(models.Func):
    """The bytes of the credentials as `jsonb` prints them: never less than the bytes that the store would keep."""

    template = "octet_length((%(expressions)s -> 'credentials')::text)"
    output_field = models.IntegerField()
    arity = 1


@dataclass(frozen=True)
class Selection:
    """What is looked at: a database, or one tenant or one space of it.

    Open is a source that is not being deleted, and whose space is not.

    Which sources have a failed job is found out from the jobs, and never by looking for the job of each source:
    there may be a million of these, and PostgreSQL, which cannot guess how many are legacy, takes them for few.
    A tenant is given as the list of its spaces for the same reason.
    """

    using: str
    tenant: str | None
    space: uuid.UUID | None
    tenants_spaces: tuple[uuid.UUID, ...]
    being_deleted: tuple[uuid.UUID, ...]

    @classmethod
    def of(cls, using: str, *, tenant: str | None = None, space: uuid.UUID | None = None) -> Self:
        """Return the selection of alias `using`, narrowed down to one tenant and one space where given."""
        spaces = KnowledgeSpace.objects.using(using).filter(tenant_id=tenant).values_list("pk", flat=True)
        return cls(
            using,
            tenant,
            space,
            tenants_spaces=() if tenant is None else tuple(spaces),
            being_deleted=tuple(being_deleted(using)),
        )

    def exists(self) -> bool:
        """Return whether the tenant or space is known: a space of it is there, or a ref that outlived it."""
        if self.tenant is None and self.space is None:
            return True
        spaces = KnowledgeSpace.objects.using(self.using)
        if self.tenant is not None:
            spaces = spaces.filter(tenant_id=self.tenant)
        if self.space is not None:
            spaces = spaces.filter(pk=self.space)
        return spaces.exists() or self.refs().exists()

    def sources(self) -> SourceQuerySet:
        """Return all sources."""
        sources = Source.objects.using(self.using).all()
        if self.space is not None:
            sources = sources.filter(knowledge_space_id=self.space)
        return sources if self.tenant is None else sources.filter(knowledge_space_id__in=self.tenants_spaces)

    def jobs(self) -> BackfillQuerySet:
        """Return all jobs."""
        jobs: BackfillQuerySet = SourceCredentialBackfill.objects.using(self.using)
        return jobs.of(self.tenant, self.space)

    def refs(self) -> LedgerQuerySet:
        """Return all ledger rows."""
        refs: LedgerQuerySet = SourceSecretLifecycleRef.objects.using(self.using)
        return refs.of(self.tenant, self.space)

    def is_open(self, source: str = "") -> Q:
        """Return the condition that a source is open. `source`: a prefix of its fields' names."""
        return ~(
            Q((f"{source}status", Source.DELETING))
            | Q((f"{source}pk__in", self.being_deleted))
            | Q((f"{source}knowledge_space_id__in", self.being_deleted))
        )

    def unsupported(self) -> QuerySet[Any]:
        """Return the open sources with unsupported credentials, annotated with their `shape`."""
        return self.sources().unsupported().filter(self.is_open())

    def open_jobs(self) -> BackfillQuerySet:
        """Return the jobs of open sources."""
        return self.jobs().filter(self.is_open("source__"))

    def failed_legacy(self) -> BackfillQuerySet:
        """Return the failed jobs of open sources that still have legacy credentials and no ref."""
        legacy = Q(HasLegacyCredentials("source__metadata"), source__credential_ref__isnull=True)
        return self.open_jobs().failed().filter(legacy)

    def too_large(self) -> BackfillQuerySet:
        """Return those of them that failed since the credentials are too large, which they still are."""
        still = GreaterThan(CredentialsSize("source__metadata"), settings.MAX_SECRET_BYTES)
        return self.failed_legacy().filter(still, last_error_code=JobError.TOO_LARGE)


def is_acknowledged(source: str, shape: AcknowledgedShape | str) -> Exists:
    """Return the condition that a person has acknowledged credentials of this shape.

    `source` and, unless one shape is meant, `shape`: the fields of the outer query that hold the id and the shape.
    """
    wanted = shape.value if isinstance(shape, AcknowledgedShape) else OuterRef(shape)
    return Exists(Acknowledgement.objects.filter(source_id=OuterRef(source), shape=wanted))

"""Table `knowledge_spaces`: the tenant's containers of sources."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from django.db import connections, models
from django.utils.translation import gettext_lazy as _

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler


class LifecycleState(models.Func):
    """`lifecycle_state` of a space, or 'active' where the column is not there yet.

    Later versions of knowledge-fs add the column (interop.md, section 7). Reading it through the row's JSON form
    works before and after, without asking the catalog first. Give it the primary key: `LifecycleState("id")`.
    """

    output_field = models.TextField()
    arity = 1

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **__: Any) -> tuple[str, list[Any]]:  # type: ignore[override]
        """Return the SQL, with the alias that the table has in this query."""
        (column,) = self.get_source_expressions()
        qualified, _ = compiler.compile(column)
        row = qualified.rpartition(".")[0]
        return f"COALESCE(to_jsonb({row}) ->> 'lifecycle_state', 'active')", []


def deletion_targets(using: str) -> list[uuid.UUID]:
    """Return the ids of spaces and sources that a deletion of knowledge-fs is at work on now.

    Empty where the table `deletion_jobs` does not exist (it comes with a later version). Takes no locks.
    """
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT to_regclass('deletion_jobs') IS NOT NULL")
        if not cursor.fetchone()[0]:
            return []
        cursor.execute("SELECT target_id FROM deletion_jobs WHERE active_slot = 1")
        return [target for (target,) in cursor.fetchall()]


class KnowledgeSpaceQuerySet(models.QuerySet["KnowledgeSpace"]):
    """Which spaces."""

    def open(self) -> KnowledgeSpaceQuerySet:
        """Return the spaces that are not being deleted, as far as their own row says."""
        return self.alias(lifecycle=LifecycleState("id")).filter(lifecycle="active")


class KnowledgeSpace(models.Model):
    """A tenant's space. The table belongs to the host; nothing here writes it."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant_id = models.TextField(_("tenant"))
    slug = models.TextField(_("slug"))
    name = models.TextField(_("name"))
    description = models.TextField(_("description"), null=True, blank=True)  # noqa: DJ001 - the seed's column
    created_at = models.DateTimeField(_("created at"))
    updated_at = models.DateTimeField(_("updated at"))

    objects = KnowledgeSpaceQuerySet.as_manager()

    class Meta:
        db_table = "knowledge_spaces"
        verbose_name = _("knowledge space")
        verbose_name_plural = _("knowledge spaces")
        constraints = [
            models.UniqueConstraint(fields=["tenant_id", "slug"], name="knowledge_spaces_tenant_slug_uq"),
            models.UniqueConstraint(fields=["tenant_id", "id"], name="knowledge_spaces_tenant_id_uq"),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.tenant_id})"

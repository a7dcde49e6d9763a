"""Table `knowledge_spaces`: the tenant's containers of sources."""

from __future__ import annotations

import uuid

from django.db import connections, models
from django.utils.translation import gettext_lazy as _


def being_deleted(using: str) -> list[uuid.UUID]:
    """Return the ids of the spaces and sources that a deletion of knowledge-fs is at work on now.

    Later versions of it say so in `knowledge_spaces.lifecycle_state` and in a table `deletion_jobs` (interop.md,
    section 7); where there is neither, the list is empty. A source may also say so itself, by its status. Takes no
    locks.
    """
    with connections[using].cursor() as cursor:
        cursor.execute(
            "SELECT to_regclass('deletion_jobs') IS NOT NULL, EXISTS (SELECT FROM pg_attribute "
            "WHERE attrelid = to_regclass('knowledge_spaces') AND attname = 'lifecycle_state' AND NOT attisdropped)"
        )
        has_jobs, has_state = cursor.fetchone()
        targets: list[uuid.UUID] = []
        if has_jobs:
            cursor.execute("SELECT target_id FROM deletion_jobs WHERE active_slot = 1")
            targets += [target for (target,) in cursor.fetchall()]
        if has_state:
            cursor.execute("SELECT id FROM knowledge_spaces WHERE lifecycle_state <> 'active'")
            targets += [space for (space,) in cursor.fetchall()]
        return targets


class KnowledgeSpace(models.Model):
    """A tenant's space. The table belongs to the host; nothing here writes it."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant_id = models.TextField(_("tenant"))
    slug = models.TextField(_("slug"))
    name = models.TextField(_("name"))
    description = models.TextField(_("description"), null=True, blank=True)  # noqa: DJ001 - the seed's column
    created_at = models.DateTimeField(_("created at"))
    updated_at = models.DateTimeField(_("updated at"))

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

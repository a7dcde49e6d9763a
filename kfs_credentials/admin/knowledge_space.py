"""The pages of the knowledge spaces."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.utils.html import format_html_join
from django.utils.translation import gettext_lazy as _

from kfs_credentials.admin import display
from kfs_credentials.admin.base import ReadOnlyAdmin
from kfs_credentials.admin.filters import TenantFilter
from kfs_credentials.admin.search import Term
from kfs_credentials.models import KnowledgeSpace, Source, SourceCredentialBackfill, SourceSecretLifecycleRef
from kfs_credentials.redaction import redacted_text


@admin.register(KnowledgeSpace)
class KnowledgeSpaceAdmin(ReadOnlyAdmin):
    """The tenants' containers of sources."""

    list_display = ("short_name", "tenant_id", "slug", "id", "updated_at")
    list_filter = (TenantFilter,)
    ordering = ("tenant_id", "slug")
    search_help_text = _("Enter the id of a knowledge space.")
    fields = (
        *("id", "tenant_id", "slug", "name", "described_as", "contents"),
        *("created_at", "updated_at"),
    )

    def found_by(self, term: Term) -> Q:
        """Find by id."""
        return term.ids("pk")

    @admin.display(description=_("name"))
    def short_name(self, space: Any) -> str:
        """Show the name, which may have any length."""
        return display.shortened(space.name) or str(space.pk)

    @admin.display(description=_("description"))
    def described_as(self, space: Any) -> str:
        """Show what people wrote, without secrets that they wrote there."""
        return redacted_text(space.description or display.NOTHING)

    @admin.display(description=_("what is in it"))
    def contents(self, space: Any) -> str:
        """Link to its sources, jobs and refs."""
        models = (Source, SourceCredentialBackfill, SourceSecretLifecycleRef)
        links = [(self.search_link(model, space.pk, model._meta.verbose_name_plural),) for model in models]
        return format_html_join(", ", "{}", links)

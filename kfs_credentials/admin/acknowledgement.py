"""The pages of what operators acknowledged."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from kfs_credentials.admin.base import ReadOnlyAdmin
from kfs_credentials.admin.filters import ShapeFilter
from kfs_credentials.admin.search import Term
from kfs_credentials.models import Acknowledgement, Source


@admin.register(Acknowledgement)
class AcknowledgementAdmin(ReadOnlyAdmin):
    """The credentials that stay in clear because a person said so."""

    list_display = ("source_id", "shape", "acknowledged_by", "acknowledged_at")
    list_filter = (ShapeFilter,)
    ordering = ("source_id",)
    search_help_text = _("Enter the id of a source.")
    fields = ("source", "shape", "acknowledged_by", "acknowledged_at")

    def found_by(self, term: Term) -> Q:
        """Find by source."""
        return term.ids("pk")

    @admin.display(description=_("source"))
    def source(self, row: Any) -> str:
        """Link to what is searched for, not to the page: the source may be gone."""
        return self.search_link(Source, row.pk, row.pk)

"""The pages of the rounds: when all refs, and all objects of a store, were last looked at."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from kfs_credentials.admin import display
from kfs_credentials.admin.base import ReadOnlyAdmin
from kfs_credentials.admin.search import Term
from kfs_credentials.models import Round


@admin.register(Round)
class RoundAdmin(ReadOnlyAdmin):
    """One row per kind of round: the sweep, and the patrol of each store."""

    not_loaded = ("lease_token",)
    list_display = ("name", "worker_id", "started_at", "completed_at", "covers_until", "found")
    ordering = ("name",)
    search_fields = ()
    search_help_text = _("Rounds have names, and there are few of them.")
    fields = ("name", "worker_id", "lease", "started_at", "completed_at", "covers_until", "found")

    def found_by(self, term: Term) -> Q:
        """Find nothing: a round has neither id nor ref."""
        return Q(pk__in=())

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rounds with `lease_left` by the database's clock."""
        rounds: QuerySet[Any] = super().get_queryset(request).annotate(lease_left=F("lease_expires_at") - Now())
        return rounds

    @admin.display(description=_("lease"))
    def lease(self, row: Any) -> str:
        """Show when the lease ends."""
        return display.lease(row.lease_expires_at, row.lease_left)

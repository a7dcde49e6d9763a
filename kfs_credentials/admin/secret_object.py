"""The pages of the objects in the secret store: where they lie, not what is in them."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.utils.translation import gettext_lazy as _

from kfs_credentials.admin.base import RefAdmin, may_see_full_refs
from kfs_credentials.admin.display import NOTHING
from kfs_credentials.admin.search import Term
from kfs_credentials.models import SecretObject
from kfs_credentials.redaction import redacted_text


@admin.register(SecretObject)
class SecretObjectAdmin(RefAdmin):
    """One row per ref. The address of a page is the ref, so only who may see refs in full may open it."""

    list_display = ("start_of_ref", "store", "key_id", "shown_size", "attention", "created_at", "updated_at")
    ordering = ("credential_ref",)
    search_help_text = _("Enter a ref, or the start of one.")
    fieldsets = (
        (None, {"fields": ("ref", "store", "key_id", "shown_size", "attention")}),
        (_("Erasure"), {"fields": ("first_claimed_at", "first_erased_at", "receipt")}),
        (_("Given up"), {"fields": ("abandoned_at", "abandoned_by", "reason")}),
        (_("Times"), {"fields": ("created_at", "updated_at")}),
    )

    def found_by(self, term: Term) -> Q:
        """Find by ref."""
        return term.refs("credential_ref")

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow the list to who may view it, and the page of a row to who may see refs in full."""
        allowed = super().has_view_permission(request, obj)
        return allowed and (obj is None or may_see_full_refs(request))

    def get_list_display_links(self, request: HttpRequest, list_display: Any) -> Any:
        """Link to the pages if they can be opened."""
        return super().get_list_display_links(request, list_display) if may_see_full_refs(request) else None

    @admin.display(description=_("size"))
    def shown_size(self, row: Any) -> str:
        """Show the size in words."""
        return NOTHING if row.size is None else filesizeformat(row.size)

    @admin.display(description=_("reason"))
    def reason(self, row: Any) -> str:
        """Show why its erasure was given up, without secrets that somebody wrote there."""
        return redacted_text(row.abandoned_reason or NOTHING)

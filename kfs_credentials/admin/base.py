"""What all pages have in common: they change nothing, load what they show, and stay fast on large tables."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.utils import flatten_fieldsets, quote
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.db import router
from django.db.models import Model, Q, QuerySet, Value
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from kfs_credentials.admin.display import NOTHING
from kfs_credentials.admin.paginator import BoundedPaginator
from kfs_credentials.admin.search import Term
from kfs_credentials.pause import current
from kfs_credentials.redaction import redacted_text, short_ref

if TYPE_CHECKING:
    Base = admin.ModelAdmin[Any]
else:
    Base = admin.ModelAdmin

NUL = "\x00"


def may_see_full_refs(request: HttpRequest) -> bool:
    """Return whether refs are shown to this user in full."""
    return request.user.has_perm("kfs_credentials.view_full_ref")


class IndexedChangeList(ChangeList):
    """A list in the order of its admin, which an index has; `?o=` would sort the whole table."""

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """Return the admin's order."""
        return list(self.model_admin.get_ordering(request))


class ReadOnlyAdmin(Base):
    """Shows rows to those who may view them. A row carries `full_refs`: whether refs are shown in full."""

    not_loaded: ClassVar[Sequence[str]] = ()
    """Columns that no page shows; what is not loaded cannot be shown by accident, nor by an error page."""

    # None, not empty: an action that the host adds to its site would be offered here too, an export for one.
    actions: Any = None
    list_per_page = 50
    paginator = BoundedPaginator
    # So that there is a search box; get_search_results says what it finds.
    search_fields: ClassVar[tuple[str, ...]] = ("pk",)
    show_facets = admin.ShowFacets.NEVER
    show_full_result_count = False
    sortable_by = ()

    class Media:
        """The style sheet of these pages."""

        css: ClassVar[dict[str, Sequence[str]]] = {"all": ["kfs_credentials/admin.css"]}

    def found_by(self, term: Term) -> Q:
        """Return which rows a search finds."""
        raise NotImplementedError

    @property
    def using(self) -> str:
        """The database to read from: the one that is written, so that what is shown is current."""
        return router.db_for_write(self.model)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows with what every page needs."""
        loaded = super().get_queryset(request).using(self.using).defer(*self.not_loaded)
        rows: QuerySet[Any] = loaded.annotate(full_refs=Value(may_see_full_refs(request)))
        return rows

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Return the row, or None; text that PostgreSQL cannot hold is the id of none."""
        return None if NUL in object_id else super().get_object(request, object_id, from_field)

    def has_add_permission(self, request: HttpRequest, *args: Any) -> bool:
        """Nobody adds rows here."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody changes rows here."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody deletes rows here."""
        return False

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """Return all fields that are shown."""
        return list(flatten_fieldsets(self.get_fieldsets(request, obj)))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the list that keeps its order."""
        return IndexedChangeList

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Allow the filters of the page alone.

        Django allows every lookup on the model's own fields, and so lets everybody who sees the list find out
        `?metadata__credentials__password__startswith=`, letter by letter.
        """
        filters: Any = self.list_filter
        return lookup in {chosen.parameter_name for chosen in filters}

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return the rows that the search finds: none for what it does not understand."""
        if not search_term:
            return queryset, False
        term = Term.read(search_term, full_refs=may_see_full_refs(request))
        return (queryset.filter(self.found_by(term)) if term else queryset.none()), False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list; say who has paused the workers, and how to search if a search cannot be understood."""
        text = request.GET.get(SEARCH_VAR, "")
        if request.method == "GET" and text and not Term.read(text, full_refs=True):
            neither = gettext("That is neither an id nor a ref. %(help)s") % {"help": self.search_help_text}
            self.message_user(request, neither, messages.WARNING)
        if request.method == "GET" and (pause := current(self.using)) is not None:
            paused = gettext("The workers are paused, by %(by)s: %(reason)s") % {
                "by": redacted_text(pause.paused_by),
                "reason": redacted_text(pause.reason),
            }
            self.message_user(request, paused, messages.WARNING)
        return super().changelist_view(request, extra_context)

    def link(self, model: type[Model], pk: uuid.UUID | str, text: object) -> str:
        """Return a link to the page of a row."""
        page = reverse(self._page(model, "change"), args=[quote(pk)], current_app=self.admin_site.name)
        return format_html('<a href="{}">{}</a>', page, text)

    def search_link(self, model: type[Model], term: object, text: object) -> str:
        """Return a link to the list of what a search finds."""
        page = reverse(self._page(model, "changelist"), current_app=self.admin_site.name)
        return format_html('<a href="{}?{}">{}</a>', page, urlencode({SEARCH_VAR: str(term)}), text)

    @staticmethod
    def ref_of(row: Any, ref: str) -> str:
        """Return a ref as the reader of the row may see it."""
        return ref if row.full_refs else short_ref(ref)

    @staticmethod
    def ref_in_list(row: Any, ref: str) -> str:
        """Return the start of a ref, with all of it as a tooltip if the reader of the row may see it."""
        if not row.full_refs:
            return short_ref(ref)
        return format_html('<span class="kfs-ref" title="{}">{}</span>', ref, short_ref(ref))

    @staticmethod
    def _page(model: type[Model], kind: str) -> str:
        return f"admin:{model._meta.app_label}_{model._meta.model_name}_{kind}"


class RefAdmin(ReadOnlyAdmin):
    """Rows with a `credential_ref`, or none."""

    @admin.display(description=_("credential ref"))
    def start_of_ref(self, row: Any) -> str:
        """Show the start of the ref."""
        ref = row.credential_ref
        return NOTHING if ref is None else self.ref_in_list(row, ref)

    @admin.display(description=_("credential ref"))
    def ref(self, row: Any) -> str:
        """Show the ref, in full or its start."""
        ref = row.credential_ref
        return NOTHING if ref is None else self.ref_of(row, ref)

"""The pages of the events: who did what to which ref, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import display_for_value
from django.db.models import Q
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from kfs_credentials.admin import display
from kfs_credentials.admin.base import RefAdmin
from kfs_credentials.admin.filters import EventKindFilter
from kfs_credentials.admin.search import Term, in_scopes, known_scopes, recorded_scopes
from kfs_credentials.models import Event, EventKind, SourceSecretLifecycleRef
from kfs_credentials.redaction import redacted_text

MOST_EVENTS = 25
"""How many events the page of a ref shows."""
MOST_REFS = 1000
"""Of how many refs of a source the events are searched."""


def kind_of(event: Event) -> str:
    """Return what has happened, in words."""
    return str(EventKind(event.kind).label) if event.kind in EventKind.values else redacted_text(event.kind)


def detail_of(event: Event) -> str:
    """Return the detail: what a code means, anything else as it is."""
    if event.detail and display.CODE.fullmatch(event.detail):
        return display.error(event.detail)
    return redacted_text(event.detail or display.NOTHING)


def newest_of(using: str, ref: str) -> Sequence[Event]:
    """Return the newest events of a ref, at most `MOST_EVENTS` and one more. The index has them in this order."""
    return list(Event.objects.using(using).filter(credential_ref=ref).order_by("-id")[: MOST_EVENTS + 1])


def as_table(events: Sequence[Event]) -> SafeString | str:
    """Return a table of events, the newest first; only so many of them."""
    if not events:
        return display.NOTHING
    headings = format_html_join(
        "", "<th>{}</th>", [(gettext("at"),), (gettext("event"),), (gettext("actor"),), (gettext("detail"),)]
    )
    lines = format_html_join(
        "",
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
        (
            (display_for_value(event.created_at, display.NOTHING), kind_of(event), _actor(event), detail_of(event))
            for event in events[:MOST_EVENTS]
        ),
    )
    more = gettext("Only the newest %(count)d are shown.") % {"count": MOST_EVENTS}
    rest = format_html('<p class="kfs-more">{}</p>', more) if len(events) > MOST_EVENTS else ""
    return format_html("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>{}", headings, lines, rest)


def _actor(event: Event) -> str:
    # Whoever runs a command may give any name.
    return redacted_text(event.actor)


@admin.register(Event)
class EventAdmin(RefAdmin):
    """Every event, the newest first."""

    list_display = ("created_at", "shown_kind", "start_of_ref", "tenant_id", "source_id", "shown_actor", "shown_detail")
    list_display_links = ("created_at",)
    list_filter = (EventKindFilter,)
    ordering = ("-id",)
    search_help_text = _("Enter the id of a source, a ref, or the start of one.")
    fields = (
        *("created_at", "shown_kind", "ref", "tenant_id", "knowledge_space_id", "source_id"),
        *("shown_actor", "shown_detail"),
    )

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        """Return the newest first; of one kind by their time, as the index has them."""
        return ("-created_at", "-id") if EventKindFilter.parameter_name in request.GET else tuple(self.ordering)

    def found_by(self, term: Term) -> Q:
        """Find by ref, and by the source whose refs the ledger has, even if it is gone itself."""
        found = term.refs("credential_ref")
        if term.id is None:
            return found
        scopes = known_scopes(self.using, term.id) or recorded_scopes(self.using, term.id)
        own = SourceSecretLifecycleRef.objects.using(self.using).filter(in_scopes(scopes, term.id), source_id=term.id)
        # Its refs first: events have no index on the source, which would cost each of them more than it is worth.
        refs = list(own.order_by("-id").values_list("credential_ref", flat=True)[:MOST_REFS])
        acknowledged = Q(kind=EventKind.ACKNOWLEDGED, source_id=term.id)
        return found | Q(credential_ref__in=refs) | acknowledged

    @admin.display(description=_("event"))
    def shown_kind(self, row: Any) -> str:
        """Show what has happened."""
        return kind_of(row)

    @admin.display(description=_("actor"))
    def shown_actor(self, row: Any) -> str:
        """Show who acted."""
        return display.shortened(_actor(row))

    @admin.display(description=_("detail"))
    def shown_detail(self, row: Any) -> str:
        """Show the detail."""
        return detail_of(row)

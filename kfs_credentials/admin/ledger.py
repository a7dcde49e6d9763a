"""The pages of the ledger: every ref, from its reservation to its confirmed erasure."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import display_for_field
from django.db.models import F, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.template.defaultfilters import filesizeformat
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from kfs_credentials.admin import display
from kfs_credentials.admin.base import RefAdmin
from kfs_credentials.admin.confirm import DecidingAdmin
from kfs_credentials.admin.event import as_table, newest_of
from kfs_credentials.admin.filters import AttentionFilter, RefStateFilter, TenantFilter
from kfs_credentials.admin.ref_decisions import ABANDON, DISCARD, ERASE_AGAIN, RESTORE
from kfs_credentials.admin.search import Term, in_scopes, known_scopes, recorded_scopes
from kfs_credentials.models import (
    Event,
    KnowledgeSpace,
    Purpose,
    RefState,
    SecretObject,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from kfs_credentials.redaction import redacted_text

ERASURE = ("first_claimed_at", "first_erased_at", "receipt")
GIVEN_UP = ("abandoned_at", "abandoned_by", "abandoned_reason")
OBJECT_FIELDS = {field.name: field for field in SecretObject._meta.concrete_fields}


def of_object(name: str) -> Any:
    """Return a column of the ledger's that shows a field of the ref's secret object."""

    @admin.display(description=OBJECT_FIELDS[name].verbose_name)
    def shown(row: Any) -> str:
        return _shown(name, getattr(row.object, name, None))

    return staticmethod(shown)


def _shown(name: str, value: Any) -> str:
    """Return a field of a secret object as it is shown, without secrets: a person may have given one as a reason."""
    return redacted_text(str(display_for_field(value, OBJECT_FIELDS[name], display.NOTHING)))


@admin.register(SourceSecretLifecycleRef)
class LedgerAdmin(RefAdmin, DecidingAdmin):
    """The ledger, and what there is to decide about refs."""

    not_loaded = ("lease_token", "last_error_message")
    actions = ("erase_again", "restore", "discard", "abandon")
    decisions = (ERASE_AGAIN, RESTORE, DISCARD, ABANDON)
    confirmation_columns = ("start_of_ref", "tenant_id", "source_id", "shown_attention", "short_error", "age")
    list_display = (
        *("start_of_ref", "shown_state", "shown_attention", "purpose", "tenant_id"),
        *("next_erasure", "short_error", "age"),
    )
    list_filter = (RefStateFilter, AttentionFilter, TenantFilter)
    # The claim index. In each state, what is due first comes first.
    ordering = ("state", "next_delete_at", "lease_expires_at", "updated_at", "id")
    search_help_text = _("Enter the id of a source, knowledge space or backfill job, a ref, or the start of one.")
    fieldsets = (
        (None, {"fields": ("ref", "shown_state", "shown_attention", "purpose", "id", "operation", "error")}),
        (_("Scope"), {"fields": ("tenant_id", "space", "source", "source_version")}),
        (_("Object"), {"fields": ("stored",)}),
        (_("Lease"), {"fields": ("worker_id", "lease", "heartbeat_at")}),
        (_("Erasure"), {"fields": ("next_delete_at", "delete_attempts", "deleted_at", *ERASURE)}),
        (_("Given up"), {"fields": GIVEN_UP}),
        (_("Times"), {"fields": ("recover_after", "created_at", "updated_at", "row_version")}),
        (_("Events"), {"fields": ("events",)}),
    )

    def found_by(self, term: Term) -> Q:
        """Find by ref, by the job that reserved it, by source and by space, even if those are gone."""
        found = term.refs("credential_ref")
        if term.id is None:
            return found
        scopes = known_scopes(self.using, term.id) or recorded_scopes(self.using, term.id)
        return found | term.ids("pk") | Q(operation_id=str(term.id)) | in_scopes(scopes, term.id)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the refs with `attention`, and with `age`, `lease_left` and `due_in` by the database's clock."""
        stored = SecretObject.objects.filter(pk=OuterRef("credential_ref"))
        times = {
            "age": Now() - F("updated_at"),
            "lease_left": F("lease_expires_at") - Now(),
            "due_in": F("next_delete_at") - Now(),
        }
        rows = super().get_queryset(request)
        refs: QuerySet[Any] = rows.annotate(attention=Subquery(stored.values("attention")), **times)
        return refs

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Return the ref with its secret object as `object`, None if nothing is known of it."""
        row = super().get_object(request, object_id, from_field)
        if row is not None:
            row.object = SecretObject.objects.using(self.using).filter(pk=row.credential_ref).first()
        return row

    @admin.display(description=_("state"))
    def shown_state(self, row: Any) -> str:
        """Show the state, and until when it is leased."""
        return display.state(RefState(row.state), row.lease_expires_at, row.lease_left)

    @admin.display(description=_("attention"))
    def shown_attention(self, row: Any) -> str:
        """Show why it needs a person."""
        return _shown("attention", row.attention)

    @admin.display(description=_("next erasure"))
    def next_erasure(self, row: Any) -> str:
        """Show when its object is to be erased."""
        return display.from_now(row.next_delete_at, row.due_in)

    @admin.display(description=_("lease"))
    def lease(self, row: Any) -> str:
        """Show when the lease ends."""
        return display.lease(row.lease_expires_at, row.lease_left)

    @admin.display(description=_("last move"))
    def age(self, row: Any) -> str:
        """Show when the row last changed."""
        return display.from_now(row.updated_at, -row.age)

    @admin.display(description=_("last error"))
    def short_error(self, row: Any) -> str:
        """Show what the error code means, without the code."""
        return display.error(row.last_error_code, code=False)

    @admin.display(description=_("last error"))
    def error(self, row: Any) -> str:
        """Show what the error code means."""
        return display.error(row.last_error_code)

    @admin.display(description=_("operation"))
    def operation(self, row: Any) -> str:
        """Link to the job that reserved the ref, if a job did."""
        if row.purpose != Purpose.BACKFILL:
            return str(row.operation_id)
        return self.search_link(SourceCredentialBackfill, row.operation_id, row.operation_id)

    @admin.display(description=_("knowledge space"))
    def space(self, row: Any) -> str:
        """Link to the space as a search: it may be gone."""
        return self.search_link(KnowledgeSpace, row.knowledge_space_id, row.knowledge_space_id)

    @admin.display(description=_("source"))
    def source(self, row: Any) -> str:
        """Link to the source, if there still is one."""
        if Source.objects.using(self.using).filter(pk=row.source_id).exists():
            return self.link(Source, row.source_id, row.source_id)
        return format_html("{} {}", row.source_id, gettext("(gone)"))

    @admin.display(description=_("secret object"))
    def stored(self, row: Any) -> str:
        """Show in which store its object lies, and under which key."""
        if row.object is None:
            return display.NOTHING
        return gettext("store %(store)s, key %(key)s, %(size)s") % {
            "store": row.object.store,
            "key": row.object.key_id or display.NOTHING,
            "size": display.NOTHING if row.object.size is None else filesizeformat(row.object.size),
        }

    @admin.display(description=_("events"))
    def events(self, row: Any) -> str:
        """Show the newest events of the ref, and link to all of its source."""
        link = self.search_link(Event, row.source_id, gettext("All events of this source"))
        return format_html("{}<p>{}</p>", as_table(newest_of(self.using, row.credential_ref)), link)

    first_claimed_at = of_object("first_claimed_at")
    first_erased_at = of_object("first_erased_at")
    receipt = of_object("receipt")
    abandoned_at = of_object("abandoned_at")
    abandoned_by = of_object("abandoned_by")
    abandoned_reason = of_object("abandoned_reason")

    def has_settle_permission(self, request: HttpRequest) -> bool:
        """Return whether this user may ask for erasures and choose between refs."""
        return request.user.has_perm("kfs_credentials.settle_sourcesecretlifecycleref")

    def has_abandon_permission(self, request: HttpRequest) -> bool:
        """Return whether this user may give up on erasures."""
        return request.user.has_perm("kfs_credentials.abandon_sourcesecretlifecycleref")

    @admin.action(description=_("Erase the selected parked refs again"), permissions=["settle"])
    def erase_again(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask for confirmation, with the parked refs as they are now."""
        return self.ask(request, queryset, ERASE_AGAIN)

    @admin.action(description=_("Restore the selected refs: their sources name them again"), permissions=["settle"])
    def restore(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask for confirmation, with the refs that can be restored."""
        return self.ask(request, queryset, RESTORE)

    @admin.action(description=_("Discard the selected displaced refs"), permissions=["settle"])
    def discard(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask for confirmation, with the displaced refs as they are now."""
        return self.ask(request, queryset, DISCARD)

    @admin.action(description=_("Give up on the selected parked refs: not erased"), permissions=["abandon"])
    def abandon(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask for a reason and for confirmation, with the parked refs as they are now."""
        return self.ask(request, queryset, ABANDON)

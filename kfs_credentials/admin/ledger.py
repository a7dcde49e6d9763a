"""The pages of the ledger: every ref, from its reservation to its confirmed erasure."""

from __future__ import annotations

import uuid
from typing import Any

from django.contrib import admin
from django.db import connections
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from kfs_credentials import sql
from kfs_credentials.admin import display
from kfs_credentials.admin.base import ReadOnlyAdmin
from kfs_credentials.admin.filters import RefStateFilter, TenantFilter
from kfs_credentials.admin.search import Term, in_scopes, known_scopes
from kfs_credentials.models import (
    KnowledgeSpace,
    RefState,
    SecretObject,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)


@admin.register(SourceSecretLifecycleRef)
class LedgerAdmin(ReadOnlyAdmin):
    """The ledger."""

    not_loaded = ("lease_token", "last_error_message")
    list_display = ("start_of_ref", "shown_state", "purpose", "tenant_id", "next_erasure", "short_error", "age")
    list_filter = (RefStateFilter, TenantFilter)
    # The claim index. In each state, what is due first comes first.
    ordering = ("state", "next_delete_at", "lease_expires_at", "updated_at", "id")
    search_help_text = _("Enter the id of a source, knowledge space or backfill job, a ref, or the start of one.")
    fieldsets = (
        (None, {"fields": ("ref", "shown_state", "purpose", "id", "operation", "error")}),
        (_("Scope"), {"fields": ("tenant_id", "space", "source", "source_version")}),
        (_("Object"), {"fields": ("stored",)}),
        (_("Lease"), {"fields": ("worker_id", "lease", "heartbeat_at")}),
        (_("Erasure"), {"fields": ("next_delete_at", "delete_attempts", "deleted_at")}),
        (_("Times"), {"fields": ("recover_after", "created_at", "updated_at", "row_version")}),
    )

    def found_by(self, term: Term) -> Q:
        """Find by ref, by the job that reserved it, by source and by space, even if those are gone."""
        found = term.refs("credential_ref")
        if term.id is None:
            return found
        scopes = known_scopes(self.using, term.id) or self._recorded_scopes(term.id)
        return found | term.ids("pk") | Q(operation_id=str(term.id)) | in_scopes(scopes, term.id)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the refs with `age`, `lease_left` and `due_in` by the database's clock."""
        times = {
            "age": Now() - F("updated_at"),
            "lease_left": F("lease_expires_at") - Now(),
            "due_in": F("next_delete_at") - Now(),
        }
        refs: QuerySet[Any] = super().get_queryset(request).annotate(**times)
        return refs

    @admin.display(description=_("credential ref"))
    def start_of_ref(self, row: Any) -> str:
        """Show the start of the ref."""
        return self.ref_in_list(row, row.credential_ref)

    @admin.display(description=_("credential ref"))
    def ref(self, row: Any) -> str:
        """Show the ref, in full or its start."""
        return self.ref_of(row, row.credential_ref)

    @admin.display(description=_("state"))
    def shown_state(self, row: Any) -> str:
        """Show the state, and until when it is leased."""
        return display.state(RefState(row.state), row.lease_expires_at, row.lease_left)

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
        objects = SecretObject.objects.using(self.using).filter(pk=row.credential_ref)
        found = objects.values_list("store", "key_id", "size").first()
        if found is None:
            return display.NOTHING
        store, key_id, size = found
        return gettext("store %(store)s, key %(key)s, %(size)s") % {
            "store": store,
            "key": key_id or display.NOTHING,
            "size": display.NOTHING if size is None else filesizeformat(size),
        }

    def _recorded_scopes(self, of: uuid.UUID) -> list[tuple[str, uuid.UUID]]:
        """Return the tenant and space of every ref of a source or a space that is gone."""
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql.read("admin/scopes"), {"id": of})
            return list(cursor.fetchall())

"""The pages of what it takes to operate: bindings, the pause, closed keys, ticks, refusals, positions of commands."""

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
from kfs_credentials.models import Binding, Checkpoint, ClosedKey, Pause, Refusal, RefusalReason, Tick
from kfs_credentials.redaction import redacted_text


def by_person(name: str, description: Any) -> Any:
    """Return a column for what a person has given, a name or a reason, without secrets."""

    @admin.display(description=description)
    def shown(row: Any) -> str:
        return redacted_text(getattr(row, name) or display.NOTHING)

    return staticmethod(shown)


class FewRowsAdmin(ReadOnlyAdmin):
    """Tables of a few rows, with neither ids nor refs to search for."""

    search_fields = ()
    search_help_text = _("There are few of them, and they have neither ids nor refs.")

    def found_by(self, term: Term) -> Q:
        """Find nothing."""
        return Q(pk__in=())


@admin.register(Binding)
class BindingAdmin(FewRowsAdmin):
    """Which store is this database's own."""

    not_loaded = ("lease_token",)
    list_display = ("store", "environment_id", "epoch", "bound_at", "shown_bound_by", "confirmed_at")
    ordering = ("store",)
    fields = (
        *("store", "environment_id", "system_identifier", "database_oid", "epoch"),
        *("bound_at", "shown_bound_by", "confirmed_at", "worker_id", "lease"),
    )
    shown_bound_by = by_person("bound_by", _("bound by"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the bindings with `lease_left` by the database's clock."""
        rows: QuerySet[Any] = super().get_queryset(request).annotate(lease_left=F("lease_expires_at") - Now())
        return rows

    @admin.display(description=_("lease"))
    def lease(self, row: Any) -> str:
        """Show when the lease ends."""
        return display.lease(row.lease_expires_at, row.lease_left)


@admin.register(Pause)
class PauseAdmin(FewRowsAdmin):
    """Who has paused the workers, and why; no row while they are not paused."""

    list_display = ("paused_at", "shown_paused_by", "shown_reason")
    ordering = ("id",)
    fields = list_display
    shown_paused_by = by_person("paused_by", _("paused by"))
    shown_reason = by_person("reason", _("reason"))


@admin.register(ClosedKey)
class ClosedKeyAdmin(FewRowsAdmin):
    """The keys under which nothing is activated any more."""

    list_display = ("key_id", "closed_at", "shown_closed_by")
    ordering = ("key_id",)
    fields = list_display
    shown_closed_by = by_person("closed_by", _("closed by"))


@admin.register(Tick)
class TickAdmin(FewRowsAdmin):
    """When workers of each role were last at work."""

    list_display = ("role", "worker_id", "ago")
    ordering = ("role",)
    fields = ("role", "worker_id", "ticked_at")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the ticks with their `age` by the database's clock."""
        rows: QuerySet[Any] = super().get_queryset(request).annotate(age=Now() - F("ticked_at"))
        return rows

    @admin.display(description=_("last tick"))
    def ago(self, row: Any) -> str:
        """Show how long ago that was."""
        return display.from_now(row.ticked_at, -row.age)


@admin.register(Refusal)
class RefusalAdmin(FewRowsAdmin):
    """How often workers have refused to work, or had to wait, and why."""

    list_display = ("role", "shown_reason", "count", "refused_at")
    ordering = ("role", "reason")
    fields = list_display

    @admin.display(description=_("reason"))
    def shown_reason(self, row: Any) -> str:
        """Show the reason in words."""
        return str(RefusalReason(row.reason).label) if row.reason in RefusalReason.values else display.NOTHING


@admin.register(Checkpoint)
class CheckpointAdmin(FewRowsAdmin):
    """How far commands have got that go on where they were interrupted."""

    not_loaded = ("data",)
    list_display = ("name", "started_at", "updated_at")
    ordering = ("name",)
    fields = list_display

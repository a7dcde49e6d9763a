"""The filters at the side of the lists. Each adds a condition that an index has."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib.admin import ModelAdmin, SimpleListFilter
from django.db import connections
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from kfs_credentials import sql
from kfs_credentials.models import AcknowledgedShape, Attention, EventKind, RefError, RefState, RunState, SecretObject

MOST_TENANTS = 200


class TenantFilter(SimpleListFilter):
    """By tenant. Lists the first 200; `?tenant=` takes any."""

    title: Any = _("tenant")
    parameter_name = "tenant"
    column: ClassVar[str] = "tenant_id"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[str, str]]:
        """Return the tenants that have spaces."""
        using = model_admin.get_queryset(request).db
        with connections[using].cursor() as cursor:
            cursor.execute(sql.read("admin/tenants"), {"limit": MOST_TENANTS + 1})
            tenants = [tenant for (tenant,) in cursor.fetchall()]
        if len(tenants) > MOST_TENANTS:
            self.title = gettext("tenant (the first %(count)d)") % {"count": MOST_TENANTS}
        return [(tenant, tenant) for tenant in tenants[:MOST_TENANTS]]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the tenant's rows."""
        tenant = self.value()
        if tenant is None:
            return queryset
        return queryset.none() if "\x00" in tenant else queryset.filter((self.column, tenant))


class SourceTenantFilter(TenantFilter):
    """By the tenant of the source's space."""

    column = "knowledge_space__tenant_id"


class StateFilter(SimpleListFilter):
    """By state, or by a lease that ran out, for tables with leases."""

    title = _("state")
    parameter_name = "state"
    states: ClassVar[type[RunState | RefState]]
    EXPIRED = "expired"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[str, Any]]:
        """Return the states."""
        return [*self.states.choices, (self.EXPIRED, _("lease expired"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows in that state."""
        match self.value():
            case None:
                return queryset
            case self.EXPIRED:
                return queryset.expired()  # type: ignore[attr-defined, no-any-return]
            case state if state in self.states.values:
                return queryset.filter((queryset.state_field, state))  # type: ignore[attr-defined]
            case _:
                return queryset.none()


class RunStateFilter(StateFilter):
    """By the state of a job."""

    states = RunState


class RefStateFilter(StateFilter):
    """By the state of a ref."""

    states = RefState


class AttentionFilter(SimpleListFilter):
    """By why a ref needs a person, or that a person gave it up."""

    title = _("attention")
    parameter_name = "attention"
    ANY = "any"
    ABANDONED = "abandoned"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[str, Any]]:
        """Return the reasons."""
        return [(self.ANY, _("needs a person")), *Attention.choices, (self.ABANDONED, _("given up: not erased"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return those refs."""
        needy = SecretObject.objects.needing_attention()
        match self.value():
            case None:
                return queryset
            case self.ANY:
                return queryset.filter(credential_ref__in=needy.values("pk"))
            case self.ABANDONED:
                # The claim index has these together: few refs are retired and have no time for their erasure.
                return queryset.filter(
                    state=RefState.RETIRED, next_delete_at__isnull=True, last_error_code=RefError.ABANDONED
                )
            case reason if reason in Attention.values:
                return queryset.filter(credential_ref__in=needy.filter(attention=reason).values("pk"))
            case _:
                return queryset.none()


class CredentialsFilter(SimpleListFilter):
    """By where a source's credentials are. Unsupported ones have no index: see `credential_status`."""

    title = _("credentials")
    parameter_name = "credentials"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[str, Any]]:
        """Return the two places."""
        return [("legacy", _("in clear")), ("referenced", _("in the secret store"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the sources whose credentials are there."""
        match self.value():
            case None:
                return queryset
            case "legacy":
                return queryset.legacy()  # type: ignore[attr-defined, no-any-return]
            case "referenced":
                return queryset.referenced()  # type: ignore[attr-defined, no-any-return]
            case _:
                return queryset.none()


class EventKindFilter(SimpleListFilter):
    """By what has happened."""

    title = _("event")
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[str, Any]]:
        """Return the kinds."""
        return list(EventKind.choices)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the events of that kind."""
        kind = self.value()
        if kind is None:
            return queryset
        return queryset.filter(kind=kind) if kind in EventKind.values else queryset.none()


class ShapeFilter(SimpleListFilter):
    """By what was acknowledged."""

    title = _("shape")
    parameter_name = "shape"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[str, Any]]:
        """Return the shapes."""
        return list(AcknowledgedShape.choices)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the acknowledgements of that shape."""
        shape = self.value()
        if shape is None:
            return queryset
        return queryset.filter(shape=shape) if shape in AcknowledgedShape.values else queryset.none()

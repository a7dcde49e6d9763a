"""The pages of the sources. Their credentials never leave the database for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.contrib import admin
from django.db import connections
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from kfs_credentials import sql
from kfs_credentials.admin import display
from kfs_credentials.admin.base import RefAdmin
from kfs_credentials.admin.filters import CredentialsFilter, SourceTenantFilter
from kfs_credentials.admin.search import Term
from kfs_credentials.crypto import parse_json, sensitive
from kfs_credentials.errors import InvalidCredentials
from kfs_credentials.models import (
    KnowledgeSpace,
    RefState,
    RunState,
    Shape,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from kfs_credentials.redaction import HIDDEN, redacted, redacted_text

MOST_BYTES = 256 * 1024
"""The longest JSON text that a page shows."""
MOST_REFS = 20


@dataclass(frozen=True)
class Contents:
    """The JSON of a source as it may be shown, and the shape of its credentials."""

    shape: str | None
    metadata: str
    permission_scope: str

    @classmethod
    @sensitive
    def read(cls, using: str, source: Source) -> Contents:
        """Read them anew: a source itself is loaded without."""
        with connections[using].cursor() as cursor:
            cursor.execute(sql.read("admin/source"), {"id": source.pk, "most": MOST_BYTES})
            shape, metadata, permission_scope = cursor.fetchone() or (None, "null", "null")
        hidden: dict[str, object] = {} if shape is None else {"credentials": HIDDEN}
        return cls(shape, as_shown(metadata, hidden), as_shown(permission_scope, {}))


def as_shown(text: str | None, hidden: dict[str, object]) -> str:
    """Return JSON text without what is secret, after what is hidden altogether; None stands for a long text."""
    if text is None:
        return gettext("More than %(kib)d KiB: too long to show here.") % {"kib": MOST_BYTES // 1024}
    try:
        value = redacted(parse_json(text))
    except InvalidCredentials:
        return gettext("Nested too deep to show here.")
    return display.pretty({**hidden, **value} if isinstance(value, dict) else value)


@admin.register(Source)
class SourceAdmin(RefAdmin):
    """The data sources: where their credentials are, and what else they hold."""

    not_loaded = ("metadata", "permission_scope")
    list_display = ("short_name", "credentials", "start_of_ref", "tenant", "space", "status")
    list_filter = (CredentialsFilter, SourceTenantFilter)
    ordering = ("pk",)
    search_help_text = _("Enter the id of a source or of a knowledge space, a ref, or the start of one.")
    fieldsets = (
        (None, {"fields": ("id", "name", "tenant", "space_page", "type", "status", "shown_uri", "version")}),
        (_("Credentials"), {"fields": ("credentials_now", "ref", "job", "refs")}),
        (_("Contents"), {"fields": ("shown_metadata", "shown_permission_scope")}),
        (_("Times"), {"fields": ("created_at", "updated_at")}),
    )

    def found_by(self, term: Term) -> Q:
        """Find by id, space and ref."""
        return term.ids("pk", "knowledge_space_id") | term.refs("credential_ref")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the sources with their spaces, and `in_clear`: whether there are legacy credentials and no ref.

        The partial index answers that for each row of a page; no metadata is read.
        """
        legacy = Source.objects.legacy().filter(pk=OuterRef("pk"))
        sources = super().get_queryset(request).select_related("knowledge_space")
        shown: QuerySet[Any] = sources.annotate(in_clear=Exists(legacy))
        return shown

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Return the source with its `contents`."""
        source = super().get_object(request, object_id, from_field)
        if source is not None:
            source.contents = Contents.read(self.using, source)
        return source

    @admin.display(description=_("name"))
    def short_name(self, source: Any) -> str:
        """Show the name, which may have any length."""
        return display.shortened(source.name) or str(source.pk)

    @admin.display(description=_("credentials"))
    def credentials(self, source: Any) -> str:
        """Show where the credentials are, as far as indexes tell."""
        if source.credential_ref is not None:
            return display.badge(gettext("in the secret store"), "good")
        return display.badge(gettext("in clear"), "busy") if source.in_clear else display.NOTHING

    @admin.display(description=_("credentials"))
    def credentials_now(self, source: Any) -> str:
        """Show where the credentials are, and what they are if they are in clear."""
        shape = source.contents.shape
        if shape in (None, Shape.NULL):
            if source.credential_ref is not None:
                return display.badge(gettext("in the secret store"), "good")
            return gettext("none")
        if shape != Shape.OBJECT:
            text = gettext("in clear, and unsupported: %(shape)s") % {"shape": Shape(shape).label}
            return display.badge(text, "bad")
        if source.credential_ref is not None:
            return display.badge(gettext("in the secret store, and again in clear"), "bad")
        return display.badge(gettext("in clear"), "busy")

    @admin.display(description=_("tenant"))
    def tenant(self, source: Any) -> str:
        """Show the tenant of its space."""
        return str(source.knowledge_space.tenant_id)

    @admin.display(description=_("knowledge space"))
    def space(self, source: Any) -> str:
        """Show its space."""
        return display.shortened(source.knowledge_space.name) or str(source.knowledge_space_id)

    @admin.display(description=_("knowledge space"))
    def space_page(self, source: Any) -> str:
        """Link to its space."""
        return self.link(KnowledgeSpace, source.knowledge_space_id, self.space(source))

    @admin.display(description=_("URI"))
    def shown_uri(self, source: Any) -> str:
        """Show the URI without user and password."""
        return redacted_text(source.uri)

    @admin.display(description=_("backfill job"))
    def job(self, source: Any) -> str:
        """Link to its job."""
        jobs = SourceCredentialBackfill.objects.using(self.using).filter(**self._scope(source))
        found = jobs.values_list("pk", "run_state").first()
        if found is None:
            return display.NOTHING
        job, state = found
        return format_html("{} {}", self.link(SourceCredentialBackfill, job, job), display.state_badge(RunState(state)))

    @admin.display(description=_("credential refs"))
    def refs(self, source: Any) -> str:
        """Link to its ledger rows."""
        rows = SourceSecretLifecycleRef.objects.using(self.using).filter(**self._scope(source)).order_by("pk")
        lines = [
            (
                self.link(SourceSecretLifecycleRef, pk, self.ref_of(source, ref)),
                display.state_badge(RefState(state)),
            )
            for pk, ref, state in rows.values_list("pk", "credential_ref", "state")[: MOST_REFS + 1]
        ]
        if not lines:
            return display.NOTHING
        shown = format_html_join("", "<div>{} {}</div>", lines[:MOST_REFS])
        more = self.search_link(SourceSecretLifecycleRef, source.pk, gettext("all of them"))
        return format_html("{}{}", shown, more if len(lines) > MOST_REFS else "")

    @admin.display(description=_("metadata"))
    def shown_metadata(self, source: Any) -> str:
        """Show the metadata without what is secret."""
        return display.json_block(source.contents.metadata)

    @admin.display(description=_("permission scope"))
    def shown_permission_scope(self, source: Any) -> str:
        """Show who may see the source."""
        return display.json_block(source.contents.permission_scope)

    @staticmethod
    def _scope(source: Any) -> dict[str, Any]:
        """Return what the scope indexes of jobs and refs begin with."""
        space = source.knowledge_space
        return {"tenant_id": space.tenant_id, "knowledge_space_id": space.pk, "source_id": source.pk}

"""The pages of the backfill jobs, and the one thing that can be done here: to retry those that failed."""

from __future__ import annotations

import uuid
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.core import signing
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import DatabaseError, InterfaceError, transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from kfs_credentials.admin import display
from kfs_credentials.admin.base import ReadOnlyAdmin
from kfs_credentials.admin.filters import RunStateFilter, TenantFilter
from kfs_credentials.admin.search import Term, in_scopes, known_scopes
from kfs_credentials.errors import KfsCredentialsError
from kfs_credentials.models import (
    KnowledgeSpace,
    RunState,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from kfs_credentials.operations import RetryResult, retry_failed_jobs
from kfs_credentials.transactions import describe

MOST_JOBS = 1000
"""How many jobs can be retried at once here; `retry_credential_backfill` retries any number."""
SALT = "kfs_credentials.admin.retry"


@admin.register(SourceCredentialBackfill)
class BackfillAdmin(ReadOnlyAdmin):
    """The jobs: at most one per source."""

    not_loaded = (
        *("lease_token", "secret_fingerprint", "last_error_message"),
        *("source__metadata", "source__permission_scope", "source__uri"),
    )
    actions = ("retry",)
    list_display = ("source_name", "shown_state", "short_error", "retry_count", "tenant_id", "age")
    list_filter = (RunStateFilter, TenantFilter)
    list_select_related = ("source",)
    # The claim index: failed, queued, running, succeeded; in each state, what waits longest comes first.
    ordering = ("run_state", "lease_expires_at", "updated_at", "id")
    search_help_text = _("Enter the id of a job, source or knowledge space, a candidate ref, or the start of one.")
    fieldsets = (
        (None, {"fields": ("id", "source_page", "space_page", "tenant_id")}),
        (_("State"), {"fields": ("shown_state", "error", "retry_count", "candidate", "source_version")}),
        (_("Lease"), {"fields": ("worker_id", "lease", "heartbeat_at")}),
        (_("Times"), {"fields": ("created_at", "updated_at", "completed_at", "row_version")}),
    )

    def found_by(self, term: Term) -> Q:
        """Find by id, candidate, source and space."""
        found = term.ids("pk") | term.refs("candidate_credential_ref")
        return found if term.id is None else found | in_scopes(known_scopes(self.using, term.id), term.id)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the jobs with `age` and `lease_left` by the database's clock."""
        times = {"age": Now() - F("updated_at"), "lease_left": F("lease_expires_at") - Now()}
        jobs: QuerySet[Any] = super().get_queryset(request).annotate(**times)
        return jobs

    @admin.display(description=_("source"))
    def source_name(self, job: Any) -> str:
        """Show the name of the source."""
        return display.shortened(job.source.name) or str(job.source_id)

    @admin.display(description=_("state"))
    def shown_state(self, job: Any) -> str:
        """Show the state, and until when it is leased."""
        return display.state(RunState(job.run_state), job.lease_expires_at, job.lease_left)

    @admin.display(description=_("last error"))
    def short_error(self, job: Any) -> str:
        """Show what the error code means, without the code."""
        return display.error(job.last_error_code, code=False)

    @admin.display(description=_("last error"))
    def error(self, job: Any) -> str:
        """Show what the error code means."""
        return display.error(job.last_error_code)

    @admin.display(description=_("lease"))
    def lease(self, job: Any) -> str:
        """Show when the lease ends."""
        return display.lease(job.lease_expires_at, job.lease_left)

    @admin.display(description=_("last move"))
    def age(self, job: Any) -> str:
        """Show when the job last changed."""
        return display.from_now(job.updated_at, -job.age)

    @admin.display(description=_("source"))
    def source_page(self, job: Any) -> str:
        """Link to the source."""
        return self.link(Source, job.source_id, job.source_id)

    @admin.display(description=_("knowledge space"))
    def space_page(self, job: Any) -> str:
        """Link to the space."""
        return self.link(KnowledgeSpace, job.knowledge_space_id, job.knowledge_space_id)

    @admin.display(description=_("candidate ref"))
    def candidate(self, job: Any) -> str:
        """Show the candidate, and link to every ref that this job has reserved."""
        ref = self.ref_of(job, job.candidate_credential_ref)
        return self.search_link(SourceSecretLifecycleRef, job.pk, ref)

    # Retry: select in the list, confirm, done. The confirmation carries the row versions that it showed, so it
    # does nothing when it is out of date or sent twice.

    def has_retry_permission(self, request: HttpRequest) -> bool:
        """Return whether this user may retry jobs."""
        return request.user.has_perm("kfs_credentials.retry_sourcecredentialbackfill")

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        """Return our action alone: one that the host adds to its site is not for these rows.

        `action_location` is what Django 6.1 and later give.
        """
        location = {} if action_location is None else {"action_location": action_location}
        actions = super().get_actions(request, **location)
        return {name: action for name, action in actions.items() if name == "retry"}

    def get_urls(self) -> list[URLPattern]:
        """Add the confirmation's address."""

        # The retry opens transactions of its own, and so must not run in one of ATOMIC_REQUESTS.
        @transaction.non_atomic_requests(using=self.using)
        def confirmed(request: HttpRequest) -> HttpResponse:
            return self.confirmed_view(request)

        name = "kfs_credentials_sourcecredentialbackfill_retry"
        return [path("retry/", self.admin_site.admin_view(confirmed), name=name), *super().get_urls()]

    @admin.action(description=_("Retry the selected failed jobs"), permissions=["retry"])
    def retry(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask for confirmation, with the jobs as they are now."""
        jobs = list(queryset.filter(run_state=RunState.FAILED)[: MOST_JOBS + 1])
        if not jobs:
            none = gettext("None of the selected jobs has failed. Only failed jobs can be retried.")
            self.message_user(request, none, messages.WARNING)
            return None
        if len(jobs) > MOST_JOBS:
            too_many = gettext(
                "At most %(most)d jobs can be retried at once here. Filter the list, or run "
                "manage.py retry_credential_backfill --all."
            )
            self.message_user(request, too_many % {"most": MOST_JOBS}, messages.ERROR)
            return None
        rows = [(str(job.pk), job.row_version) for job in jobs]
        context = {
            **self.admin_site.each_context(request),
            "title": gettext("Retry failed jobs"),
            "subtitle": None,
            "opts": self.opts,
            "media": self.media,
            "jobs": [(self.source_name(job), job.tenant_id, self.short_error(job), self.age(job)) for job in jobs],
            "rows": signing.dumps(rows, salt=SALT, compress=True),
        }
        request.current_app = self.admin_site.name  # as every view of the admin does
        return TemplateResponse(request, "admin/kfs_credentials/sourcecredentialbackfill/retry.html", context)

    def confirmed_view(self, request: HttpRequest) -> HttpResponse:
        """Retry the jobs of a confirmation, and say what became of them."""
        if not (self.has_view_permission(request) and self.has_retry_permission(request)):
            raise PermissionDenied
        list_page = reverse(self._page(self.model, "changelist"), current_app=self.admin_site.name)
        if request.method == "POST":
            try:
                chosen = signing.loads(request.POST.get("rows", ""), salt=SALT)
            except signing.BadSignature:
                unreadable = gettext("This confirmation cannot be read. Select the jobs again.")
                self.message_user(request, unreadable, messages.ERROR)
            else:
                self._retry(request, [(uuid.UUID(job), version) for job, version in chosen])
        return HttpResponseRedirect(list_page)

    def _retry(self, request: HttpRequest, rows: list[tuple[uuid.UUID, int]]) -> None:
        try:
            result = retry_failed_jobs(self.using, rows)
        except (DatabaseError, InterfaceError) as error:
            problem = f"{describe(error)}."
        except (KfsCredentialsError, ImproperlyConfigured) as error:
            problem = str(error)
        else:
            self._report(request, result)
            jobs = self.get_queryset(request).filter(pk__in=dict(rows))
            LogEntry.objects.log_actions(str(request.user.pk), jobs, CHANGE, gettext("Asked for a retry."))
            return
        stopped = gettext("The retry stopped: %(problem)s Select the jobs that still show as failed again.")
        self.message_user(request, stopped % {"problem": problem}, messages.ERROR)

    def _report(self, request: HttpRequest, result: RetryResult) -> None:
        queued = ngettext(
            "%(count)d job is queued again. If no worker is running: manage.py run_credential_backfill.",
            "%(count)d jobs are queued again. If no worker is running: manage.py run_credential_backfill.",
            result.queued,
        )
        ended = ngettext(
            "%(count)d job ended as succeeded: its source has nothing left to move.",
            "%(count)d jobs ended as succeeded: their sources have nothing left to move.",
            result.ended,
        )
        changed = ngettext(
            "%(count)d job was left alone: row changed since you looked at it.",
            "%(count)d jobs were left alone: rows changed since you looked at them.",
            result.changed,
        )
        missing = ngettext("%(count)d job is gone.", "%(count)d jobs are gone.", result.missing)
        for count, text, level in (
            (result.queued, queued, messages.SUCCESS),
            (result.ended, ended, messages.SUCCESS),
            (result.changed, changed, messages.WARNING),
            (result.missing, missing, messages.WARNING),
        ):
            if count:
                self.message_user(request, text % {"count": count}, level)

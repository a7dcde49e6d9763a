"""The pages of the backfill jobs, and the one thing that can be done here: to retry those that failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django.contrib import admin, messages
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from kfs_credentials.admin import display
from kfs_credentials.admin.confirm import DecidingAdmin, Decision, Outcome, Rows
from kfs_credentials.admin.filters import RunStateFilter, TenantFilter
from kfs_credentials.admin.search import Term, in_scopes, known_scopes
from kfs_credentials.models import (
    KnowledgeSpace,
    RunState,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from kfs_credentials.operations import RetryResult, retry_failed_jobs


class Retry(Decision):
    """To queue failed jobs again."""

    name = "retry"
    permission = "retry"
    button = _("Retry")
    title = _("Retry failed jobs")
    none_selected = _("None of the selected jobs has failed. Only failed jobs can be retried.")
    too_many = _(
        "At most %(most)d jobs can be retried at once here. Filter the list, or run "
        "manage.py retry_credential_backfill --all."
    )
    stopped = _("The retry stopped: %(problem)s Select the jobs that still show as failed again.")
    logged = _("Asked for a retry.")

    def among(self, rows: Any) -> QuerySet[Any]:
        """Return the failed ones."""
        failed: QuerySet[Any] = rows.filter(run_state=RunState.FAILED)
        return failed

    def question(self, count: int) -> str:
        """Return what will happen to so many jobs."""
        text = ngettext(
            "This job will be queued again, with a fresh candidate ref. If the cause of its failure is not gone, it "
            "will fail again.",
            "These %(count)d jobs will be queued again, each with a fresh candidate ref. If the cause of a failure is "
            "not gone, the job will fail again.",
            count,
        )
        return text % {"count": count}

    def decide(self, using: str, rows: Rows, *, by: str, answers: Mapping[str, Any]) -> RetryResult:
        """Queue them again."""
        return retry_failed_jobs(using, rows)

    def outcomes(self, result: RetryResult) -> Iterator[Outcome]:
        """Say what became of the jobs."""
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
        yield Outcome(result.queued, queued)
        yield Outcome(result.ended, ended)
        yield Outcome(result.changed, changed, messages.WARNING)
        yield Outcome(result.missing, missing, messages.WARNING)


RETRY = Retry()


@admin.register(SourceCredentialBackfill)
class BackfillAdmin(DecidingAdmin):
    """The jobs: at most one per source."""

    not_loaded = (
        *("lease_token", "secret_fingerprint", "last_error_message"),
        *("source__metadata", "source__permission_scope", "source__uri"),
    )
    actions = ("retry",)
    decisions = (RETRY,)
    confirmation_columns = ("source_name", "tenant_id", "short_error", "age")
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

    def has_retry_permission(self, request: HttpRequest) -> bool:
        """Return whether this user may retry jobs."""
        return request.user.has_perm("kfs_credentials.retry_sourcecredentialbackfill")

    @admin.action(description=_("Retry the selected failed jobs"), permissions=["retry"])
    def retry(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask for confirmation, with the jobs as they are now."""
        return self.ask(request, queryset, RETRY)

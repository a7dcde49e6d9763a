"""Queues failed backfill jobs again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, InterfaceError
from django.db.models import Count

from kfs_credentials.conf import settings
from kfs_credentials.errors import ImproperlyPrepared
from kfs_credentials.management.options import (
    Exit,
    WorkCommand,
    add_format_argument,
    add_selection_arguments,
    counted,
    printable,
    uuid_argument,
)
from kfs_credentials.operations import RetryResult, retry_failed_jobs
from kfs_credentials.selection import Selection

if TYPE_CHECKING:
    import uuid

    from django.core.management.base import CommandParser

    from kfs_credentials.models.backfill import BackfillQuerySet


class Command(WorkCommand):
    """`retry_credential_backfill`."""

    help = (
        "Queue failed jobs again, each with a fresh candidate, once the cause of their failure is gone. "
        "Moves nothing itself: run_credential_backfill does."
    )
    examples = """
examples:
  manage.py retry_credential_backfill --all --dry-run         how many there are, by code
  manage.py retry_credential_backfill --all --code SOURCE_SECRET_TOO_LARGE
  manage.py retry_credential_backfill 5f0c2a7e-3d1b-4c68-9e47-0a51c2d3e4f5
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        super().add_arguments(parser)
        parser.add_argument(
            "ids", nargs="*", metavar="ID", type=uuid_argument, help="the ids of jobs, or of their sources"
        )
        parser.add_argument(
            "--all", action="store_true", help="all failed jobs, or those that --code, --tenant and --space leave"
        )
        parser.add_argument("--code", metavar="CODE", help="only jobs that failed with this code")
        add_selection_arguments(parser)
        parser.add_argument("--dry-run", action="store_true", help="count the jobs, and touch nothing")
        add_format_argument(parser)

    def work(self, using: str, options: dict[str, Any]) -> Exit:
        """Queue the jobs."""
        ids: list[uuid.UUID] = options["ids"]
        if bool(ids) == options["all"]:
            raise ImproperlyPrepared("Say which jobs: either give their ids, or --all.")
        failed = Selection.of(using, tenant=options["tenant"], space=options["space"]).open_jobs().failed()
        jobs = failed.filter(pk__in=ids) | failed.filter(source_id__in=ids) if ids else failed
        self._check_ids(ids, jobs)
        if options["code"] is not None:
            jobs = jobs.filter(last_error_code=options["code"])
            self._check_code(options["code"], jobs, failed)
        if options["dry_run"]:
            return self._count(jobs, options["format"])
        rows = list(jobs.order_by("pk").values_list("pk", "row_version"))
        return self._retry(using, rows, options["format"])

    def _check_ids(self, ids: list[uuid.UUID], jobs: BackfillQuerySet) -> None:
        found = {one for pair in jobs.values_list("pk", "source_id") for one in pair} if ids else set()
        if unknown := [str(one) for one in ids if one not in found]:
            raise ImproperlyPrepared(
                f"Neither a failed job nor the source of one: {', '.join(unknown)}. Nothing was touched; "
                f"{self.command('retry_credential_backfill --all --dry-run')} counts what there is."
            )

    def _check_code(self, code: str, jobs: BackfillQuerySet, failed: BackfillQuerySet) -> None:
        if jobs.exists():
            return
        codes = sorted(str(one) for one in set(failed.values_list("last_error_code", flat=True)))
        raise ImproperlyPrepared(
            f"None of these jobs failed with the code {printable(code)}. "
            + (f"The codes that there are: {', '.join(map(printable, codes))}." if codes else "No job has failed.")
        )

    def _count(self, jobs: BackfillQuerySet, output: str) -> Exit:
        by_code = jobs.order_by("last_error_code").values_list("last_error_code").annotate(count=Count("pk"))
        codes = {code or "unknown": count for code, count in by_code}
        if output == "table" and codes:
            self.table([(f"{count:,}", printable(code)) for code, count in codes.items()], right=(0,))
        total = sum(codes.values())
        line = f"{counted(total, 'failed job')} would be queued again. Nothing was changed."
        return self.report(output, {"would_retry": total, "failures": codes}, line)

    def _retry(self, using: str, rows: list[tuple[uuid.UUID, int]], output: str) -> Exit:
        result = RetryResult()
        try:
            for start in range(0, len(rows), settings.BATCH_SIZE):
                result += retry_failed_jobs(using, rows[start : start + settings.BATCH_SIZE])
        except (DatabaseError, InterfaceError):
            self.stderr.write(f"Up to here: {_counts(result)}", str)
            raise
        code = Exit.LOOK if result.changed or result.missing else Exit.CLEAN
        line = _counts(result)
        if code:
            line += " Run this again to retry those that still are failed."
        if result.queued:
            line += f" Next: {self.command('run_credential_backfill')}."
        return self.report(output, vars(result), line, code)


def _counts(result: RetryResult) -> str:
    parts = [f"{counted(result.queued, 'job')} queued again"]
    if result.ended:
        parts.append(f"{result.ended:,} ended, since nothing is left to move")
    if result.changed:
        parts.append(f"{result.changed:,} left alone, since they are locked or have changed meanwhile")
    if result.missing:
        parts.append(f"{result.missing:,} gone meanwhile")
    return f"{', '.join(parts)}."

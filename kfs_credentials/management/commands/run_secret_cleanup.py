"""Erases secrets that nobody uses any more, and follows each until it is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, InterfaceError

from kfs_credentials.cleanup import Cleanup, Outcome
from kfs_credentials.cleanup_worker import CleanupSummary, CleanupWorker
from kfs_credentials.conf import settings
from kfs_credentials.leases import new_worker_name
from kfs_credentials.management.options import (
    Exit,
    WorkCommand,
    add_format_argument,
    add_selection_arguments,
    add_settings_arguments,
    asked_after,
    check_store,
    counted,
    positive,
    settings_given,
)
from kfs_credentials.management.progress import Progress
from kfs_credentials.models import WorkerRole
from kfs_credentials.repairs import Repair
from kfs_credentials.status import Status, read_cleanup_left, read_status
from kfs_credentials.worker import End

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

ENDING = (Outcome.CONFIRMED, Outcome.PARKED)
"""The outcomes after which a ref is no longer left."""


class Command(WorkCommand):
    """`run_secret_cleanup`."""

    role = WorkerRole.CLEANUP
    help = (
        "Erase the secrets that no source uses any more: rotated, revoked, of sources and spaces that are gone by "
        "whatever way, reserved and never used. Each is erased ERASE_GRACE after it was retired, and once more after "
        "LATE_WRITE_HORIZON, and then its row is final. Safe to run beside live traffic, in any number of processes, "
        "and to kill and start again at any time. Ends when every row is final, and waits for that."
    )
    examples = """
examples:
  manage.py run_secret_cleanup --dry-run        what there is to erase, now and later
  manage.py run_secret_cleanup                  everything, and wait until it is confirmed
  manage.py run_secret_cleanup --due            only what is due now: for cron, every ten minutes
  manage.py run_secret_cleanup --watch          stay, for a service

A run begins with a sweep through all refs, and ends with a patrol through all objects in the store.
SIGTERM or SIGINT (Ctrl-C) ends it within ten seconds: the batch at hand is finished or given back. The
exit code is 4 then. A second signal ends it at once, and nothing is lost by that either.
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        super().add_arguments(parser)
        add_selection_arguments(parser)
        add_settings_arguments(parser, "--batch-size", "--lease")
        parser.add_argument("--limit", metavar="N", type=positive, help="erase at most N secrets, then end")
        how_long = parser.add_mutually_exclusive_group()
        how_long.add_argument(
            "--watch",
            action="store_true",
            help="stay when nothing is left, and look again every POLL_INTERVAL seconds, until a signal comes",
        )
        how_long.add_argument("--due", action="store_true", help="end when nothing is due now, and wait for nothing")
        parser.add_argument("--dry-run", action="store_true", help="count what would be erased, and touch nothing")
        add_format_argument(parser)

    def work(self, using: str, options: dict[str, Any]) -> Exit:
        """Run the worker, or count for `--dry-run`."""
        if options["dry_run"]:
            return self._dry_run(using, options)
        with settings.overridden(settings_given(options)):
            return self._run(using, options)

    def _run(self, using: str, options: dict[str, Any]) -> Exit:
        selected = {"tenant": options["tenant"], "space": options["space"]}
        check_store(using)
        steps = Cleanup(using=using, worker=new_worker_name(), lease=settings.LEASE, **selected)

        def count_left() -> int | None:
            try:
                return read_cleanup_left(using, **selected)[0]
            except (DatabaseError, InterfaceError):
                return None

        quiet, color = options["verbosity"] == 0, options["no_color"]
        with Progress(self.stderr, count_left, doing="erasing", quiet=quiet, no_color=color) as progress:
            worker = CleanupWorker(
                steps,
                next_move_in=lambda: read_cleanup_left(using, **selected),
                batch_size=settings.BATCH_SIZE,
                limit=options["limit"],
                watch=options["watch"],
                due_only=options["due"],
                progress=lambda summary: progress.show(
                    sum(summary.outcomes[outcome] for outcome in ENDING), _counts(summary)
                ),
            )
            seconds = progress.run(worker.run, lambda: _counts(worker.summary))
        return self._finish(using, options, worker.summary, seconds)

    def _dry_run(self, using: str, options: dict[str, Any]) -> Exit:
        status = read_status(using, tenant=options["tenant"], space=options["space"])
        overdue, waiting = status.ledger["overdue"], status.ledger["waiting"]
        line = f"{counted(overdue, 'ref')} due now, {waiting:,} later. Nothing was changed."
        if overdue or waiting:
            line += f" Next: {self.command('run_secret_cleanup')}."
        return self.report(options["format"], status.as_json(), line)

    def _finish(self, using: str, options: dict[str, Any], summary: CleanupSummary, seconds: float) -> Exit:
        status = asked_after(using, lambda: read_status(using, tenant=options["tenant"], space=options["space"]))
        code = Exit.UNKNOWN if status is None else _exit(summary, status, due_only=options["due"])
        counts: dict[str, Any] = {what.value.replace(" ", "_"): summary.outcomes[what] for what in Outcome}
        counts |= {"retired": summary.retired, "kept": summary.kept, "purged": summary.purged, "lost": summary.lost}
        counts["events_purged"] = summary.events_purged
        counts["unknown_objects"] = summary.unknown
        counts["repairs"] = {what.value.replace(" ", "_"): summary.repairs[what] for what in Repair}
        value = {
            "result": {**counts, "end": summary.end.value},
            "seconds": round(seconds, 3),
            "status": None if status is None else status.as_json(),
        }
        line = f"{_counts(summary)} in {seconds:.1f} s. {self._next(code, summary, status)}"
        return self.report(options["format"], value, line, code)

    def _next(self, code: Exit, summary: CleanupSummary, status: Status | None) -> str:
        again, look = self.command("run_secret_cleanup"), self.command("credential_status")
        if status is None:
            return f"What is left is not known, since the database is out of reach. Run {again} when it is back."
        left = status.ledger["overdue"] + status.ledger["waiting"]
        if code is Exit.CLEAN:
            return f"{left:,} wait for their time." if left else "Every erasure is confirmed."
        if code is Exit.LOOK:
            return f"{look} shows what a person has to look at."
        if summary.end is End.DRAINED:
            return f"Since then more has come: {left:,} left. Run {again}."
        reason = f"Ended early: {summary.reason.rstrip('.')}. {left:,} left"
        resume = f"{self.command('resume_credential_workers', narrow=False)}, then {again}"
        if summary.end is End.DENIED:
            return f"{reason}, and nothing counts as erased by that. Put this right, run {resume}."
        if summary.end is End.PAUSED:
            return f"{reason}. When they may go on, run {resume}."
        return f"{reason}; {again} goes on."


def _exit(summary: CleanupSummary, status: Status, *, due_only: bool) -> Exit:
    if summary.end is End.UNREACHABLE:
        return Exit.UNKNOWN
    left = status.ledger["overdue"] + status.ledger["waiting"]
    if due_only:
        # What became due after the last look of a run for what is due is up to the next one.
        left = 0 if summary.end is End.DRAINED else status.ledger["overdue"]
    if left or summary.end not in (End.DRAINED, End.LIMIT):
        return Exit.NOT_FINISHED
    return Exit.LOOK if summary.findings or any(status.ref_findings.values()) else Exit.CLEAN


def _counts(summary: CleanupSummary) -> str:
    parts = [f"{summary.outcomes[outcome]:,} {outcome.value}" for outcome in Outcome if summary.outcomes[outcome]]
    if not summary.outcomes[Outcome.ERASED]:
        parts.insert(0, "0 erased")
    repairs = [what for what in Repair if what not in (Repair.FINE, Repair.LATER)]
    parts += [f"{counted(summary.repairs[what], 'source')} {what.value}" for what in repairs if summary.repairs[what]]
    for count, what in (
        (summary.retired, "retired"),
        (summary.kept, "kept for a person to choose"),
        (summary.lost, "taken over by another worker"),
        (summary.purged, "purged"),
        (summary.events_purged, "old events purged"),
    ):
        if count:
            parts.append(f"{count:,} {what}")
    if summary.unknown:
        parts.append(counted(summary.unknown, "unknown object"))
    return ", ".join(parts)

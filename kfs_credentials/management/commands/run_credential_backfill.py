"""Moves legacy credentials into the secret store."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, InterfaceError

from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillSummary, BackfillWorker
from kfs_credentials.batch import Move
from kfs_credentials.binding import advance
from kfs_credentials.conf import settings
from kfs_credentials.errors import StoreUnavailable
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
    printable,
    settings_given,
)
from kfs_credentials.management.progress import Progress
from kfs_credentials.models import WorkerRole
from kfs_credentials.pause import current
from kfs_credentials.status import Status, read_left, read_plan, read_status
from kfs_credentials.stores import secret_stores
from kfs_credentials.worker import End

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

ENDING = (Move.ACTIVATE, Move.ADOPT, Move.ABANDON, Move.FAIL)
"""The moves after which a job is no longer left."""


class Command(WorkCommand):
    """`run_credential_backfill`."""

    role = WorkerRole.BACKFILL
    help = (
        "Move the credentials that lie in clear in sources.metadata into the secret store. Safe to run beside live "
        "traffic, in any number of processes, and to kill and start again at any time. Ends when nothing is left "
        "to move, and waits until then for delayed retries, other workers and a store that is out of reach."
    )
    examples = """
examples:
  manage.py run_credential_backfill --dry-run           what there is to move, by tenant and shape
  manage.py run_credential_backfill --limit 100         a hundred sources, to see it work
  manage.py run_credential_backfill                     everything
  manage.py run_credential_backfill --watch             stay, and move what old applications still write

SIGTERM or SIGINT (Ctrl-C) ends it within ten seconds: the batch at hand is finished or given back. The
exit code is 4 then. A second signal ends it at once, and nothing is lost by that either.
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        super().add_arguments(parser)
        add_selection_arguments(parser)
        add_settings_arguments(parser, "--batch-size", "--threads", "--lease", "--attempts")
        parser.add_argument("--limit", metavar="N", type=positive, help="take at most N sources, then end")
        parser.add_argument(
            "--watch",
            action="store_true",
            help="stay when nothing is left, and look again every POLL_INTERVAL seconds, until a signal comes",
        )
        parser.add_argument("--dry-run", action="store_true", help="count what would be moved, and touch nothing")
        add_format_argument(parser)

    def work(self, using: str, options: dict[str, Any]) -> Exit:
        """Run the worker, or count for `--dry-run`."""
        if options["dry_run"]:
            return self._dry_run(using, options)
        with settings.overridden(settings_given(options)):
            return self._run(using, options)

    def _run(self, using: str, options: dict[str, Any]) -> Exit:
        selected = {"tenant": options["tenant"], "space": options["space"]}
        store = secret_stores["default"]
        check_store(using)
        steps = Backfill(using=using, store=store, worker=new_worker_name(), lease=settings.LEASE, **selected)
        if current(using) is None and any(read_left(using, **selected)):
            # A copy of the store that was made before this run is told from the store itself by that. Where it does
            # not go through now, the worker knows how to wait.
            with suppress(DatabaseError, InterfaceError, StoreUnavailable):
                advance(using, store.alias, worker=steps.worker)

        def remaining() -> tuple[int, ...]:
            movable, queued, running = read_left(using, **selected)
            # What the database refuses to reserve a job for is no use waiting for.
            return max(0, movable - len(steps.rejected)), queued, running

        def count_left() -> int | None:
            try:
                movable, queued, running = read_left(using, **selected)
            except (DatabaseError, InterfaceError):
                return None
            return max(movable, queued + running)  # most jobs' sources are movable ones

        quiet = options["verbosity"] == 0
        with Progress(self.stderr, count_left, quiet=quiet, no_color=options["no_color"]) as progress:
            worker = BackfillWorker(
                steps,
                remaining=remaining,
                batch_size=settings.BATCH_SIZE,
                limit=options["limit"],
                watch=options["watch"],
                progress=lambda summary: progress.show(sum(summary.moves[move] for move in ENDING), _counts(summary)),
            )
            seconds = progress.run(worker.run, lambda: _counts(worker.summary))
        return self._finish(using, options, worker.summary, seconds)

    def _dry_run(self, using: str, options: dict[str, Any]) -> Exit:
        selected = {"tenant": options["tenant"], "space": options["space"]}
        plan = read_plan(using, **selected)
        if options["format"] == "table" and plan:
            rows = [
                (printable(one["tenant"]), one["shape"], f"{one['sources']:,}", f"{one['movable']:,}") for one in plan
            ]
            self.table([("tenant", "credentials", "sources", "movable"), *rows], right=(2, 3))
        movable = sum(one["movable"] for one in plan)
        line = f"{counted(movable, 'source')} can be moved. Nothing was changed."
        if movable:
            line += f" Next: {self.command('run_credential_backfill')}."
        value = {"plan": plan, **read_status(using, **selected).as_json()} if options["format"] == "json" else None
        return self.report(options["format"], value, line)

    def _finish(self, using: str, options: dict[str, Any], summary: BackfillSummary, seconds: float) -> Exit:
        status = asked_after(using, lambda: read_status(using, tenant=options["tenant"], space=options["space"]))
        code = Exit.UNKNOWN if status is None else _exit(summary, status)
        moves = {move.value.replace(" ", "_"): summary.moves[move] for move in Move}
        result = {**moves, "lost": summary.lost, "rejected": summary.rejected, "end": summary.end.value}
        value = {
            "result": result,
            "seconds": round(seconds, 3),
            "status": None if status is None else status.as_json(),
        }
        line = f"{_counts(summary)} in {seconds:.1f} s. {self._next(code, summary, status)}"
        return self.report(options["format"], value, line, code)

    def _next(self, code: Exit, summary: BackfillSummary, status: Status | None) -> str:
        again, look = self.command("run_credential_backfill"), self.command("credential_status")
        if status is None:
            return f"What is left is not known, since the database is out of reach. Run {again} when it is back."
        if code is Exit.CLEAN:
            return "Nothing is left to move or to look at."
        if code is Exit.LOOK:
            return f"Nothing more can be moved; {look} shows what a person has to look at."
        left = f"{max(status.left[0], sum(status.left[1:])):,} left"
        if summary.end is End.DRAINED:
            return f"Since then more has come: {left}. Run {again}."
        reason = f"Ended early: {summary.reason.rstrip('.')}. {left}"
        resume = f"{self.command('resume_credential_workers', narrow=False)}, then {again}"
        if summary.end is End.DENIED:
            return f"{reason}, and no job has failed by that. Put this right, run {resume}."
        if summary.end is End.PAUSED:
            return f"{reason}. When they may go on, run {resume}."
        if summary.end is End.STUCK:
            return f"{reason}; {look} shows what they wait for."
        return f"{reason}, nothing lost; {again} goes on."


def _exit(summary: BackfillSummary, status: Status) -> Exit:
    if summary.end is End.UNREACHABLE:
        return Exit.UNKNOWN
    if summary.end in (End.DENIED, End.PAUSED, End.STUCK, End.INTERRUPTED):
        return Exit.NOT_FINISHED
    movable, *jobs = status.left
    if summary.rejected and movable <= summary.rejected and not any(jobs):
        return Exit.LOOK
    if any(status.left):
        return Exit.NOT_FINISHED
    return Exit.CLEAN if status.moved else Exit.LOOK


def _counts(summary: BackfillSummary) -> str:
    parts = [f"{summary.moves[move]:,} {move.value}" for move in Move if summary.moves[move]]
    if not summary.moves[Move.ACTIVATE]:
        parts.insert(0, "0 moved")
    if summary.lost:
        parts.append(f"{summary.lost:,} taken over by another worker")
    if summary.rejected:
        parts.append(f"{summary.rejected:,} that the database rejects")
    return ", ".join(parts)

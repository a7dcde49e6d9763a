"""Looks whether what is always true is true."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, InterfaceError

from kfs_credentials.binding import check_bound
from kfs_credentials.conf import settings
from kfs_credentials.errors import (
    BindingBroken,
    BindingProblem,
    ImproperlyPrepared,
    KfsCredentialsError,
    StoreUnavailable,
    WorkersPaused,
)
from kfs_credentials.management.confirmation import add_yes_argument, confirm
from kfs_credentials.management.options import (
    Exit,
    WorkCommand,
    add_format_argument,
    add_selection_arguments,
    check_store,
    counted,
    database_problem,
    positive,
    positive_rate,
    printable,
)
from kfs_credentials.management.progress import Progress
from kfs_credentials.models import WorkerRole
from kfs_credentials.stores import secret_stores
from kfs_credentials.verification.deep import OF_OBJECTS
from kfs_credentials.verification.findings import FindingClass, what_to_do
from kfs_credentials.verification.objects import LISTED_OBJECTS
from kfs_credentials.verification.run import Run

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

SHOWN = 20
"""Findings of a class that the table has; JSON has more."""
NEED_DEEP = ("sample", "rate", "resume", "restart", "erase_unknown")


ABOUT_OBJECTS = (*OF_OBJECTS, *LISTED_OBJECTS)
"""What can be found by looking at the objects alone."""


class Command(WorkCommand):
    """`verify_credentials`."""

    role = WorkerRole.VERIFY

    help = (
        "Look whether what is always true is true: of every source, ref and job, in batches, beside live traffic, "
        "locking nothing. What is under way, or a known time away, is no finding. Changes nothing, unless it is asked "
        "to. Says where old plaintext may still lie, too."
    )
    examples = """
examples:
  manage.py verify_credentials
  manage.py verify_credentials --deep                 read and compare every object, then list the store
  manage.py verify_credentials --deep --rate 50       no more than 50 objects a second
  manage.py verify_credentials --deep --sample 1000   only so many of them, chosen at random
  manage.py verify_credentials --skip metadata        leave a class of findings out
  manage.py verify_credentials --scrub-same           remove what lies beside a ref, if it is the same

A deep run that was cut short goes on where it was. It is safe to run this again at any time.
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        super().add_arguments(parser)
        add_selection_arguments(parser)
        classes = parser.add_mutually_exclusive_group()
        names: dict[str, Any] = {"metavar": "CLASS", "action": "append", "choices": FindingClass.values}
        classes.add_argument(
            "--only", **names, help=f"look for this class alone; may be repeated: {', '.join(FindingClass.values)}"
        )
        classes.add_argument("--skip", **names, help="leave this class out; may be repeated")
        parser.add_argument(
            "--deep",
            action="store_true",
            help="read the object of every ref in use, and compare it; then list the store",
        )
        parser.add_argument(
            "--sample", metavar="N", type=positive, help="with --deep: read N objects, chosen at random"
        )
        parser.add_argument(
            "--rate",
            metavar="N",
            type=positive_rate,
            help="with --deep: read at most N objects a second (default: the setting RATE_LIMIT)",
        )
        again = parser.add_mutually_exclusive_group()
        again.add_argument(
            "--resume",
            action="store_true",
            help="with --deep: go on where the last run was cut short, and refuse if none was (default: go on, if so)",
        )
        again.add_argument("--restart", action="store_true", help="with --deep: begin anew")
        parser.add_argument(
            "--erase-unknown",
            action="store_true",
            help="with --deep: erase objects that no ledger row accounts for, if they are older than ERASE_GRACE",
        )
        parser.add_argument(
            "--scrub-same",
            action="store_true",
            help="remove credentials in clear beside a ref, where they are the very value that the ref resolves to",
        )
        add_yes_argument(parser)
        add_format_argument(parser)

    def work(self, using: str, options: dict[str, Any]) -> Exit:
        """Look, and print what was found."""
        self._check_options(options)
        only, skip = options["only"], options["skip"] or ()
        run = Run(
            using,
            tenant=options["tenant"],
            space=options["space"],
            classes=[what for what in FindingClass if (not only or what in only) and what not in skip],
            scrub=options["scrub_same"],
            deep=options["deep"],
            sample=options["sample"],
            rate=options["rate"] or settings.RATE_LIMIT,
            erase=options["erase_unknown"],
        )
        if options["scrub_same"] or options["erase_unknown"]:
            check_store(using)
        elif options["deep"]:
            self._check_stores(using)
        self._ask(options)
        if options["deep"]:
            run.look_back(must=options["resume"], restart=options["restart"])
        if run.resumed is not None:
            self.stderr.write(
                f"Goes on with the deep run of {run.resumed.begun_at:%Y-%m-%d %H:%M} UTC, after {run.resumed.read:,} "
                "objects; --restart begins anew.",
                str,
            )
        if run.given_up is not None:
            self.stderr.write(
                f"Begins anew: the deep run of {run.given_up.begun_at:%Y-%m-%d %H:%M} UTC, which was cut short after "
                f"{run.given_up.read:,} objects, looked for other classes.",
                str,
            )
        progress = Progress(
            self.stderr,
            run.count_left,
            doing="verifying",
            quiet=options["verbosity"] == 0,
            no_color=options["no_color"],
        )
        code, problem = Exit.CLEAN, ""
        with progress, ended_by_signals():
            run.show = lambda: progress.show(run.done, _counts(run))
            try:
                run.run()
            except StoreUnavailable as error:
                code, problem = Exit.UNKNOWN, f"the secret store is out of reach: {error}"
            except WorkersPaused as error:
                code, problem = Exit.NOT_FINISHED, f"nothing is erased while the workers are {error}"
            except KfsCredentialsError as error:
                code, problem = Exit.WRONG_USE, str(error)
            except (DatabaseError, InterfaceError) as error:
                code, problem = database_problem(using, error)
                if code is Exit.WRONG_USE:
                    raise
            except KeyboardInterrupt:
                code, problem = Exit.NOT_FINISHED, "interrupted"
        return self._finish(run, code, problem, time.monotonic() - progress.started, options)

    def _check_stores(self, using: str) -> None:
        """Look whether the stores are this database's. After a restore, this is how to find out what is missing."""
        for alias in settings.STORES:
            secret_stores[alias].check()
            try:
                check_bound(using, alias)
            except BindingBroken as error:
                if error.problem in (BindingProblem.NO_PROBE, BindingProblem.UNREADABLE):
                    raise  # every object would be missing, or damaged
                self.stderr.write(f"Beware: {error}", str)

    def _check_options(self, options: dict[str, Any]) -> None:
        given = [f"--{name.replace('_', '-')}" for name in NEED_DEEP if options[name]]
        if given and not options["deep"]:
            raise ImproperlyPrepared(f"{given[0]} is about the objects in the store: give --deep too.")
        if not options["deep"] and options["only"] and all(what in ABOUT_OBJECTS for what in options["only"]):
            raise ImproperlyPrepared(f"{options['only'][0]} is about the objects in the store: give --deep too.")
        if options["sample"] and (options["resume"] or options["restart"]):
            raise ImproperlyPrepared("A sample is read in one go: leave out --resume and --restart, or --sample.")
        if options["erase_unknown"] and (options["tenant"] is not None or options["space"] is not None):
            raise ImproperlyPrepared(
                "Whose an object without a ledger row is cannot be told from outside: leave out --tenant and --space."
            )

    def _ask(self, options: dict[str, Any]) -> None:
        if options["scrub_same"]:
            confirm(
                self.stderr,
                "This removes credentials in clear from the metadata of sources that have a ref, where they are the "
                "very value that the ref resolves to.",
                options,
            )
        if options["erase_unknown"]:
            confirm(
                self.stderr,
                "This erases objects for good that no row of this database's ledger accounts for. If another database "
                "uses this store, or this one was restored from an older copy, they may be the only copy of secrets.",
                options,
            )

    # What it says.

    def _finish(self, run: Run, code: Exit, problem: str, seconds: float, options: dict[str, Any]) -> Exit:
        if options["format"] == "table":
            self._print(run)
        line = f"{_counts(run)} in {seconds:.1f} s. "
        again = self.command("verify_credentials --deep" if options["deep"] else "verify_credentials")
        if problem:
            line += f"Not finished: {problem.rstrip('.')}. "
        if run.findings.total:
            classes = ", ".join(
                f"{count:,} {what.value}" for what, count in sorted(run.findings.counts.items()) if count
            )
            line += f"{counted(run.findings.total, 'finding')}: {classes}. "
            code = code or Exit.LOOK
        if problem:
            line += f"{again} goes on where it was." if options["deep"] else f"It is safe to run {again} again."
        elif run.findings.total:
            line += f"Each says what to do; then run {again} again."
        else:
            line += "Nothing was found."
        return self.report(options["format"], self._value(run, problem, seconds), line, code)

    def _value(self, run: Run, problem: str, seconds: float) -> dict[str, Any]:
        listed = [
            {**finding.as_json(), "what_to_do": what_to_do(finding, self.command)} for finding in run.findings.listed()
        ]
        return {
            "looked_at": run.looked_at,
            "scrubbed": run.verification.scrubbed,
            "unswept": run.verification.unswept,
            "erased_objects": run.listing.erased,
            "resumed": run.resumed is not None,
            "stores_not_listed": run.listing.not_listed,
            "counts": {what.value: count for what, count in sorted(run.findings.counts.items()) if count},
            "findings": listed,
            "old_plaintext": None if run.leftovers is None else run.leftovers.as_json(),
            "finished": not problem,
            "clean": not problem and not run.findings.total,
            "seconds": round(seconds, 3),
        }

    def _print(self, run: Run) -> None:
        for what in FindingClass:
            shown = run.findings.kept.get(what, [])[:SHOWN]
            if not shown:
                continue
            self.stdout.write(f"{what.value}: {what.label} ({run.findings.counts[what]:,})")
            rows = []
            for finding in shown:
                ids = (finding.source or "", printable(finding.tenant or ""), finding.shown_ref)
                rows.append(("  ", *ids, printable(finding.detail), f"-> {what_to_do(finding, self.command)}"))
            self.table(rows)
            if (more := run.findings.counts[what] - len(shown)) > 0:
                self.stdout.write(f"  and {more:,} more: --format json lists up to 1,000 of a class")
            self.stdout.write("")
        if unswept := run.verification.unswept:
            self.stdout.write(
                f"{counted(unswept, 'ref')} that no source names any more, and that the cleanup's next sweep retires: "
                "no finding, while sweeps are made."
            )
        for alias in run.listing.not_listed:
            self.stdout.write(f"Store '{alias}' cannot list its objects: nothing can be said about unknown ones.")
        for line in run.leftovers.lines() if run.leftovers is not None else ():
            self.stdout.write(line)


def _counts(run: Run) -> str:
    counts = run.looked_at
    parts = [counted(counts["sources"], "source"), counted(counts["refs"], "ref"), counted(counts["jobs"], "job")]
    words = f"{', '.join(parts)} looked at"
    if run.deep:
        words += f", {counted(counts['objects_read'], 'object')} read and {counts['objects_listed']:,} listed"
    if run.verification.scrubbed:
        words += f", {run.verification.scrubbed:,} scrubbed"
    if run.listing.erased:
        words += f", {counted(run.listing.erased, 'unknown object')} erased"
    return words


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end this block as Ctrl-C does, where signals can be taken."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

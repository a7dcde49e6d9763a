"""Moves all secrets to the first key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, InterfaceError

from kfs_credentials.conf import NAME, key_ring, settings
from kfs_credentials.errors import ImproperlyPrepared
from kfs_credentials.keys import HeldKey, closed, held_keys, refs_held, unknown_in_use
from kfs_credentials.leases import new_worker_name
from kfs_credentials.management.options import (
    Exit,
    WorkCommand,
    add_by_argument,
    add_format_argument,
    add_settings_arguments,
    asked_after,
    check_store,
    counted,
    settings_given,
)
from kfs_credentials.management.progress import Progress
from kfs_credentials.models import WorkerRole
from kfs_credentials.reencryption import Outcome, Reencryption
from kfs_credentials.reencryption_worker import ReencryptionSummary, ReencryptionWorker
from kfs_credentials.stores import secret_stores
from kfs_credentials.worker import End

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

ALWAYS_SHOWN = (Outcome.REWRITTEN, Outcome.SKIPPED, Outcome.FAILED)


class Command(WorkCommand):
    """`reencrypt_secrets`."""

    role = WorkerRole.REENCRYPT

    help = (
        "Seal all secrets anew under the first key of KEYS, so that the others can be removed. They are closed first: "
        "from then on nothing comes into use under them, and a process whose first key is one of them refuses to work. "
        "To go back to an older key, put it first and say --reopen. "
        "What is under the first key already is left as it is, so that this is safe beside live traffic, and to "
        "interrupt, kill and repeat."
    )
    examples = """
examples:
  manage.py reencrypt_secrets --dry-run        how many secrets each key holds
  manage.py reencrypt_secrets                  everything
  manage.py reencrypt_secrets --rate 50        at most fifty a second
  manage.py reencrypt_secrets --recheck        open every object, whatever is recorded about its key

To change the key: put the new one behind the old one everywhere, then first everywhere, then run this, then
remove the old one. SIGTERM or SIGINT (Ctrl-C) ends it within ten seconds, with exit code 4; the next run goes
on where it was.
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        super().add_arguments(parser)
        add_settings_arguments(parser, "--batch-size", "--rate", "--threads", "--lease")
        parser.add_argument("--store", metavar="ALIAS", help="only what lies in this store, an alias of STORES")
        parser.add_argument(
            "--recheck",
            action="store_true",
            help="open every object, also those that are recorded under the first key: where the Node service, with "
            "another key, has worked on the same tables",
        )
        parser.add_argument(
            "--reopen", action="store_true", help="go back to the first key, though it is closed: open it again"
        )
        add_by_argument(parser, "closes the keys")
        parser.add_argument("--dry-run", action="store_true", help="count what would be moved, and touch nothing")
        add_format_argument(parser)

    def work(self, using: str, options: dict[str, Any]) -> Exit:
        """Run the worker, or count for `--dry-run`."""
        if options["store"] is not None:
            secret_stores[options["store"]]  # says so if there is none
        if options["dry_run"]:
            return self._dry_run(using, options)
        with settings.overridden(settings_given(options)):
            return self._run(using, options)

    def _run(self, using: str, options: dict[str, Any]) -> Exit:
        self._check_key(using, options)
        check_store(using)
        steps = Reencryption(
            using=using,
            worker=new_worker_name(),
            lease=settings.LEASE,
            by=options["by"],
            store=options["store"],
            recheck=options["recheck"],
        )

        def count_left() -> int | None:
            try:
                return sum(map(refs_held, _elsewhere(held_keys(using))))
            except (DatabaseError, InterfaceError):
                return None

        quiet, color = options["verbosity"] == 0, options["no_color"]
        with Progress(self.stderr, count_left, doing="re-encrypting", quiet=quiet, no_color=color) as progress:
            worker = ReencryptionWorker(
                steps,
                batch_size=settings.BATCH_SIZE,
                progress=lambda summary: progress.show(summary.outcomes[Outcome.REWRITTEN], _counts(summary)),
            )
            seconds = progress.run(worker.run, lambda: _counts(worker.summary))
        return self._finish(using, options, worker.summary, seconds)

    def _check_key(self, using: str, options: dict[str, Any]) -> None:
        """Refuse to undo what another run has done, unless that is what is meant."""
        primary = key_ring().primary.id
        if primary in closed(using) and not options["reopen"]:
            raise ImproperlyPrepared(
                f"Key {primary}, the first in {NAME}['KEYS'], is closed: another run has moved everything away from "
                "it. If this process has an old key ring, put the new key first. To go back to this key, say --reopen."
            )

    def _dry_run(self, using: str, options: dict[str, Any]) -> Exit:
        self._check_key(using, options)
        keys = held_keys(using)
        elsewhere = _elsewhere(keys)
        parts = [f"{refs_held(key):,} under {_named(key)}" for key in elsewhere if refs_held(key)]
        line = f"{counted(sum(map(refs_held, elsewhere)), 'ref')} to move to key {key_ring().primary.id}"
        line += f": {', '.join(parts)}. " if parts else ". "
        return self.report(options["format"], {"keys": keys}, f"{line}Nothing was changed.")

    def _finish(self, using: str, options: dict[str, Any], summary: ReencryptionSummary, seconds: float) -> Exit:
        keys = asked_after(using, lambda: held_keys(using))
        code = Exit.UNKNOWN if keys is None else _exit(summary, keys)
        if options["format"] == "table" and summary.failures:
            self.table([("ref", "stays as it is, since"), *summary.failures])
            if (more := summary.outcomes[Outcome.FAILED] - len(summary.failures)) > 0:
                self.stdout.write(f"and {more:,} more: see the log")
        value = {
            "result": {
                **{outcome.name.lower(): summary.outcomes[outcome] for outcome in Outcome},
                "end": summary.end.value,
            },
            "failures": [{"ref": ref, "reason": reason} for ref, reason in summary.failures],
            "seconds": round(seconds, 3),
            "keys": keys,
        }
        line = f"{_counts(summary)} in {seconds:.1f} s. {self._next(summary, keys)}"
        return self.report(options["format"], value, line, code)

    def _next(self, summary: ReencryptionSummary, keys: list[HeldKey] | None) -> str:
        again = self.command("reencrypt_secrets")
        if keys is None:
            return f"What is left is not known, since the database is out of reach. Run {again} when it is back."
        if summary.end in (End.PAUSED, End.DENIED):
            resume = self.command("resume_credential_workers", narrow=False)
            return f"Ended early: {summary.reason.rstrip('.')}. When it may go on, run {resume}, then {again}."
        if summary.end is not End.DRAINED:
            return f"Ended early: {summary.reason.rstrip('.')}. {again} goes on."
        if failed := summary.outcomes[Outcome.FAILED]:
            return f"{failed:,} stay as they are: keep their keys, put right what is said of each, then run {again}."
        if unknown := unknown_in_use(keys):
            return (
                f"{counted(unknown, 'ref')} came into use meanwhile under a key that is not known (the Node service "
                f"notes none): remove no key, and run {again} once more."
            )
        if left := [key for key in _elsewhere(keys) if refs_held(key) and key["key_id"] is not None]:
            holders = ", ".join(f"{_named(key)} ({refs_held(key):,} left)" for key in left)
            cleanup = self.command("run_secret_cleanup")
            return f"Keep for now: {holders}. {cleanup} finishes what is being erased; then run {again}."
        removable = [key["key_id"] for key in keys if key["in_ring"] and not key["first"] and key["key_id"]]
        if not removable:
            return "Everything is under the first key, and there is no other."
        return f"Nothing is under any other key: remove {', '.join(removable)} from {NAME}['KEYS'], everywhere."


def _elsewhere(keys: list[HeldKey]) -> list[HeldKey]:
    """Return the keys other than the first one; also the one that is not known."""
    return [key for key in keys if not key["first"]]


def _named(key: HeldKey) -> str:
    return "unknown keys" if key["key_id"] is None else f"key {key['key_id']}"


def _exit(summary: ReencryptionSummary, keys: list[HeldKey]) -> Exit:
    if summary.end is End.UNREACHABLE:
        return Exit.UNKNOWN
    if summary.end is not End.DRAINED:
        return Exit.NOT_FINISHED
    if summary.outcomes[Outcome.FAILED]:
        return Exit.LOOK
    return Exit.NOT_FINISHED if unknown_in_use(keys) else Exit.CLEAN


def _counts(summary: ReencryptionSummary) -> str:
    shown = [outcome for outcome in Outcome if outcome in ALWAYS_SHOWN or summary.outcomes[outcome]]
    return ", ".join(f"{summary.outcomes[outcome]:,} {outcome.value}" for outcome in shown)

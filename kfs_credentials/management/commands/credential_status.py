"""Shows what is done, what is left and what a person has to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfs_credentials.binding import store_problem
from kfs_credentials.conf import settings
from kfs_credentials.errors import ImproperlyPrepared
from kfs_credentials.management.options import (
    Exit,
    WorkCommand,
    add_format_argument,
    add_selection_arguments,
    counted,
    printable,
)
from kfs_credentials.metrics import read_metrics, render
from kfs_credentials.status import Status, read_status

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

    from kfs_credentials.keys import HeldKey

GROUPS = {
    "sources": "sources",
    "  by shape": "unsupported",
    "backfills": "backfills",
    "  by code": "failures",
    "ledger": "ledger",
    "rounds": "rounds",
    "acknowledged": "acknowledged",
}
MEANINGS = {
    ("sources", "legacy"): "credentials in clear, and no ref",
    ("sources", "movable"): "those of them that run_credential_backfill moves",
    ("sources", "unsupported"): "credentials that are no JSON object: never touched",
    ("sources", "too_large"): "legacy ones that failed, being larger than MAX_SECRET_BYTES",
    ("sources", "referenced"): "a ref: the credentials are in the secret store",
    ("sources", "both"): "a ref, and credentials that somebody wrote back in clear",
    ("sources", "dangling"): "a ref that the ledger does not have as theirs and in use",
    ("backfills", "queued"): "jobs that wait for a worker, or for their next attempt",
    ("backfills", "running"): "jobs that a worker has leased",
    ("backfills", "failed"): "jobs that wait for a person",
    ("backfills", "expired_leases"): "running jobs whose worker is gone: the next one takes them over",
    ("ledger", "staged"): "reserved by create or rotate",
    ("ledger", "candidate"): "reserved by the backfill",
    ("ledger", "active"): "in use by their sources",
    ("ledger", "retired"): "no longer used, to be erased",
    ("ledger", "deleting"): "that a worker is erasing",
    ("ledger", "deleted"): "erased",
    ("ledger", "overdue"): "whose next move is due: run_secret_cleanup makes it",
    ("ledger", "waiting"): "whose next move comes later",
    ("ledger", "parked"): "whose erasure fails, or that the store keeps",
    ("ledger", "displaced"): "newer than the ref that their source names again",
    ("ledger", "abandoned"): "not erased, by a person's decision",
    ("rounds", "unknown_objects"): "objects that no ledger row accounts for, at the last patrol",
    ("rounds", "last_sweep_seconds"): "since all refs were last looked at",
    ("rounds", "last_patrol_seconds"): "since all objects were last looked at",
    ("acknowledged", "unsupported"): "settled: they count as looked at",
    ("acknowledged", "too_large"): "settled: they count as looked at",
}


KEY_COLUMNS = ("key", "live", "retired", "candidate", "")


class Command(WorkCommand):
    """`credential_status`."""

    help = (
        "Show how many credentials are moved, how many are left, and what a person has to look at. "
        "Changes nothing and locks nothing."
    )
    examples = """
examples:
  manage.py credential_status
  manage.py credential_status --tenant acme
  manage.py credential_status --format json
  manage.py credential_status --format prometheus  for a textfile collector
  manage.py credential_status --check              for scripts: the exit code says whether all is done

Without --check the exit code is 0 whatever is found. With it, 4 means that something is left to move or
to erase now, and 3 that nothing is, but that a person has to look at something.
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        super().add_arguments(parser)
        add_selection_arguments(parser)
        parser.add_argument(
            "--check", action="store_true", help="exit with 0 only if nothing is left to do or to look at"
        )
        add_format_argument(parser, "prometheus")

    def work(self, using: str, options: dict[str, Any]) -> Exit:
        """Read and print."""
        selected = {"tenant": options["tenant"], "space": options["space"]}
        value: Any
        if options["format"] == "prometheus":
            if any(selected.values()):
                raise ImproperlyPrepared(
                    "Metrics are about the whole database: leave out --tenant and --space, or use --format json."
                )
            metrics = read_metrics(using)
            status, value = metrics.status, render(metrics)
        else:
            status = read_status(using, **selected)
            value = status.as_json()
        stores = {store: store_problem(using, store) for store in settings.STORES}
        if options["format"] == "json":
            value["stores"] = stores
        if options["format"] == "table":
            self._print(status)
        found = exit_code(status)
        line = self._verdict(status)
        if problems := [problem for problem in stores.values() if problem is not None]:
            found = found or Exit.LOOK
            line = " ".join([line, *(f"Besides: {problem.rstrip('.')}." for problem in problems)])
        self.report(options["format"], value, line, found)
        return found if options["check"] else Exit.CLEAN

    def _print(self, status: Status) -> None:
        rows = []
        for title, name in GROUPS.items():
            counts: dict[str, int | None] = getattr(status, name)
            for place, (member, count) in enumerate(counts.items()):
                words = printable(member) if name == "failures" else member.replace("_", " ")
                shown = "never" if count is None else f"{count:,}"
                rows.append((title if place == 0 else "", words, shown, MEANINGS.get((name, member), "")))
        self.table(rows, right=(2,))
        for store, binding in status.bindings.items():
            finished = "" if binding["confirmed"] else ", NOT FINISHED"
            self.stdout.write(
                f"store {printable(store)}: bound by {printable(binding['bound_by'])} at {binding['bound_at']}, "
                f"epoch {binding['epoch']:,}{finished}"
            )
        if status.keys:
            self.table([KEY_COLUMNS, *map(_key, status.keys)], right=(1, 2, 3))

    def _verdict(self, status: Status) -> str:
        line = self._state(status)
        if status.pause is None:
            return line
        by, reason = printable(status.pause["by"]), printable(status.pause["reason"])
        resume = self.command("resume_credential_workers", narrow=False)
        return f"{line} The workers are paused, since {status.pause['at']} by {by}: {reason}. {resume} lets them go on."

    def _state(self, status: Status) -> str:
        movable, queued, running = status.left
        findings = self._findings(status)
        if any(status.left) or status.ledger["overdue"]:
            line = "Not finished:"
            if any(status.left):
                line += f" {movable:,} to move, {counted(queued, 'job')} queued, {running:,} running"
                if expired := status.backfills["expired_leases"]:
                    line += f" ({counted(expired, 'expired lease')}: the worker died or hangs)"
                line += f". Run {self.command('run_credential_backfill')}."
            if overdue := status.ledger["overdue"]:
                line += f" {counted(overdue, 'ref')} overdue. Run {self.command('run_secret_cleanup')}."
            return f"{line} To look at besides: {findings}." if findings else line
        if findings:
            return f"Nothing is left to move. To look at: {findings}."
        settled = sum(status.acknowledged.values())
        beside = f" ({settled:,} that stay in clear are acknowledged)" if settled else ""
        return f"Clean: nothing is left to move or to look at{beside}."

    def _findings(self, status: Status) -> str:
        found = status.findings
        parts = [f"{found[name]:,} {name.replace('_', ' ')}" for name in ("unsupported", "too_large") if found[name]]
        if parts:
            parts[-1] += f" ({self.command('settle_unsupported_credentials --all --dry-run')} lists them)"
        if found["failed"]:
            retry = self.command("retry_credential_backfill --all")
            parts.append(f"{found['failed']:,} failed ({retry} once their cause is gone)")
        if found["both"]:
            parts.append(
                f"{found['both']:,} with both a ref and credentials in clear (an old application writes them back: "
                f"stop it, then {self.command('verify_credentials')} says what to do)"
            )
        found = status.ref_findings
        if found["dangling"]:
            parts.append(
                f"{found['dangling']:,} whose ref is not in use by the ledger "
                f"({self.command('run_secret_cleanup')} repairs what can be repaired, and names the others)"
            )
        if found["parked"]:
            parts.append(
                f"{counted(found['parked'], 'ref')} whose erasure fails (the admin shows them, and can try again)"
            )
        if found["displaced"]:
            parts.append(f"{counted(found['displaced'], 'displaced ref')} (the admin can restore or discard them)")
        if found["unknown_objects"]:
            parts.append(
                f"{counted(found['unknown_objects'], 'object')} in the store that no ledger row accounts for "
                f"({self.command('verify_credentials --deep')} lists them)"
            )
        if found["keyless"]:
            parts.append(
                f"{counted(found['keyless'], 'ref')} under keys that are not in KFS_CREDENTIALS['KEYS'] (put these "
                "back, behind the others)"
            )
        if status.unknown_keys:
            parts.append(
                f"{counted(status.unknown_keys, 'ref')} in use under keys that are not known "
                f"({self.command('reencrypt_secrets', narrow=False)} finds out: until then, remove no key)"
            )
        if found["closed_key"]:
            parts.append("the first key of this process is closed (put the one that is in use now before it)")
        return "; ".join(parts)


def _key(key: HeldKey) -> tuple[str, ...]:
    what = ["the first: it encrypts"] if key["first"] else []
    if key["key_id"] is None:
        what.append("not known: reencrypt_secrets finds out" if key["live"] else "not known, or no object")
    elif not key["in_ring"]:
        what.append("not in KFS_CREDENTIALS['KEYS']")
    if key["closed"]:
        what.append("closed")
    counts = [f"{count:,}" for count in (key["live"], key["retired"], key["candidate"])]
    return (key["key_id"] or "unknown", *counts, ", ".join(what))


def exit_code(status: Status) -> Exit:
    """Return what a script is to be told about this status."""
    if any(status.left) or status.ledger["overdue"]:
        return Exit.NOT_FINISHED
    return Exit.CLEAN if status.clean else Exit.LOOK

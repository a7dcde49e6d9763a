"""Acknowledges credentials that cannot be moved as they are, or moves them wrapped."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, InterfaceError

from kfs_credentials.errors import ImproperlyPrepared, KfsCredentialsError
from kfs_credentials.in_clear import Settled, read, wrap
from kfs_credentials.management.options import (
    Exit,
    WorkCommand,
    add_by_argument,
    add_format_argument,
    add_selection_arguments,
    check_store,
    printable,
    uuid_argument,
)
from kfs_credentials.management.progress import Progress
from kfs_credentials.models import AcknowledgedShape
from kfs_credentials.models.source import UNSUPPORTED
from kfs_credentials.operations import Unsettled, acknowledge, settled, unsettled

if TYPE_CHECKING:
    import uuid
    from collections.abc import Sequence

    from django.core.management.base import CommandParser

LONGEST_KEY = 200
SHOWN = 20
"""Sources that were not moved, of which the table tells."""
REASONS = {
    Settled.CHANGED: "changed meanwhile, or of a shape that is not wrapped",
    Settled.BUSY: "held by somebody else",
    Settled.LEAVING: "being deleted",
    Settled.TOO_LARGE: "larger than MAX_SECRET_BYTES",
    Settled.INVALID: "not to be stored: nested too deep, a number out of range, or a tenant id that is none",
    Settled.NOT_TAKEN: "not taken by the secret store: the log says why",
    Settled.REFUSED: "refused by the database: a constraint or trigger",
}


class Command(WorkCommand):
    """`settle_unsupported_credentials`."""

    help = (
        "Acknowledge credentials that are no JSON object, or too large, and so stay in clear where they are. "
        "Until then they keep the status from being clean; credentials whose shape changes later count again. "
        "Nothing of them is changed. Or, with --wrap KEY, move those that are no JSON object into the secret store, "
        "each as the one member KEY of an object. No value is shown."
    )
    examples = """
examples:
  manage.py settle_unsupported_credentials --all --dry-run         which ones there are
  manage.py settle_unsupported_credentials --all --shape array
  manage.py settle_unsupported_credentials 5f0c2a7e-3d1b-4c68-9e47-0a51c2d3e4f5
  manage.py settle_unsupported_credentials --all --shape string --wrap access_token

Whoever reads the credentials finds {KEY: value} afterwards. A --wrap that was cut short is safe to run again.
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        super().add_arguments(parser)
        parser.add_argument("ids", nargs="*", metavar="SOURCE", type=uuid_argument, help="the ids of sources")
        parser.add_argument(
            "--all",
            action="store_true",
            help="all that are not acknowledged yet, of what --shape, --tenant and --space leave",
        )
        parser.add_argument("--shape", choices=AcknowledgedShape.values, help="only credentials of this shape")
        parser.add_argument(
            "--wrap", metavar="KEY", help="move them into the store as the member KEY of an object, every digit kept"
        )
        add_by_argument(parser, "acknowledges, or wraps")
        add_selection_arguments(parser)
        parser.add_argument("--dry-run", action="store_true", help="list them, and touch nothing")
        add_format_argument(parser)

    def work(self, using: str, options: dict[str, Any]) -> Exit:
        """Acknowledge, move, or list."""
        ids: set[uuid.UUID] = set(options["ids"])
        if bool(ids) == options["all"]:
            raise ImproperlyPrepared("Say which sources: either give their ids, or --all.")
        if options["wrap"] is not None:
            _check_key(options["wrap"])
            if options["shape"] == AcknowledgedShape.TOO_LARGE:
                raise ImproperlyPrepared(
                    "What is too large stays too large when it is wrapped: raise MAX_SECRET_BYTES."
                )
        found = [
            one
            for one in unsettled(using, tenant=options["tenant"], space=options["space"])
            if (not ids or one.source_id in ids) and options["shape"] in (None, one.shape)
        ]
        if options["wrap"] is not None:
            return self._wrap(using, found, options)
        missing = ids - {one.source_id for one in found}
        before = settled(using, missing) if missing else set()
        if unknown := sorted(map(str, missing - before)):
            raise ImproperlyPrepared(
                f"Nothing to acknowledge at: {', '.join(unknown)}. Nothing was touched; "
                f"{self.command('settle_unsupported_credentials --all --dry-run')} lists what there is."
            )
        if not options["dry_run"]:
            acknowledge(using, found, by=options["by"])
        return self._finish(found, len(before), options)

    def _finish(self, found: Sequence[Unsettled], before: int, options: dict[str, Any]) -> Exit:
        listed = [{"source": str(one.source_id), "tenant": one.tenant_id, "shape": one.shape} for one in found]
        if options["format"] == "table" and listed:
            self.table([(one["source"], one["shape"], printable(one["tenant"])) for one in listed])
        shapes = Counter(one.shape.replace("_", " ") for one in found)
        counts = f" ({', '.join(f'{count:,} {shape}' for shape, count in sorted(shapes.items()))})" if shapes else ""
        if options["dry_run"]:
            line = f"{len(found):,} to {'move' if options['wrap'] else 'acknowledge'}{counts}. Nothing was changed."
        else:
            line = f"{len(found):,} acknowledged{counts}."
            if found:
                line += " They stay in clear where they are."
        if before:
            line += f" {before:,} had been acknowledged before."
        return self.report(options["format"], {"found" if options["dry_run"] else "acknowledged": listed}, line)

    # Wrapped.

    def _wrap(self, using: str, found: Sequence[Unsettled], options: dict[str, Any]) -> Exit:
        """Move them; those that were given by their ids too if they are acknowledged, or were moved before."""
        chosen = [one for one in found if one.shape in UNSUPPORTED]
        ids = [one.source_id for one in chosen]
        given = set(options["ids"]) - set(ids)
        if given:
            known = self._acknowledged_or_moved(using, given, options)
            if unknown := sorted(map(str, given - known)):
                raise ImproperlyPrepared(
                    f"Nothing to wrap at: {', '.join(unknown)}. Nothing was touched; "
                    f"{self.command('settle_unsupported_credentials --all --dry-run')} lists what there is."
                )
            ids += sorted(known)
        if options["dry_run"]:
            return self._finish(chosen, 0, options)
        check_store(using)
        outcomes: dict[uuid.UUID, Settled] = {}
        problem: Exception | None = None
        quiet, color = options["verbosity"] == 0, options["no_color"]
        with Progress(self.stderr, lambda: len(ids) - len(outcomes), quiet=quiet, no_color=color) as progress:
            try:
                for some in read(using, ids, tenant=options["tenant"]):
                    for one in some:
                        outcomes[one.source] = wrap(using, one, options["wrap"])
                        progress.show(len(outcomes), _counts(outcomes))
            except (KfsCredentialsError, DatabaseError, InterfaceError) as error:
                problem = error
        if problem is not None:
            self.stderr.write(f"Up to here: {_counts(outcomes)}.", str)
            raise problem
        return self._moved(ids, outcomes, options)

    def _acknowledged_or_moved(self, using: str, given: set[uuid.UUID], options: dict[str, Any]) -> set[uuid.UUID]:
        acknowledged = settled(using, given)
        known = set()
        for some in read(using, sorted(given), tenant=options["tenant"]):
            for one in some:
                in_space = options["space"] in (None, one.space)
                moved = one.in_use and one.shape is None
                wrappable = one.source in acknowledged and one.shape in UNSUPPORTED
                if in_space and (moved or wrappable) and (moved or options["shape"] in (None, one.shape)):
                    known.add(one.source)
        return known

    def _moved(self, ids: Sequence[uuid.UUID], outcomes: dict[uuid.UUID, Settled], options: dict[str, Any]) -> Exit:
        over = {source for source, what in outcomes.items() if what in (Settled.DONE, Settled.BEFORE)}
        left = {source: outcomes.get(source, Settled.CHANGED) for source in ids if source not in over}
        if options["format"] == "table" and left:
            self.table([(str(source), REASONS[what]) for source, what in list(left.items())[:SHOWN]])
            if len(left) > SHOWN:
                self.stdout.write(f"and {len(left) - SHOWN:,} more")
        line = f"{_counts(outcomes)}."
        if not ids:
            line += " What is acknowledged already is moved where its id is given."
        if left:
            reasons = Counter(REASONS[what] for what in left.values())
            counts = "; ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
            line += f" Left in clear: {counts}. Correct that, then run this again."
        value = {
            "wrapped": sum(what is Settled.DONE for what in outcomes.values()),
            "before": sum(what is Settled.BEFORE for what in outcomes.values()),
            "left": [{"source": str(source), "reason": what.value} for source, what in left.items()],
        }
        return self.report(options["format"], value, line, Exit.LOOK if left else Exit.CLEAN)


def _counts(outcomes: dict[uuid.UUID, Settled]) -> str:
    counts = Counter(outcomes.values())
    words = f"{counts[Settled.DONE]:,} moved into the secret store"
    return words + (f", {counts[Settled.BEFORE]:,} moved before" if counts[Settled.BEFORE] else "")


def _check_key(key: str) -> None:
    """Raise `ImproperlyPrepared` unless the key can be one in JSON that a person can read."""
    try:
        key.encode()
    except UnicodeEncodeError:
        key = ""
    if not key.strip() or len(key) > LONGEST_KEY or not key.isprintable():
        raise ImproperlyPrepared(
            f"--wrap needs a key: printable text of at most {LONGEST_KEY} characters, not blank. Nothing was touched."
        )

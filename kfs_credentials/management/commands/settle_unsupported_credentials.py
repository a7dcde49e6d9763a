"""Acknowledges credentials that cannot be moved as they are."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kfs_credentials.errors import ImproperlyPrepared
from kfs_credentials.management.options import (
    Exit,
    WorkCommand,
    add_by_argument,
    add_format_argument,
    add_selection_arguments,
    checked_text,
    printable,
    uuid_argument,
)
from kfs_credentials.models import AcknowledgedShape
from kfs_credentials.operations import Unsettled, acknowledge, settled, unsettled

if TYPE_CHECKING:
    import uuid
    from collections.abc import Sequence

    from django.core.management.base import CommandParser


class Command(WorkCommand):
    """`settle_unsupported_credentials`."""

    help = (
        "Acknowledge credentials that are no JSON object, or too large, and so stay in clear where they are. "
        "Until then they keep the status from being clean; credentials whose shape changes later count again. "
        "Nothing of them is changed, and no value is shown."
    )
    examples = """
examples:
  manage.py settle_unsupported_credentials --all --dry-run         which ones there are
  manage.py settle_unsupported_credentials --all --shape array
  manage.py settle_unsupported_credentials 5f0c2a7e-3d1b-4c68-9e47-0a51c2d3e4f5
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        super().add_arguments(parser)
        parser.add_argument("ids", nargs="*", metavar="SOURCE", type=uuid_argument, help="the ids of sources")
        parser.add_argument(
            "--all", action="store_true", help="all of them, or those that --shape, --tenant and --space leave"
        )
        parser.add_argument("--shape", choices=AcknowledgedShape.values, help="only credentials of this shape")
        add_by_argument(parser, "acknowledges")
        add_selection_arguments(parser)
        parser.add_argument("--dry-run", action="store_true", help="list them, and touch nothing")
        add_format_argument(parser)

    def work(self, using: str, options: dict[str, Any]) -> Exit:
        """Acknowledge, or list."""
        ids: set[uuid.UUID] = set(options["ids"])
        if bool(ids) == options["all"]:
            raise ImproperlyPrepared("Say which sources: either give their ids, or --all.")
        found = [
            one
            for one in unsettled(using, tenant=options["tenant"], space=options["space"])
            if (not ids or one.source_id in ids) and options["shape"] in (None, one.shape)
        ]
        missing = ids - {one.source_id for one in found}
        before = settled(using, missing) if missing else set()
        if unknown := sorted(map(str, missing - before)):
            raise ImproperlyPrepared(
                f"Nothing to acknowledge at: {', '.join(unknown)}. Nothing was touched; "
                f"{self.command('settle_unsupported_credentials --all --dry-run')} lists what there is."
            )
        if not options["dry_run"]:
            acknowledge(using, found, by=checked_text(options["by"], "--by"))
        return self._finish(found, len(before), options)

    def _finish(self, found: Sequence[Unsettled], before: int, options: dict[str, Any]) -> Exit:
        listed = [{"source": str(one.source_id), "tenant": one.tenant_id, "shape": one.shape} for one in found]
        if options["format"] == "table" and listed:
            self.table([(one["source"], one["shape"], printable(one["tenant"])) for one in listed])
        shapes = Counter(one.shape.replace("_", " ") for one in found)
        counts = f" ({', '.join(f'{count:,} {shape}' for shape, count in sorted(shapes.items()))})" if shapes else ""
        if options["dry_run"]:
            line = f"{len(found):,} to acknowledge{counts}. Nothing was changed."
        else:
            line = f"{len(found):,} acknowledged{counts}."
            if found:
                line += " They stay in clear where they are."
        if before:
            line += f" {before:,} had been acknowledged before."
        return self.report(options["format"], {"found" if options["dry_run"] else "acknowledged": listed}, line)

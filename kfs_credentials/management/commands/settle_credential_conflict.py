"""Settles which one is right: the value that a source's ref resolves to, or the one that lies in clear beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfs_credentials.errors import ImproperlyPrepared
from kfs_credentials.in_clear import InClear, Settled, Verdict, compared, keep_plaintext, keep_ref
from kfs_credentials.management.confirmation import add_yes_argument, confirm
from kfs_credentials.management.options import (
    Exit,
    WorkCommand,
    add_format_argument,
    add_selection_arguments,
    check_store,
    uuid_argument,
)
from kfs_credentials.models import Source

if TYPE_CHECKING:
    import uuid

    from django.core.management.base import CommandParser

REF, PLAINTEXT = "ref", "plaintext"
SAID = {
    Settled.CHANGED: "The source has changed since it was looked at, or somebody has it locked",
    Settled.BUSY: "Somebody else has held the source's rows for too long",
    Settled.LEAVING: "The source or its knowledge space is being deleted",
    Settled.TOO_LARGE: "What lies in clear is larger than MAX_SECRET_BYTES",
    Settled.INVALID: "What lies in clear cannot be stored: it is no JSON object, or nested too deep",
    Settled.NOT_TAKEN: "The secret store did not take what lies in clear; the log says why",
    Settled.UNREADABLE: "The ref cannot be read, so that what lies in clear is all there is",
    Settled.REFUSED: "The database refused the change (a constraint or trigger)",
}
NEXT = {
    Settled.CHANGED: "look again, then decide anew",
    Settled.BUSY: "run this again",
    Settled.LEAVING: "it is settled with its deletion",
    Settled.TOO_LARGE: "raise the setting, or keep the ref",
    Settled.INVALID: "keep the ref, or correct it",
    Settled.NOT_TAKEN: "correct that, and run this again",
    Settled.UNREADABLE: "keep the plaintext, or repair the ref first",
    Settled.REFUSED: "see which one, and run this again",
}


class Command(WorkCommand):
    """`settle_credential_conflict`."""

    help = (
        "Settle a source that has a ref, and credentials in clear that differ from what the ref resolves to: an old "
        "application wrote them back, or somebody entered new ones there. Keep the ref, and the plaintext is removed; "
        "or keep the plaintext, and it moves into the secret store under a fresh ref, while the old one is erased "
        "after the grace. No value is shown. verify_credentials lists such sources."
    )
    examples = """
examples:
  manage.py settle_credential_conflict --source 5f0c2a7e-3d1b-4c68-9e47-0a51c2d3e4f5 --keep ref
  manage.py settle_credential_conflict --source 5f0c2a7e-3d1b-4c68-9e47-0a51c2d3e4f5 --keep plaintext --yes

Nothing is done if the source has changed since the question was asked. It is safe to run this again.
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        super().add_arguments(parser)
        parser.add_argument("--source", metavar="UUID", type=uuid_argument, required=True, help="the id of the source")
        parser.add_argument("--keep", choices=(REF, PLAINTEXT), required=True, help="which one is right")
        add_selection_arguments(parser)
        add_yes_argument(parser)
        add_format_argument(parser)

    def work(self, using: str, options: dict[str, Any]) -> Exit:
        """Look, ask, and settle."""
        source, keep = options["source"], options["keep"]
        check_store(using)
        found, verdict = self._look(using, source, options)
        what = f"source {source} (version {found.version})"
        same = {
            Verdict.SAME: "It is the very value that its ref resolves to.",
            Verdict.DIFFERENT: "It is another value than the one that its ref resolves to.",
            Verdict.NOT_COMPARED: "It could not be compared with what its ref resolves to.",
        }[verdict]
        if keep == REF:
            asked = f"This removes what lies in clear in {what}, for good. {same}"
        else:
            asked = f"This gives {what} what lies in clear in it, under a fresh ref, and the old one is erased. {same}"
        confirm(self.stderr, asked, options)
        settled = keep_ref(using, found) if keep == REF else keep_plaintext(using, found)
        value = {"source": str(source), "keep": keep, "settled": settled is Settled.DONE, "outcome": settled.value}
        if settled is Settled.DONE:
            line = "Settled: 1 source keeps its ref, and has nothing in clear any more."
            if keep == PLAINTEXT:
                line = "Settled: 1 source has what lay in clear, under a fresh ref, and nothing in clear any more. "
                line += f"Next: {self.command('run_secret_cleanup --due')} erases the old one after the grace."
            return self.report(options["format"], value, line)
        line = f"Nothing was changed: 0 sources settled. {SAID[settled]}: {NEXT[settled]}."
        return self.report(options["format"], value, line, Exit.LOOK)

    def _look(self, using: str, source: uuid.UUID, options: dict[str, Any]) -> tuple[InClear, Verdict]:
        sources = Source.objects.using(using).filter(pk=source)
        if options["tenant"] is not None:
            sources = sources.filter(knowledge_space__tenant_id=options["tenant"])
        if options["space"] is not None:
            sources = sources.filter(knowledge_space_id=options["space"])
        if not sources.exists():
            raise ImproperlyPrepared(f"There is no source {source}. Nothing was touched.")
        for found in compared(using, [source]):
            return found
        raise ImproperlyPrepared(
            f"Nothing to settle at source {source}: it has no ref, nothing in clear, or is being deleted. Nothing was "
            f"touched; {self.command('verify_credentials')} lists what there is."
        )

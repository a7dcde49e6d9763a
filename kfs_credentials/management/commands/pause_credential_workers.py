"""Pauses all workers of a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfs_credentials.conf import settings
from kfs_credentials.errors import ImproperlyPrepared
from kfs_credentials.management.options import Exit, WorkCommand, add_by_argument, checked_text, printable
from kfs_credentials.pause import current, pause_workers

if TYPE_CHECKING:
    from django.core.management.base import CommandParser


class Command(WorkCommand):
    """`pause_credential_workers`."""

    help = (
        "Pause all workers of this database, wherever they run: no worker claims anything from now on, and what one "
        "holds is finished or given back within one lease. The pause lives in the database and survives restarts. "
        "Applications go on to create, resolve, rotate and revoke."
    )
    examples = """
examples:
  manage.py pause_credential_workers --reason "moving the volume of the secrets"
  manage.py resume_credential_workers
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        super().add_arguments(parser)
        parser.add_argument("--reason", metavar="TEXT", required=True, help="why, for whoever sees the pause")
        add_by_argument(parser, "pauses them")

    def work(self, using: str, options: dict[str, Any]) -> Exit:
        """Pause."""
        by, reason = options["by"], checked_text(options["reason"], "--reason")
        paused = pause_workers(using, by=by, reason=reason)
        resume = self.command("resume_credential_workers")
        if not paused and (pause := current(using)) is not None:
            raise ImproperlyPrepared(
                f"The workers are paused already, by {printable(pause.paused_by)}: {printable(pause.reason)}. That "
                f"pause stands; {resume} ends it."
            )
        self.stdout.write(
            f"Paused. What workers hold now is finished or given back within {settings.LEASE:g} s. {resume} lets them "
            "go on.",
            self.style.SUCCESS,
        )
        return Exit.CLEAN

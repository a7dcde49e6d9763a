"""Lets the workers of a database go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfs_credentials.management.options import Exit, WorkCommand, add_by_argument, printable
from kfs_credentials.pause import current, resume_workers

if TYPE_CHECKING:
    from django.core.management.base import CommandParser


class Command(WorkCommand):
    """`resume_credential_workers`."""

    help = (
        "Let the workers of this database go on, after `pause_credential_workers`, or after they have paused "
        "themselves since the secret store denied access. See to the reason first: the status shows it."
    )
    examples = """
examples:
  manage.py credential_status                  says who has paused them, and why
  manage.py resume_credential_workers
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        super().add_arguments(parser)
        add_by_argument(parser, "resumes them")

    def work(self, using: str, options: dict[str, Any]) -> Exit:
        """Resume."""
        pause = current(using)
        if resume_workers(using) and pause is not None:
            line = f"Resumed. They were paused by {printable(pause.paused_by)}: {printable(pause.reason)}."
        else:
            line = "The workers were not paused. Nothing was changed."
        self.stdout.write(line, self.style.SUCCESS)
        return Exit.CLEAN

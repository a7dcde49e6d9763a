"""Asking a person before something is done that cannot be undone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kfs_credentials.errors import ImproperlyPrepared

if TYPE_CHECKING:
    from django.core.management.base import CommandParser, OutputWrapper


def add_yes_argument(parser: CommandParser) -> None:
    """Add `--yes`."""
    parser.add_argument("--yes", action="store_true", help="do not ask for a confirmation")


def confirm(stream: OutputWrapper, question: str, options: dict[str, Any]) -> None:
    """Ask on `stream`, unless `--yes` was given.

    Raises `ImproperlyPrepared` if the answer is not yes, or if nobody can answer.
    """
    if options["yes"]:
        return
    if not sys.stdin.isatty():
        raise ImproperlyPrepared(
            f"{question} Nobody can be asked here: give --yes if that is right. Nothing was changed."
        )
    stream.write(f"{question} Type yes to go on: ", ending="")
    stream.flush()
    if sys.stdin.readline().strip() != "yes":
        raise ImproperlyPrepared("Not confirmed. Nothing was changed.")

"""What the commands share: options, exit codes, output. They parse and print; the work is elsewhere."""

from __future__ import annotations

import argparse
import enum
import json
import os
import shlex
import sys
import uuid
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, DjangoHelpFormatter
from django.db import DatabaseError, InterfaceError, connections, router
from django.db.migrations.executor import MigrationExecutor
from rich.cells import cell_len

from kfs_credentials.actor import acting_as, operating_system_user
from kfs_credentials.binding import ensure_bound
from kfs_credentials.checks import hidden_tables, invalid_indexes
from kfs_credentials.conf import settings
from kfs_credentials.errors import (
    ImproperlyPrepared,
    InvalidIndex,
    KfsCredentialsError,
    NotMigrated,
    RowsHidden,
    StoreUnavailable,
)
from kfs_credentials.models import RefusalReason, Source, WorkerRole
from kfs_credentials.operations import in_batches
from kfs_credentials.selection import Selection
from kfs_credentials.stores import secret_stores
from kfs_credentials.ticks import reason_of, refuse
from kfs_credentials.transactions import Fault, describe, fault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from django.core.management.base import CommandParser

T = TypeVar("T")

ARGPARSE_ERROR = 2
"""What argparse ends with where the options are wrong."""


class Exit(enum.IntEnum):
    """The exit codes of all commands."""

    CLEAN = 0
    WRONG_USE = 1  # wrong use or configuration
    LOOK = 3  # finished, but something failed or needs a person
    NOT_FINISHED = 4  # paused, limit, interrupted, gave up
    UNKNOWN = 5  # could not find out: database or store out of reach


EXIT_CODES = """
exit codes:
  0  clean: nothing left to do or to look at
  1  wrong use or configuration
  3  finished, but something failed or needs a person
  4  not finished: limit, interrupted, given up, refused by the store
  5  could not find out: database or store out of reach
"""


class HelpFormatter(DjangoHelpFormatter):
    """Puts the command's own options first, as Django does, and keeps the line breaks of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text.strip("\n") if "\n" in text else super()._fill_text(text, width, indent)


class TeachingCommand(BaseCommand):
    """A command whose help ends with examples, and which ends with 1 where its options are wrong."""

    examples = ""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Return the parser; below the options are the examples."""
        kwargs = {"epilog": self.examples, "formatter_class": HelpFormatter, **kwargs}
        return super().create_parser(prog_name, subcommand, **kwargs)

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command from a command line."""
        try:
            try:
                super().run_from_argv(argv)
            finally:
                sys.stdout.flush()
        except SystemExit as end:
            if end.code == ARGPARSE_ERROR:
                raise SystemExit(Exit.WRONG_USE) from None
            raise
        except BrokenPipeError:
            # Whoever read this has gone, as `head` does. At its end Python would flush, and fail, once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(Exit.NOT_FINISHED) from None


class WorkCommand(TeachingCommand):
    """A command on the tables of this app: `--database`, exit codes, and errors that say what to do.

    What it does is done in the name of `--by`, if it has that, or of the user who runs it.
    """

    role: ClassVar[WorkerRole | None] = None
    """Under which role it is counted if it refuses to work; None if it is no worker."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Return the parser; below the options are the examples and the exit codes."""
        return super().create_parser(prog_name, subcommand, epilog=self.examples + EXIT_CODES, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        """Add `--database`."""
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            choices=tuple(connections),
            help="the database that the sources live in, an alias of DATABASES (default: where the routers send "
            "writes of Source)",
        )

    def handle(self, *_: Any, **options: Any) -> None:
        """Run `work`; make an exit code and a message, which quotes no row, of what goes wrong."""
        default = router.db_for_write(Source)
        using = options["database"] or default
        self.database_flag = _flags({"database": using if using != default else None})
        self.flags = self.database_flag + _flags({name: options.get(name) for name in ("tenant", "space")})
        refusal: RefusalReason | None = None
        try:
            check_ready(using)
            check_selection(using, options)
            with acting_as(_actor(options.get("by"))):
                code, problem = self.work(using, options), ""
        except StoreUnavailable as error:
            code, problem, refusal = Exit.UNKNOWN, f"The secret store is out of reach: {error}", reason_of(error)
        except (KfsCredentialsError, ImproperlyConfigured) as error:
            code, problem, refusal = Exit.WRONG_USE, str(error), reason_of(error)
        except (DatabaseError, InterfaceError) as error:
            (code, problem), refusal = database_problem(using, error), reason_of(error)
        except KeyboardInterrupt:
            code, problem = Exit.NOT_FINISHED, "Interrupted. It is safe to run this again."
        # Out here, where the error has no context: a database's quotes rows.
        if refusal is not None and self.role is not None:
            refuse(using, self.role, refusal)
        if problem:
            raise CommandError(problem, returncode=code)
        if code is not Exit.CLEAN:
            raise SystemExit(int(code))

    def work(self, using: str, options: dict[str, Any]) -> Exit:
        """Do what the command is for, on alias `using`."""
        raise NotImplementedError

    def command(self, call: str, *, narrow: bool = True) -> str:
        """Return how to call another command on the same rows, for a message; if not `narrow`, on all of them."""
        return f"`manage.py {call}{self.flags if narrow else self.database_flag}`"

    def table(self, rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
        """Print lines of columns on standard output; `right` says which columns are flush right."""
        # Not len(): what East Asia writes is two columns wide.
        widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = []
            for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
                blanks = " " * (width - cell_len(cell))
                cells.append(blanks + cell if place in right else cell + blanks)
            self.stdout.write("  ".join(cells).rstrip())

    def report(self, output: str, value: Any, line: str, code: Exit = Exit.CLEAN) -> Exit:
        """Print the last line and return `code`; for JSON and text print the value, and the line on standard error."""
        if output != "table":
            self.stdout.write(value if isinstance(value, str) else json.dumps(value, indent=2))
            self.stderr.write(line, str)
        else:
            self.stdout.write(line, self.style.WARNING if code else self.style.SUCCESS)
        return code


def add_selection_arguments(parser: CommandParser) -> None:
    """Add `--tenant` and `--space`."""
    parser.add_argument("--tenant", metavar="TEXT", help="only the sources of this tenant")
    parser.add_argument("--space", metavar="UUID", type=uuid_argument, help="only the sources of this knowledge space")


def add_format_argument(parser: CommandParser, *more: str) -> None:
    """Add `--format`; `more`: formats besides table and JSON."""
    parser.add_argument(
        "--format",
        choices=("table", "json", *more),
        default="table",
        help="how to print the result (default: table); with others the last line goes to standard error",
    )


def add_by_argument(parser: CommandParser, does: str) -> None:
    """Add `--by`. `does`: what that person does."""
    parser.add_argument(
        "--by", metavar="NAME", default=operating_system_user(), help=f"who {does} (default: the user who runs this)"
    )


def _actor(by: str | None) -> str:
    """Return in whose name a command acts. `by`: what `--by` says, which is the user if nobody has said anything."""
    user = operating_system_user()
    return f"command:{user}" if by is None or by == user else checked_text(by, "--by")


def checked_text(text: str, option: str) -> str:
    """Return what an option says, for others to read; raises `ImproperlyPrepared` if that cannot be stored."""
    if not text.strip() or "\x00" in text:
        raise ImproperlyPrepared(f"{option} must be a text, without the character U+0000.")
    return text.strip()


def positive(text: str) -> int:
    """Read a whole number of 1 or more from the command line."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{printable(text)}' is not a whole number of 1 or more")
    return number


def positive_seconds(text: str) -> float:
    """Read a number of seconds above 0 from the command line."""
    return _above_zero(text, "a number of seconds above 0")


def positive_rate(text: str) -> float:
    """Read a number above 0, of something a second, from the command line."""
    return _above_zero(text, "a number above 0")


def _above_zero(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{printable(text)}' is not {what}")
    return number


SETTINGS: dict[str, tuple[str, Callable[[str], Any], str, str]] = {
    "--batch-size": ("N", positive, "BATCH_SIZE", "how many rows to take at a time"),
    "--rate": ("N", positive, "RATE_LIMIT", "how many secrets to take a second at most"),
    "--threads": ("N", positive, "STORE_THREADS", "how many threads talk to the store"),
    "--lease": ("SECONDS", positive_seconds, "LEASE", "how long other workers keep off what this one took"),
    "--attempts": ("N", positive, "MAX_ATTEMPTS", "how many attempts before a job has failed"),
}
"""Options that stand above a setting, for one run."""


def add_settings_arguments(parser: CommandParser, *options: str) -> None:
    """Add options that stand above settings for this run: some of SETTINGS."""
    for option in options:
        metavar, type_, setting, what = SETTINGS[option]
        parser.add_argument(option, metavar=metavar, type=type_, help=f"{what} (default: the setting {setting})")


def settings_given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that the options of `add_settings_arguments` give."""
    given = {setting: options.get(option[2:].replace("-", "_")) for option, (_, _, setting, _) in SETTINGS.items()}
    return {setting: value for setting, value in given.items() if value is not None}


def uuid_argument(text: str) -> uuid.UUID:
    """Read a UUID from the command line."""
    try:
        return uuid.UUID(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{printable(text)}' is not a UUID") from None


def counted(number: int, what: str) -> str:
    """Return "1 job" or "2 jobs" for `what` "job"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def printable(text: str) -> str:
    """Return text from outside with nothing in it that a terminal would obey, or take for another line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def connect(using: str) -> None:
    """Raise `CommandError`, with what to do, if the database of alias `using` is out of reach."""
    try:
        connections[using].ensure_connection()
    except (DatabaseError, InterfaceError) as error:
        # Nothing was asked yet: this says who refused which connection, and quotes no row.
        reason = " ".join(str(error).split())
    else:
        return
    raise CommandError(
        f"The database '{using}' is out of reach ({reason}). See that its server runs and that "
        f"DATABASES['{using}'] is right, then run this again.",
        returncode=Exit.UNKNOWN,
    )


def check_ready(using: str) -> None:
    """Raise `ImproperlyPrepared` unless alias `using` is migrated, shows all rows and has valid indexes.

    Every command asks this before it touches a row. Raises `CommandError` if the database is out of reach.
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        raise NotMigrated(
            f"DATABASES['{using}'] is {connection.display_name}, and kfs_credentials needs PostgreSQL. Give another "
            "alias with --database, or correct DATABASES."
        )
    connect(using)
    executor = MigrationExecutor(connection)
    wanted = [node for node in executor.loader.graph.leaf_nodes() if node[0] == "kfs_credentials"]
    if executor.migration_plan(wanted):
        database = "" if using == "default" else f" --database {using}"
        raise NotMigrated(
            f"The database '{using}' is not migrated. Run `manage.py migrate kfs_credentials{database}` first."
        )
    if hidden := hidden_tables(using):
        raise RowsHidden(
            f"Row-level security hides rows of {', '.join(hidden)} from this role, and a source that cannot be "
            "seen would be taken for one that was deleted. Use a role with BYPASSRLS."
        )
    if invalid := invalid_indexes(using):
        raise InvalidIndex(
            f"INVALID indexes: {', '.join(invalid)}. An interrupted CREATE INDEX CONCURRENTLY left them behind, and "
            "an invalid unique index keeps nothing unique. DROP INDEX CONCURRENTLY, then build them again."
        )


def asked_after(using: str, question: Callable[[], T]) -> T | None:
    """Return what the database answers after a run; None if it is out of reach.

    Once more with a new connection: a run that waited may have a session that the server has ended since.
    """
    for _ in range(2):
        try:
            return question()
        except (DatabaseError, InterfaceError):
            connections[using].close()
    return None


def check_store(using: str) -> None:
    """Raise what concerns a store, `BindingBroken` too, unless all of them can be used now and are this database's.

    Whoever puts or erases asks this before it touches a row. A database without secrets is bound here.
    """
    aliases = list(dict.fromkeys(["default", *settings.STORES]))
    for alias in aliases:
        secret_stores[alias].check()
    in_batches(using, aliases, lambda part: [ensure_bound(using, alias) for alias in part], size=1)


def check_selection(using: str, options: dict[str, Any]) -> None:
    """Raise `ImproperlyPrepared` if there is no such tenant or space: a slip of the pen must not look clean."""
    tenant, space = options.get("tenant"), options.get("space")
    if options.get("watch") or Selection.of(using, tenant=tenant, space=space).exists():
        return
    what = [f"knowledge space {space}"] if space is not None else []
    what += [f"tenant '{printable(tenant)}'"] if tenant is not None else []
    raise ImproperlyPrepared(
        f"The database '{using}' has no {' of '.join(what)}. Tenants are compared as they are, case included."
    )


def database_problem(using: str, error: DatabaseError | InterfaceError) -> tuple[Exit, str]:
    """Return exit code and message for a database error; the message says what to do and quotes no row."""
    what = describe(error)
    meaning = fault(error)
    if meaning in (Fault.PASSING, Fault.TOO_MUCH):
        return Exit.UNKNOWN, (
            f"The database '{using}' went out of reach, or was too busy to answer ({what}). What was done by then "
            "is done; it is safe to run this again."
        )
    return Exit.WRONG_USE, (
        f"The database '{using}' refused a statement ({what}). See that this role may read and write the tables of "
        "kfs_credentials; the server's log has the statement."
    )


def _flags(given: Mapping[str, object]) -> str:
    return "".join(
        f" --{name} {shlex.quote(printable(str(value)))}" for name, value in given.items() if value is not None
    )

"""Binds a database and a secret store to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfs_credentials.binding import EXPLANATIONS, Survey, Tried, bind, survey, try_refs
from kfs_credentials.conf import NAME, settings
from kfs_credentials.errors import ImproperlyPrepared, SecretIntegrityError
from kfs_credentials.management.confirmation import add_yes_argument, confirm
from kfs_credentials.management.options import (
    Exit,
    WorkCommand,
    add_by_argument,
    counted,
    printable,
)
from kfs_credentials.stores import secret_stores

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

TRIED = 100
"""Refs whose objects are tried before a store is bound."""


class Command(WorkCommand):
    """`bind_secret_store`."""

    help = (
        "Bind this database and a secret store to each other. The first use of a new database does that by itself; "
        "whenever database and store do not know each other after that (another directory, a copy, a restored backup), "
        "nothing is put or erased until a person has looked, and has said by this command that they belong together. "
        "Shows what each side knows, and how many secrets can be read, and asks before it changes anything. Whatever "
        "was bound to this store before, another copy of this database for instance, is refused from then on."
    )
    examples = """
examples:
  manage.py bind_secret_store --dry-run            what both sides know
  manage.py bind_secret_store                      asks, then binds
  manage.py bind_secret_store --yes                for scripts
"""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        super().add_arguments(parser)
        parser.add_argument("--store", metavar="ALIAS", default="default", help="the store's alias in STORES")
        add_yes_argument(parser)
        parser.add_argument(
            "--none-readable",
            action="store_true",
            help="bind it although not one of the secrets that were tried can be read: they are lost then",
        )
        add_by_argument(parser, "binds them")
        parser.add_argument("--dry-run", action="store_true", help="show both sides, and touch nothing")

    def work(self, using: str, options: dict[str, Any]) -> Exit:
        """Look, ask, bind."""
        by, store = options["by"], options["store"]
        if store not in settings.STORES:
            raise ImproperlyPrepared(
                f"{NAME}['STORES'] has no '{printable(store)}'. It has: {', '.join(settings.STORES) or 'none'}."
            )
        secret_stores[store].check()
        found, tried = survey(using, store), try_refs(using, store, TRIED)
        self._show(using, store, found, tried)
        if found.problem is None:
            self.stdout.write("They know each other. Nothing was changed.", self.style.SUCCESS)
            return Exit.CLEAN
        self.stdout.write(f"The problem: {EXPLANATIONS[found.problem][0]}.")
        if tried.refs and not tried.readable and not options["none_readable"]:
            raise ImproperlyPrepared(
                f"Not one of {counted(tried.refs, 'secret')} in use that were tried can be read from this store: it "
                "is not theirs, or the key is not. Nothing was changed. If they are lost, say --none-readable."
            )
        if options["dry_run"]:
            self.stdout.write("Nothing was changed.", self.style.SUCCESS)
            return Exit.CLEAN
        confirm(
            self.stderr, f"This binds them: whoever else uses the store '{store}' is refused from then on.", options
        )
        bind(using, store, by=by)
        self.stdout.write(f"Bound. See {self.command('credential_status')}.", self.style.SUCCESS)
        return Exit.CLEAN

    def _show(self, using: str, store: str, found: Survey, tried: Tried) -> None:
        half, seen = found.half, found.seen
        if half is None:
            database = "is not bound"
        else:
            database = f"environment {half.environment_id}, epoch {half.epoch:,}"
            database += "" if half.is_here else ", made in another database"
        if seen is None:
            shown = "shows no probe"
        elif isinstance(seen, SecretIntegrityError):
            shown = "has a probe that no key opens"
        else:
            shown = f"environment {seen.environment_id}, epoch {seen.epoch:,}"
        readable = f"{tried.readable:,} of {tried.refs:,} in use that were tried can be read"
        self.table(
            [
                ("database", printable(using), database),
                ("store", printable(store), shown),
                ("secrets", "", readable if tried.refs else "none in use"),
            ]
        )

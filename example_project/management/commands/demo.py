"""Makes a database with legacy credentials, moves them, and shows that every one reads back."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError, connection, transaction

from example_project import demo_data
from example_project.environment import BASE_DIR, DEMO_KEY_FILE
from example_project.read_back import read_back
from kfs_credentials.crypto.keys import KEY_BYTES
from kfs_credentials.management.options import Exit, TeachingCommand, connect, counted, positive
from kfs_credentials.stores import secret_stores
from kfs_credentials.stores.files import DurableFileStorage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper

LOCK = 5_742_026
"""The advisory lock of the demo that is at work on a database."""


class Command(TeachingCommand):
    """`demo`."""

    help = (
        "Fill the database with made-up sources that hold credentials in clear, move them with the backfill, and "
        "compare every one with what it was. What the demo makes lies in .demo/, unless the environment says "
        "otherwise. Run again, it changes nothing; `make clean` removes it."
    )
    examples = """
examples:
  manage.py demo
  manage.py demo --number 100000
  DATABASE_URL=postgres://localhost/scratch manage.py demo      a database of yours, without sources of yours
"""
    # The key and the directory for the secrets are what the checks ask for, and are made here.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument(
            "--number",
            metavar="N",
            type=positive,
            default=demo_data.DEFAULT_NUMBER,
            help=f"how many sources (default: {demo_data.DEFAULT_NUMBER:,}); a million takes some minutes",
        )
        parser.add_argument(
            "--seed",
            metavar="N",
            type=int,
            default=demo_data.DEFAULT_SEED,
            help=f"another number makes other data (default: {demo_data.DEFAULT_SEED})",
        )

    def handle(self, *_: Any, **options: Any) -> None:
        """Run the demo."""
        number, seed = options["number"], options["seed"]
        connect("default")
        with self._alone():
            self._refuse_foreign_sources()
            self._make_key()
            self._make_directory()
            self._load(number, seed)
            self._move()
            self._compare(number, seed)
        self._step("The status: manage.py credential_status")
        call_command("credential_status", stdout=self.stdout)

    def _step(self, text: str) -> None:
        self.stdout.write(self.style.MIGRATE_HEADING(f"==> {text}"))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other demo is at work on this database, and keep it so."""
        holder: BaseDatabaseWrapper = connection.copy()
        try:
            with holder.cursor() as cursor:
                cursor.execute("SELECT pg_try_advisory_lock(%s)", [LOCK])
                if cursor.fetchone() != (True,):
                    self._step("Waiting for another demo that is at work on this database")
                    cursor.execute("SELECT pg_advisory_lock(%s)", [LOCK])
            yield
        finally:
            holder.close()

    def _refuse_foreign_sources(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT to_regclass('sources') IS NOT NULL")
            exists = cursor.fetchone() == (True,)
        foreign = demo_data.foreign_sources(connection) if exists else 0
        if foreign:
            raise CommandError(
                f"This database holds {counted(foreign, 'source')} that the demo did not make, and the demo would move "
                "the credentials of all. Nothing was touched. Give it another database with DATABASE_URL, or unset "
                "that for one of its own; `make clean` removes its own, if these were made in that."
            )

    def _make_key(self) -> None:
        if settings.KFS_CREDENTIALS["KEYS"]:
            return
        try:
            if not DEMO_KEY_FILE.exists():
                self._step(f"Making a key for the demo: {DEMO_KEY_FILE.relative_to(BASE_DIR)}")
                DEMO_KEY_FILE.parent.mkdir(parents=True, exist_ok=True)
                with NamedTemporaryFile("w", dir=DEMO_KEY_FILE.parent) as file:
                    file.write(f"{secrets.token_hex(KEY_BYTES)}\n")
                    file.flush()
                    with suppress(FileExistsError):  # of a demo on another database
                        os.link(file.name, DEMO_KEY_FILE)
            settings.KFS_CREDENTIALS["KEYS"] = DEMO_KEY_FILE.read_text().split()
        except OSError as error:
            raise CommandError(
                f"The demo cannot keep its key in {DEMO_KEY_FILE} ({error.strerror}). Make its directory writable, "
                "or give it a key with KFS_CREDENTIALS_KEYS."
            ) from None

    def _make_directory(self) -> None:
        storage = getattr(secret_stores["default"], "storage", None)
        if not isinstance(storage, DurableFileStorage):
            return
        try:
            Path(storage.location).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(
                f"The demo cannot make the directory for its secrets, {storage.location} ({error.strerror}). Give "
                "another one with KFS_SECRETS_DIR."
            ) from None

    def _load(self, number: int, seed: int) -> None:
        self._step("Migrating")
        try:
            call_command("migrate", verbosity=0)
        except DatabaseError as error:
            raise CommandError(f"The database cannot be migrated: {error}") from None
        self._step(f"Loading {number:,} made-up sources with credentials in clear")
        try:
            with transaction.atomic():
                loaded = demo_data.load(connection, number, seed)
        except demo_data.DemoDataError as error:
            raise CommandError(f"{error} `make clean` removes the demo's own.") from None
        if not loaded:
            self.stdout.write("They are there already.")
            return
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE knowledge_spaces, sources")

    def _move(self) -> None:
        self._step("Moving them: manage.py run_credential_backfill")
        try:
            call_command("run_credential_backfill", stdout=self.stdout, stderr=self.stderr)
        except SystemExit as end:
            if end.code != Exit.LOOK:
                raise

    def _compare(self, number: int, seed: int) -> None:
        self._step("Reading every one back from the encrypted store, and comparing")
        started = time.monotonic()
        result = read_back("default", number, seed)
        if result.wrong:
            ids = [*map(str, result.wrong_ids), *["..."] * (result.wrong > len(result.wrong_ids))]
            raise CommandError(
                f"{counted(result.wrong, 'source')} not as expected: {', '.join(ids)}. Somebody has changed the data "
                "since the demo made it, or this is a fault: please report it."
            )
        self.stdout.write(
            f"{result.moved:,} credentials read back as they were, {result.left_alone:,} sources left alone, "
            f"0 wrong ({time.monotonic() - started:.1f} s)."
        )

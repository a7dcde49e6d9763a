"""Everything as it was: tables and store are copied once, and put back in a few milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from django.apps import apps
from django.db import connection


class Saved:
    """A copy of all tables of ours and of the store's files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tables = [model._meta.db_table for model in apps.get_app_config("kfs_credentials").get_models()]
        self._run("CREATE TABLE kfs_tests_saved_{table} AS TABLE {table}")
        self.files = {path: path.read_bytes() for path in self._files()}

    @classmethod
    @contextmanager
    def now(cls, directory: Path) -> Iterator[Self]:
        """Give a copy of what is there now, for as long as the block lasts."""
        saved = cls(directory)
        yield saved
        saved._run("DROP TABLE kfs_tests_saved_{table}")

    def restore(self) -> None:
        """Put everything back."""
        assert not connection.in_atomic_block
        self._run("DELETE FROM {table}; INSERT INTO {table} TABLE kfs_tests_saved_{table}")
        for path in self._files():
            if path not in self.files:
                path.unlink()
        for path, content in self.files.items():
            if not path.exists() or path.read_bytes() != content:
                path.unlink(missing_ok=True)
                path.write_bytes(content)

    def _files(self) -> list[Path]:
        return [path for path in self.directory.rglob("*") if path.is_file()]

    def _run(self, statements: str) -> None:
        """Run statements for each table, past its triggers and keys."""
        with connection.cursor() as cursor:
            each = "; ".join(statements.format(table=table) for table in self.tables)
            cursor.execute(f"SET session_replication_role = replica; {each}; SET session_replication_role = DEFAULT")

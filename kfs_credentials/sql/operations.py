"""The migration operation that runs one file of `schema/`."""

from __future__ import annotations

from typing import Any

from django.db import OperationalError
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations import RunSQL
from django.db.migrations.operations.base import Operation
from psycopg.errors import LockNotAvailable

from kfs_credentials import sql
from kfs_credentials.conf import settings

# The schema that `sources` lives in, if it is there: what is made beside it belongs in the same one.
HOME = """
SELECT quote_ident(nspname) || ', ' || current_setting('search_path')
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE pg_class.oid = to_regclass('sources')
"""


class RunFile(RunSQL):
    """RunSQL with the text of `sql/schema/<name>.sql`, and `<name>.reverse.sql` if there is one.

    Each lock is waited for at most LOCK_TIMEOUT: a statement that waits for a table queues everybody behind it.
    Raises `OperationalError` that says so when the time is up; the transaction is rolled back whole.
    """

    def __init__(self, name: str, *, reversible: bool = False, state_operations: list[Operation] | None = None) -> None:
        self.name = name
        self.reversible_by_file = reversible
        reverse = sql.read(f"schema/{name}.reverse") if reversible else RunSQL.noop
        super().__init__(sql.read(f"schema/{name}"), reverse, state_operations=state_operations)

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return the name of the file; the state operations belong to the migration that says them."""
        return self.__class__.__qualname__, [self.name], {"reversible": self.reversible_by_file}

    def describe(self) -> str:
        """Return what `migrate --plan` shows."""
        return f"Run SQL file {self.name}.sql"

    def _run_sql(self, schema_editor: BaseDatabaseSchemaEditor, sqls: Any) -> None:
        lock_timeout = f"{max(1, settings.LOCK_TIMEOUT * 1000):.0f}ms"  # 0 would be for ever
        if schema_editor.collect_sql:  # `sqlmigrate` shows the file and runs nothing
            if sqls != RunSQL.noop:
                schema_editor.execute(f"SET LOCAL lock_timeout = '{lock_timeout}'")
            super()._run_sql(schema_editor, sqls)  # type: ignore[misc]
            return
        with schema_editor.connection.cursor() as cursor:
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", [lock_timeout])
            cursor.execute("SELECT current_setting('search_path')")
            (before,) = cursor.fetchone()
            cursor.execute(HOME)
            home = cursor.fetchone()
            cursor.execute("SELECT set_config('search_path', %s, true)", [home[0] if home else before])
            try:
                super()._run_sql(schema_editor, sqls)  # type: ignore[misc]
            except OperationalError as error:
                if not isinstance(error.__cause__, LockNotAvailable):
                    raise
                raise OperationalError(
                    f"gave up waiting for a lock on the tables after {settings.LOCK_TIMEOUT:g} s "
                    "(KFS_CREDENTIALS['LOCK_TIMEOUT']): another session holds it, a long query perhaps. "
                    "Nothing was changed by this migration; run migrate again when that session is done."
                ) from None
            # Django writes its own table next, and must find it where it was.
            cursor.execute("SELECT set_config('search_path', %s, true)", [before])

"""A flush that takes milliseconds: most tests here commit, and Django would truncate every table after each of them.

TRUNCATE makes new files for each table and index, empty or not; here only what is large is truncated, and what has
rows is deleted. Content types and permissions, which no test changes, stay, so that they need not be made anew.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management.commands import flush
from django.db.backends.postgresql.operations import DatabaseOperations

KEPT = {"django_content_type", "auth_permission"}

# In one statement, since the tables refer to each other: foreign keys are looked at when it is over.
EMPTY = """
DO $flush$
DECLARE
  wanted TEXT[] := ARRAY[{tables}];
  large TEXT;
  small TEXT;
  name TEXT;
  has_rows BOOLEAN;
  place INTEGER := 0;
BEGIN
  FOREACH name IN ARRAY wanted LOOP
    IF pg_relation_size(name::regclass) > 500000 THEN
      large := concat_ws(', ', large, name);
      CONTINUE;
    END IF;
    EXECUTE format('SELECT EXISTS (SELECT FROM %s)', name) INTO has_rows;
    IF has_rows THEN
      place := place + 1;
      small := concat_ws(', ', small, format('part_%s AS (DELETE FROM %s)', place, name));
    END IF;
  END LOOP;
  IF large IS NOT NULL THEN
    EXECUTE format('TRUNCATE %s CASCADE', large);
  END IF;
  IF small IS NOT NULL THEN
    EXECUTE format('WITH %s SELECT 1', small);
  END IF;
END
$flush$
"""


@pytest.fixture(scope="session", autouse=True)
def quick_flush() -> Any:
    """Make Django's `flush`, and with it the end of every test that commits, quick."""

    def sql_flush(
        self: DatabaseOperations, style: Any, tables: Any, *, reset_sequences: bool = False, allow_cascade: bool = False
    ) -> list[str]:
        names = ", ".join(f"'{self.quote_name(table)}'" for table in sorted(set(tables) - KEPT))
        return [EMPTY.format(tables=names)] if names else []

    patch = pytest.MonkeyPatch()
    patch.setattr(DatabaseOperations, "sql_flush", sql_flush)
    patch.setattr(flush, "emit_post_migrate_signal", lambda *_: None)
    yield
    patch.undo()

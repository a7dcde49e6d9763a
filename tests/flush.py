"""A flush that takes milliseconds: most tests here commit, and Django would truncate every table after each of them.

TRUNCATE makes new files for each table and index, empty or not; here only what is large is truncated, and what has
rows is deleted. Content types and permissions, which no test changes, stay, so that they need not be made anew.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from django.db import connections
from django.test import TransactionTestCase

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
  size BIGINT;
  place INTEGER := 0;
BEGIN
  FOREACH name IN ARRAY wanted LOOP
    -- An empty file has no rows, and to ask for its size costs less than to ask for a row.
    size := pg_relation_size(name::regclass);
    CONTINUE WHEN size = 0;
    IF size > 500000 THEN
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


@cache
def _statement(alias: str) -> str:
    """Return the statement for all tables of a database; no test leaves another table behind."""
    tables = connections[alias].introspection.django_table_names(only_existing=True, include_views=False)
    quoted = (connections[alias].ops.quote_name(table) for table in sorted(set(tables) - KEPT))
    return EMPTY.format(tables=", ".join(f"'{table}'" for table in quoted))


def _empty(test: TransactionTestCase) -> None:
    for alias in test._databases_names(include_mirrors=False):  # type: ignore[attr-defined]
        with connections[alias].cursor() as cursor:
            cursor.execute(_statement(alias))


@pytest.fixture(scope="session", autouse=True)
def quick_flush() -> Any:
    """Make the end of every test that commits quick."""
    patch = pytest.MonkeyPatch()
    patch.setattr(TransactionTestCase, "_fixture_teardown", _empty)
    yield
    patch.undo()

"""Ten sources with credentials among a hundred thousand without: the others cost nothing, each time it looks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import connection

from kfs_credentials.backfill_worker import BackfillSummary
from kfs_credentials.batch import Move
from tests.backfill.runs import execute
from tests.factories import SourceFactory, add_bare_sources

pytestmark = pytest.mark.django_db(transaction=True)

READ = """
SELECT seq_tup_read + COALESCE(idx_tup_fetch, 0) FROM pg_stat_user_tables WHERE relname = 'sources'
"""


def rows_read() -> int:
    """Return how many rows of `sources` were read so far."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute(READ)
        return int(cursor.fetchone()[0])


def test_what_has_nothing_to_move_is_never_read(run: Callable[..., BackfillSummary]) -> None:
    add_bare_sources(100_000)
    SourceFactory.create_batch(10)
    execute("ANALYZE sources")
    before = rows_read()
    assert run().moves[Move.ACTIVATE] == 10
    moved = rows_read()
    assert run().moves == {}
    assert moved - before < 1_000, "those that are moved, a few times each"
    assert rows_read() - moved < 100, "next to nothing, when nothing is left"

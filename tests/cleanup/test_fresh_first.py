"""Fresh work is erased before confirmations, whatever their number, and no claim reads what it does not take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from kfs_credentials.cleanup import Cleanup
from kfs_credentials.models import RefState
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from tests.cleanup.rows import in_database
from tests.cleanup.runs import claim

pytestmark = pytest.mark.django_db(transaction=True)

TOMBSTONES, FRESH, BATCH = 100_000, 1_000, 500

INSERT = """
INSERT INTO source_secret_lifecycle_refs (
  id, tenant_id, knowledge_space_id, source_id, credential_ref, operation_id, purpose, state, recover_after,
  next_delete_at, deleted_at, delete_attempts, row_version, created_at, updated_at
)
SELECT gen_random_uuid(), 'tenant-a', gen_random_uuid(), gen_random_uuid(), 'source-secret:v1:' || gen_random_uuid(),
  'made-up', 'rotate', %s, now(), now() - interval '1 day' * %s - interval '1 ms' * n,
  CASE WHEN %s = 'deleted' THEN now() - interval '2 days' END, 0, 0, now(), now()
FROM generate_series(1, %s) n
"""

READ = """
SELECT COALESCE(sum(seq_tup_read + idx_tup_fetch), 0) FROM pg_stat_xact_user_tables
WHERE relname IN ('source_secret_lifecycle_refs', 'sources', 'source_credential_backfills')
"""


@pytest.fixture
def rows_read(steps: Cleanup) -> Iterator[list[int]]:
    """How many rows each of our short transactions has read, in order, from its first statement to its commit."""
    read: list[int] = []
    raw: Any = connection
    real, before = raw._commit, 0

    def count() -> int:
        with connection.cursor() as cursor:
            cursor.execute(READ)
            return int(cursor.fetchone()[0])

    def begin(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal before
        result = execute(sql, params, many, context)
        if sql.startswith("SET TRANSACTION"):
            before = count()
        return result

    def commit() -> None:
        read.append(count() - before)
        real()

    raw._commit = commit
    with connection.execute_wrapper(begin):
        yield read
    del raw._commit


def test_a_thousand_fresh_refs_behind_a_hundred_thousand_tombstones_come_first(
    steps: Cleanup, rows_read: list[int]
) -> None:
    in_database(INSERT, "deleted", 2, "deleted", TOMBSTONES)
    in_database(INSERT, "retired", 0, "retired", FRESH)
    in_database("ANALYZE source_secret_lifecycle_refs")
    rows_read.clear()
    claimed = [item.id for _ in range(FRESH // BATCH) for item in claim(steps, BATCH).items]
    assert len(set(claimed)) == FRESH
    assert not LedgerRow.objects.filter(state=RefState.RETIRED).exists(), "it was the fresh ones that were taken"
    assert LedgerRow.objects.filter(state=RefState.DELETED).count() == TOMBSTONES
    assert len(claim(steps, BATCH).items) == BATCH, "then the confirmations, a batch at a time too"
    assert len(rows_read) == 3, "a claim is one transaction"
    assert max(rows_read) <= 10 * BATCH, rows_read


def test_no_claim_reads_what_is_not_due(steps: Cleanup, rows_read: list[int]) -> None:
    in_database(INSERT, "retired", -2, "retired", 20_000)
    in_database(INSERT, "deleted", -2, "deleted", 20_000)
    in_database("ANALYZE source_secret_lifecycle_refs")
    rows_read.clear()
    assert steps.claim(BATCH) is None
    assert rows_read == [0]

"""Which rows are locked, in which order, and whose holders are waited for: by what is really sent to the server."""

from __future__ import annotations

import re

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Batch, Move
from kfs_credentials.models import RunState, SourceCredentialBackfill
from kfs_credentials.operations import RetryResult, retry_failed_jobs
from tests.factories import SourceFactory

pytestmark = pytest.mark.django_db(transaction=True)

LEDGER = ("source_secret_lifecycle_refs", "in id order", "waits")
JOBS = ("source_credential_backfills", "in id order", "waits for nobody")
SOURCES = ("sources", "in id order", "waits for nobody")


def locks(queries: CaptureQueriesContext) -> list[tuple[str, str, str]]:
    """Return the table of each statement that locks rows, whether it has an order, and whether it waits."""
    found = []
    for query in queries.captured_queries:
        statement = re.sub(r"--.*", "", query["sql"])
        if re.search(r"\bFOR (NO KEY )?UPDATE\b", statement):
            table = re.search(r'FROM "?(source\w*)', statement)
            assert table is not None, statement
            first = re.match(r'\s*SELECT (?:"?\w+"?\.)?"?(\w+)', statement)
            key = re.search(r'ORDER BY (?:"?\w+"?\.)?"?(\w+)"?(?: ASC)?\s', statement)
            # Django orders by the number of a column that is selected, where it can.
            in_id_order = key is not None and (first[1] if first and key[1] == "1" else key[1]) == "id"
            found.append(
                (
                    table[1],
                    "in id order" if in_id_order else "in another order",
                    "waits for nobody" if " SKIP LOCKED" in statement else "waits",
                )
            )
    return found


def put(steps: Backfill) -> Batch:
    SourceFactory.create_batch(3)
    batch = steps.discover(10)
    assert batch is not None
    steps.start_put(batch)
    steps.finish_put(batch)
    return batch


def test_settling_locks_ledger_rows_then_jobs_then_sources(steps: Backfill) -> None:
    batch = put(steps)
    with CaptureQueriesContext(connection) as queries:
        assert steps.settle(batch) == {Move.ACTIVATE: 3}
    assert locks(queries) == [LEDGER, JOBS, SOURCES]


def test_a_retry_by_an_operator_keeps_the_same_order(steps: Backfill) -> None:
    batch = put(steps)
    steps.release(batch)
    SourceCredentialBackfill.objects.update(run_state=RunState.FAILED, completed_at=timezone.now())
    with CaptureQueriesContext(connection) as queries:
        assert retry_failed_jobs("default", [(item.job_id, None) for item in batch.items]) == RetryResult(queued=3)
    assert locks(queries) == [LEDGER, JOBS, SOURCES]


def test_discovery_and_claim_wait_for_nobody(steps: Backfill) -> None:
    SourceFactory.create_batch(3)
    with CaptureQueriesContext(connection) as queries:
        batch = steps.discover(10)
    assert batch is not None
    assert locks(queries) == [SOURCES]
    steps.release(batch)
    with CaptureQueriesContext(connection) as queries:
        assert steps.claim(10) is not None
    assert {(table, waits) for table, _, waits in locks(queries)} == {(JOBS[0], "waits for nobody")}

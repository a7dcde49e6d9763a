"""Time is the database's: no statement carries a time that this process took from its own clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date, timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now

from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillSummary
from kfs_credentials.batch import Move
from kfs_credentials.models import RunState, Source, SourceCredentialBackfill, SourceSecretLifecycleRef
from kfs_credentials.operations import RetryResult, retry_failed_jobs
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.backfill.conftest import Change
from tests.factories import SourceFactory

pytestmark = pytest.mark.django_db(transaction=True)

Watch = Callable[[], list[str]]


def times(value: Any) -> Iterator[date]:
    """Yield the dates and times in the parameters of a statement."""
    if isinstance(value, date):  # a datetime is one
        yield value
    elif isinstance(value, dict):
        yield from times(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from times(one)


@pytest.fixture
def statements_with_times(transactional_db: None) -> Iterator[list[str]]:
    """Every statement with a date or time among its parameters, from here on."""
    found: list[str] = []

    def watch(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if list(times(params)):
            found.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(watch):
        yield found


def test_the_watch_sees_a_time_that_is_passed(statements_with_times: list[str]) -> None:
    SourceFactory.create()
    assert any('INSERT INTO "sources"' in sql for sql in statements_with_times)


def test_a_job_and_its_lease_get_no_time_from_the_worker(
    steps: Backfill, store: EncryptedStore, kfs_settings: Change, statements_with_times: list[str]
) -> None:
    kfs_settings(RETRY_BASE=0, MAX_ATTEMPTS=2)
    sources = SourceFactory.create_batch(4)
    statements_with_times.clear()
    batch = steps.discover(10)
    assert batch is not None
    steps.release(batch)
    batch = steps.claim(10)
    assert batch is not None
    batch.lease.confirmed_at -= 30
    steps.renew(batch)
    steps.start_put(batch)
    steps.finish_put(batch)
    moved, changed, left, failing = batch.items
    with connection.cursor() as cursor:
        cursor.execute("UPDATE sources SET metadata = %s WHERE id = %s", ['{"credentials": {}}', changed.source_id])
        cursor.execute("UPDATE sources SET metadata = '{}' WHERE id = %s", [left.source_id])
    SourceSecretLifecycleRef.objects.filter(credential_ref=failing.ref).delete()
    assert steps.settle(batch) == {Move.ACTIVATE: 1, Move.REFRESH: 1, Move.ABANDON: 1, Move.FAIL: 1}
    assert retry_failed_jobs("default", [(failing.job_id, None)]) == RetryResult(queued=1)
    assert steps.claim(10) is not None
    assert statements_with_times == []
    assert Source.objects.get(pk=moved.source_id).version == sources[0].version + 1


def test_what_is_due_and_what_has_run_out_is_for_the_database_to_say(
    steps: Backfill,
    new_steps: Callable[..., Backfill],
    run: Callable[..., BackfillSummary],
    statements_with_times: list[str],
) -> None:
    SourceFactory.create_batch(2)
    expired, delayed = new_steps().discover(1), steps.discover(10)
    assert expired is not None
    assert delayed is not None
    jobs = SourceCredentialBackfill.objects
    jobs.filter(pk=expired.items[0].job_id).update(lease_expires_at=Now() - timedelta(seconds=1))
    steps.release(delayed)
    jobs.filter(pk=delayed.items[0].job_id).update(retry_count=1, updated_at=Now() - timedelta(seconds=10))
    statements_with_times.clear()
    assert run().moves == {Move.ACTIVATE: 2}
    assert statements_with_times == []
    assert set(jobs.values_list("run_state", flat=True)) == {RunState.SUCCEEDED}

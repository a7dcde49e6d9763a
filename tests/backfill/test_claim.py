"""Claims: whose jobs are taken, in which groups, and who is blamed for a crash."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.utils import timezone

from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Move, Put
from kfs_credentials.errors import LeaseLost
from kfs_credentials.models import JobError, RunState, Source, SourceCredentialBackfill, SourceSecretLifecycleRef
from tests.backfill.conftest import Change, Files, Other
from tests.factories import SourceFactory

pytestmark = pytest.mark.django_db(transaction=True)


def claimed(steps: Backfill, limit: int = 10) -> list[uuid.UUID]:
    batch = steps.claim(limit)
    return [] if batch is None else [item.source_id for item in batch.items]


def queue(steps: Backfill, number: int) -> list[uuid.UUID]:
    """Make that many sources with queued jobs, oldest first."""
    batch = None
    for place in range(number):
        source = SourceFactory.create(id=uuid.UUID(int=place + 1))
        batch = steps.discover(1)
        assert batch is not None
        steps.release(batch)
        age = timedelta(minutes=number - place)
        SourceCredentialBackfill.objects.filter(source=source).update(updated_at=Now() - age)
    return [uuid.UUID(int=place + 1) for place in range(number)]


def crash(**fields: Any) -> None:
    """Let every lease run out, as if its worker had died."""
    SourceCredentialBackfill.objects.filter(run_state=RunState.RUNNING).update(
        lease_expires_at=Now() - timedelta(seconds=1), **fields
    )


def test_oldest_first_and_never_twice(steps: Backfill, new_steps: Callable[..., Backfill]) -> None:
    sources = queue(steps, 5)
    assert claimed(steps, 2) == sources[:2]
    assert claimed(new_steps(worker="another"), 9) == sources[2:]
    assert claimed(steps, 9) == []
    tokens = set(SourceCredentialBackfill.objects.values_list("lease_token", flat=True))
    assert len(tokens) == 2


def test_a_claim_is_a_move_with_a_fresh_token(steps: Backfill) -> None:
    queue(steps, 1)
    before = SourceCredentialBackfill.objects.get()
    batch = steps.claim(10)
    after = SourceCredentialBackfill.objects.get()
    assert batch is not None
    assert (after.run_state, after.lease_token, after.row_version) == (
        "running",
        batch.lease.token,
        before.row_version + 1,
    )
    assert after.lease_expires_at is not None
    assert after.heartbeat_at is not None
    assert after.lease_expires_at - after.heartbeat_at == timedelta(seconds=60)
    assert (after.retry_count, after.worker_id) == (0, "tests#1")


def test_a_job_that_somebody_has_locked_is_passed_over(steps: Backfill, other: Other) -> None:
    sources = queue(steps, 3)
    other.execute("SELECT FROM source_credential_backfills WHERE source_id = %s FOR UPDATE", [sources[0]])
    assert claimed(steps) == sources[1:]


def test_a_retry_is_not_due_before_its_delay_is_over(steps: Backfill) -> None:
    sources = queue(steps, 3)
    jobs = SourceCredentialBackfill.objects
    for source, retries, age in ((sources[0], 1, 9), (sources[1], 2, 21), (sources[2], 30, 599)):
        jobs.filter(source_id=source).update(retry_count=retries, updated_at=Now() - timedelta(seconds=age))
    assert claimed(steps) == [sources[1]]
    jobs.filter(source_id=sources[0]).update(updated_at=Now() - timedelta(seconds=10))
    jobs.filter(source_id=sources[2]).update(updated_at=Now() - timedelta(seconds=600))
    assert claimed(steps) == [sources[2], sources[0]]


def test_no_delay_where_the_settings_say_none(steps: Backfill, kfs_settings: Change) -> None:
    sources = queue(steps, 1)
    SourceCredentialBackfill.objects.update(retry_count=4, updated_at=Now())
    assert claimed(steps) == []
    kfs_settings(RETRY_BASE=0, RETRY_MAX=0)
    assert claimed(steps) == sources


def test_crashed_groups_shrink_until_a_row_is_alone_and_only_then_is_it_blamed(steps: Backfill) -> None:
    sources = queue(steps, 8)
    assert claimed(steps) == sources
    sizes = []
    for _ in range(6):
        crash()
        sizes.append(len(claimed(steps)))
    assert sizes == [4, 2, 1, 1, 1, 1]
    assert sorted(SourceCredentialBackfill.objects.values_list("retry_count", flat=True)) == [0] * 7 + [3]


def test_the_rest_of_a_crashed_group_is_claimed_next_and_blamed_for_nothing(steps: Backfill) -> None:
    sources = queue(steps, 5)
    claimed(steps)
    crash()
    groups = [claimed(steps) for _ in range(4)]
    assert [len(group) for group in groups] == [2, 2, 1, 0]
    assert sorted(source for group in groups for source in group) == sources
    assert set(SourceCredentialBackfill.objects.values_list("retry_count", flat=True)) == {0}


def test_after_too_many_crashes_alone_the_job_fails_and_its_candidate_is_retired(
    steps: Backfill, kfs_settings: Change, files: Files
) -> None:
    queue(steps, 1)
    kfs_settings(MAX_ATTEMPTS=2)
    batch = steps.claim(10)
    for attempt in (1, 2):
        crash()
        batch = steps.claim(10)
        assert batch is not None
        assert (batch.items[0].retry_count, batch.items[0].put is Put.FAILED) == (attempt, attempt == 2)
    assert batch is not None
    steps.start_put(batch)
    steps.finish_put(batch)
    assert steps.settle(batch) == {Move.FAIL: 1}
    job = SourceCredentialBackfill.objects.get()
    assert (job.run_state, job.last_error_code) == (RunState.FAILED, JobError.WORKER_LOST)
    assert SourceSecretLifecycleRef.objects.get().state == "retired"
    assert files() == []
    assert Source.objects.legacy().count() == 1


def test_a_worker_that_does_not_say_how_many_it_had_is_taken_to_have_had_one(steps: Backfill) -> None:
    """The Node service claims one job at a time, and its worker ids are its own."""
    queue(steps, 2)
    claimed(steps)
    crash(worker_id="knowledge-fs-worker-7", lease_token=uuid.uuid4())
    assert len(claimed(steps)) == 1
    assert sorted(SourceCredentialBackfill.objects.values_list("retry_count", flat=True)) == [0, 1]


def test_jobs_of_what_is_being_deleted_wait_and_block_nobody(steps: Backfill) -> None:
    sources = queue(steps, 3)
    Source.objects.filter(pk=sources[0]).update(status="deleting")
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE deletion_jobs (target_id uuid, active_slot int)")
        cursor.execute("INSERT INTO deletion_jobs VALUES (%s, 1), (%s, NULL)", [sources[1], sources[2]])
    try:
        assert claimed(steps) == [sources[2]]
        with connection.cursor() as cursor:
            cursor.execute("UPDATE deletion_jobs SET active_slot = NULL")
        assert claimed(steps) == [sources[1]]
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE deletion_jobs")
    assert SourceCredentialBackfill.objects.get(source_id=sources[0]).run_state == RunState.QUEUED


def test_a_candidate_reserved_for_another_value_is_not_put(steps: Backfill, files: Files) -> None:
    (source,) = queue(steps, 1)
    Source.objects.filter(pk=source).update(metadata={"credentials": {"token": "changed meanwhile"}})
    batch = steps.claim(10)
    assert batch is not None
    old = batch.items[0].ref
    steps.start_put(batch)
    steps.finish_put(batch)
    assert files() == []
    assert steps.settle(batch) == {Move.REFRESH: 1}
    job = SourceCredentialBackfill.objects.get()
    assert (job.run_state, job.retry_count) == (RunState.QUEUED, 1)
    assert job.candidate_credential_ref != old
    states = dict(SourceSecretLifecycleRef.objects.values_list("credential_ref", "state"))
    assert states == {old: "retired", job.candidate_credential_ref: "candidate"}


def test_renewal_extends_what_is_still_ours_and_nothing_else(
    steps: Backfill, new_steps: Callable[..., Backfill]
) -> None:
    queue(steps, 2)
    batch, theirs = steps.claim(1), new_steps(worker="another").claim(1)
    assert batch is not None
    assert theirs is not None
    SourceCredentialBackfill.objects.update(lease_expires_at=Now() + timedelta(seconds=5), heartbeat_at=Now())
    batch.lease.confirmed_at -= 30
    steps.renew(batch)
    left = {
        token: expires - timezone.now()
        for token, expires in SourceCredentialBackfill.objects.values_list("lease_token", "lease_expires_at")
        if expires is not None
    }
    assert left[batch.lease.token] > timedelta(seconds=50)
    assert left[theirs.lease.token] < timedelta(seconds=6)
    assert batch.lease.remaining > 50


def test_a_lease_that_ran_out_is_not_renewed(steps: Backfill) -> None:
    queue(steps, 1)
    batch = steps.claim(1)
    assert batch is not None
    crash()
    batch.lease.confirmed_at -= 61
    with pytest.raises(LeaseLost, match="the lease ran out"):
        steps.renew(batch)
    assert SourceCredentialBackfill.objects.expired().count() == 1


def test_a_claim_whose_answer_was_lost_is_given_back_and_not_taken_for_a_crash(steps: Backfill) -> None:
    sources = queue(steps, 1)
    batch = steps.claim(1)
    assert batch is not None
    steps.leases._taking = batch.lease  # as it is when the connection broke in the commit
    assert claimed(steps) == sources
    assert SourceCredentialBackfill.objects.get().retry_count == 0

"""What a worker that has lost its jobs, or whose jobs are over, may still write: nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.db.models.functions import Now

from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Batch
from kfs_credentials.errors import LeaseLost
from kfs_credentials.models import RefState, SourceCredentialBackfill, SourceSecretLifecycleRef
from tests.backfill.conftest import Files
from tests.factories import SourceFactory
from tests.management.rows import table_contents

pytestmark = pytest.mark.django_db(transaction=True)

NOT_LEASED = dict.fromkeys(("worker_id", "lease_token", "lease_expires_at", "heartbeat_at"))


def leased(steps: Backfill) -> Batch:
    SourceFactory.create()
    batch = steps.discover(1)
    assert batch is not None
    return batch


def put(steps: Backfill, batch: Batch) -> None:
    steps.start_put(batch)
    steps.finish_put(batch)


@pytest.mark.parametrize("state", ["queued", "succeeded", "failed"])
def test_a_job_that_is_not_running_any_more_is_left_as_it_is(steps: Backfill, state: str) -> None:
    batch = leased(steps)
    put(steps, batch)
    over: dict[str, Any] = {"completed_at": None if state == "queued" else Now()}
    SourceCredentialBackfill.objects.update(run_state=state, **NOT_LEASED, **over)
    if state == "failed":
        SourceSecretLifecycleRef.objects.update(state=RefState.RETIRED, next_delete_at=Now())
    before = table_contents()
    assert steps.settle(batch) == {}
    assert steps.release(batch) == 0
    assert table_contents() == before


def test_a_renewal_is_no_move(steps: Backfill) -> None:
    batch = leased(steps)
    before = SourceCredentialBackfill.objects.get()
    batch.lease.confirmed_at -= 30
    steps.renew(batch)
    after = SourceCredentialBackfill.objects.get()
    assert before.lease_expires_at is not None
    assert after.lease_expires_at is not None
    assert after.lease_expires_at > before.lease_expires_at
    assert (after.row_version, after.lease_token, after.updated_at) == (
        before.row_version,
        before.lease_token,
        before.updated_at,
    )


def test_nothing_is_renewed_and_nothing_put_once_another_worker_has_the_jobs(steps: Backfill, files: Files) -> None:
    batch = leased(steps)
    SourceCredentialBackfill.objects.update(lease_token=uuid.uuid4(), worker_id="another#1")
    before = table_contents()
    batch.lease.confirmed_at -= 30
    steps.renew(batch)  # no row is this lease's: its own watch runs on, as nothing has confirmed it
    assert batch.lease.remaining <= 30
    batch.lease.confirmed_at -= 31
    with pytest.raises(LeaseLost, match="another worker takes over"):
        steps.renew(batch)
    with pytest.raises(LeaseLost):
        put(steps, batch)
    assert table_contents() == before
    assert files() == []


def test_a_worker_that_comes_too_late_finds_its_jobs_taken(
    steps: Backfill, new_steps: Callable[..., Backfill], files: Files
) -> None:
    late = leased(steps)
    SourceCredentialBackfill.objects.update(lease_expires_at=Now())
    taken = new_steps(worker="another").claim(10)
    assert taken is not None
    put(steps, late)  # by its own watch its lease holds still: the same secret at the same address
    assert steps.settle(late) == {}
    another = new_steps(worker="another")
    put(another, taken)
    assert another.settle(taken).total() == 1
    assert len(files()) == 1

"""Jobs whose credentials are not there to be put any more, or are stored already: what is in the store stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db.models.functions import Now

from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillSummary
from kfs_credentials.batch import Move
from kfs_credentials.models import RefState, RunState, Source, SourceCredentialBackfill, SourceSecretLifecycleRef
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.backfill.conftest import Files
from tests.backfill.runs import VALUE, claim_and_put, execute, only_job, waiting
from tests.factories import SourceFactory

pytestmark = pytest.mark.django_db(transaction=True)


# Nothing is left to move.


@pytest.mark.parametrize("by_now", ["another ref", "no credentials", "an array", "null"])
def test_nothing_is_put_and_the_job_succeeds(steps: Backfill, files: Files, by_now: str) -> None:
    item = waiting(steps)
    execute(
        {
            "another ref": "UPDATE sources SET credential_ref = 'somebody-elses', metadata = '{}' WHERE id = %s",
            "no credentials": "UPDATE sources SET metadata = metadata - 'credentials' WHERE id = %s",
            "an array": "UPDATE sources SET metadata = '{\"credentials\": [1]}' WHERE id = %s",
            "null": "UPDATE sources SET metadata = '{\"credentials\": null}' WHERE id = %s",
        }[by_now],
        item.source_id,
    )
    before = Source.objects.values().get()
    assert steps.settle(claim_and_put(steps)) == {Move.ABANDON: 1}
    assert files() == []
    assert only_job().run_state == RunState.SUCCEEDED
    assert SourceSecretLifecycleRef.objects.get().state == RefState.RETIRED
    assert Source.objects.values().get() == before


def test_a_source_that_is_gone_leaves_no_job_to_claim(steps: Backfill, files: Files) -> None:
    waiting(steps)
    Source.objects.all().delete()
    assert steps.claim(10) is None
    assert files() == []


def test_credentials_that_come_back_before_the_job_ends_are_moved(
    steps: Backfill, run: Callable[..., BackfillSummary], store: EncryptedStore
) -> None:
    item = waiting(steps)
    execute("UPDATE sources SET metadata = '{}' WHERE id = %s", item.source_id)
    batch = claim_and_put(steps)
    execute("UPDATE sources SET metadata = %s WHERE id = %s", '{"credentials": {"token": "new"}}', item.source_id)
    assert steps.settle(batch) == {Move.RELEASE: 1}
    assert only_job().run_state == RunState.QUEUED
    # The candidate was reserved for the value of before: the new one gets a candidate of its own.
    assert steps.settle(claim_and_put(steps)) == {Move.REFRESH: 1}
    assert only_job().secret_fingerprint != item.fingerprint
    SourceCredentialBackfill.objects.update(updated_at=Now() - timedelta(minutes=5))
    assert run().moves == {Move.ACTIVATE: 1}
    ref = Source.objects.get().credential_ref
    assert ref is not None
    assert ref != item.ref
    assert store.get(item.scope, ref) == {"token": "new"}


# The secret is in the store already.


@pytest.mark.parametrize("legacy", [False, True], ids=["scrubbed", "written again"])
def test_a_candidate_that_is_in_use_is_not_written_again(
    steps: Backfill, store: EncryptedStore, files: Files, legacy: bool
) -> None:
    item = waiting(steps)
    store.put(item.scope, item.ref, VALUE)
    metadata = {"credentials": VALUE} if legacy else {}
    execute(
        "UPDATE sources SET credential_ref = %s, metadata = %s, version = 4 WHERE id = %s",
        item.ref,
        json.dumps(metadata),
        item.source_id,
    )
    SourceSecretLifecycleRef.objects.update(state=RefState.ACTIVE, source_version=4)
    before = [(path, path.read_bytes(), path.stat().st_ctime_ns) for path in files()]
    assert steps.settle(claim_and_put(steps)) == {Move.ADOPT: 1}
    assert [(path, path.read_bytes(), path.stat().st_ctime_ns) for path in files()] == before
    ref, source = SourceSecretLifecycleRef.objects.get(), Source.objects.get()
    assert (ref.state, ref.source_version, ref.row_version) == (RefState.ACTIVE, 4, 0)
    assert (source.credential_ref, source.metadata, source.version) == (item.ref, metadata, 4)
    assert (only_job().run_state, only_job().last_error_code) == (RunState.SUCCEEDED, None)


def test_a_candidate_in_use_whose_object_is_missing_is_put_while_its_credentials_are_there(
    steps: Backfill, store: EncryptedStore
) -> None:
    item = waiting(steps)
    execute("UPDATE sources SET credential_ref = %s WHERE id = %s", item.ref, item.source_id)
    SourceSecretLifecycleRef.objects.update(state=RefState.ACTIVE)
    assert steps.settle(claim_and_put(steps)) == {Move.ADOPT: 1}
    assert store.get(item.scope, item.ref) == VALUE


# Nothing is ever erased.


def test_no_move_of_the_backfill_erases_an_object(
    steps: Backfill, run: Callable[..., BackfillSummary], store: EncryptedStore, files: Files
) -> None:
    """A worker that is late may still name what it put: erasing is for the cleanup, after a grace."""
    SourceFactory.create_batch(4, credentials=VALUE)
    batch = steps.discover(4)
    assert batch is not None
    changed, abandoned, conflict, moved = batch.items
    store.put(conflict.scope, conflict.ref, {"token": "there first"})
    steps.start_put(batch)
    steps.finish_put(batch)
    before = files()
    assert len(before) == 4
    execute('UPDATE sources SET metadata = \'{"credentials": {"n": 2}}\' WHERE id = %s', changed.source_id)
    execute("UPDATE sources SET metadata = '{}' WHERE id = %s", abandoned.source_id)
    assert steps.settle(batch) == {Move.REFRESH: 1, Move.ABANDON: 1, Move.FAIL: 1, Move.ACTIVATE: 1}
    SourceCredentialBackfill.objects.update(updated_at=Now() - timedelta(minutes=5))
    assert run().moves == {Move.ACTIVATE: 1}
    assert set(before) < set(files())
    assert len(files()) == 5
    retired = SourceSecretLifecycleRef.objects.filter(state=RefState.RETIRED, next_delete_at__gt=Now())
    assert set(retired.values_list("credential_ref", flat=True)) == {changed.ref, abandoned.ref, conflict.ref}
    assert Source.objects.get(pk=moved.source_id).credential_ref == moved.ref

"""Put and settle: what is written, in all three tables or in none, and what happens to whoever came between."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection
from django.db.models.functions import Now

from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillSummary
from kfs_credentials.batch import Batch, Move
from kfs_credentials.crypto import Scope
from kfs_credentials.errors import LeaseLost, StoreUnavailable
from kfs_credentials.models import (
    JobError,
    RefState,
    RunState,
    SecretObject,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.backfill.conftest import Change, Files, Other
from tests.factories import SourceFactory

pytestmark = pytest.mark.django_db(transaction=True)


def put(steps: Backfill, batch: Batch | None = None) -> Batch:
    """Discover what there is and put it."""
    batch = batch or steps.discover(100)
    assert batch is not None
    steps.start_put(batch)
    steps.finish_put(batch)
    return batch


def execute(sql: str, *parameters: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)


def raw_metadata(source: Source) -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT metadata::text FROM sources WHERE id = %s", [source.pk])
        return str(cursor.fetchone()[0])


def only_job() -> SourceCredentialBackfill:
    return SourceCredentialBackfill.objects.get()


def states() -> list[str]:
    return sorted(SourceSecretLifecycleRef.objects.values_list("state", flat=True))


# Activation.


def test_source_ledger_and_job_move_together(steps: Backfill, store: EncryptedStore) -> None:
    source = SourceFactory.create(credentials={"token": "made-up"}, version=7)
    assert steps.settle(put(steps)) == {Move.ACTIVATE: 1}
    moved, job, ref = Source.objects.get(), only_job(), SourceSecretLifecycleRef.objects.get()
    assert (moved.credential_ref, moved.metadata, moved.version) == (ref.credential_ref, {"title": "Handbook"}, 8)
    assert moved.updated_at > source.updated_at
    assert (ref.state, ref.source_version, ref.row_version) == (RefState.ACTIVE, 8, 1)
    assert (job.run_state, job.lease_token, job.worker_id) == (RunState.SUCCEEDED, None, None)
    assert job.completed_at is not None
    assert store.get(Scope("tenant-a", source.knowledge_space_id, source.pk), ref.credential_ref) == {
        "token": "made-up"
    }


def test_only_that_one_key_leaves_metadata_and_everything_else_keeps_every_digit(steps: Backfill) -> None:
    source = SourceFactory.create()
    text = (
        '{"n": 9007199254740993, "big": 1e400, "d": 1.50, "nextPageToken": "t", "api_key": "k", '
        '"Credentials": {"a": 1}, "nested": {"credentials": {"b": 2}}, "list": ["credentials", "a"], '
        '"credentials": {"token": "x"}}'
    )
    execute("UPDATE sources SET metadata = %s WHERE id = %s", text, source.pk)
    before = raw_metadata(source)
    steps.settle(put(steps))
    assert raw_metadata(source) == before.replace('"credentials": {"token": "x"}, ', "").replace(
        ', "credentials": {"token": "x"}', ""
    )
    assert "9007199254740993" in raw_metadata(source)


def test_what_a_user_changed_meanwhile_stays(steps: Backfill) -> None:
    source = SourceFactory.create()
    batch = put(steps)
    execute(
        "UPDATE sources SET metadata = metadata || %s, version = version + 1, name = 'Renamed' WHERE id = %s",
        '{"title": "New", "more": 1}',
        source.pk,
    )
    assert steps.settle(batch) == {Move.ACTIVATE: 1}
    moved = Source.objects.get()
    assert (moved.metadata, moved.name, moved.version) == ({"title": "New", "more": 1}, "Renamed", 3)


def test_a_second_settling_finds_nothing_of_its_own(steps: Backfill) -> None:
    SourceFactory.create()
    batch = put(steps)
    steps.settle(batch)
    versions = Source.objects.get().version, only_job().row_version
    assert steps.settle(batch) == {}
    assert (Source.objects.get().version, only_job().row_version) == versions
    assert steps.moved(batch) == 1


def test_what_is_known_of_the_object_is_corrected_by_the_receipt(steps: Backfill, store: EncryptedStore) -> None:
    SourceFactory.create()
    batch = put(steps)
    SecretObject.objects.update(key_id="0" * 16, size=1)
    steps.settle(batch)
    thing, item = SecretObject.objects.get(), batch.items[0]
    assert item.receipt is not None
    assert (thing.key_id, thing.size) == (item.receipt.key_id, item.receipt.size)


# Somebody came between.


def test_changed_credentials_are_never_activated(
    steps: Backfill, run: Callable[..., BackfillSummary], store: EncryptedStore
) -> None:
    source = SourceFactory.create(credentials={"token": "old"})
    batch = put(steps)
    old = batch.items[0].ref
    execute(
        "UPDATE sources SET metadata = jsonb_set(metadata, '{credentials,token}', '\"new\"') WHERE id = %s", source.pk
    )
    assert steps.settle(batch) == {Move.REFRESH: 1}
    job = only_job()
    assert (job.run_state, job.retry_count) == (RunState.QUEUED, 1)
    assert Source.objects.get().credential_ref is None
    retired = SourceSecretLifecycleRef.objects.get(credential_ref=old)
    assert (retired.state, retired.last_error_code) == (RefState.RETIRED, "SOURCE_CREDENTIALS_CHANGED")
    assert retired.next_delete_at is not None
    SourceCredentialBackfill.objects.update(updated_at=Now() - timedelta(minutes=5))
    run()
    ref = Source.objects.get().credential_ref
    assert ref == job.candidate_credential_ref != old
    assert store.get(Scope("tenant-a", source.knowledge_space_id, source.pk), ref) == {"token": "new"}


def test_a_source_that_never_holds_still_fails_in_the_end(steps: Backfill, kfs_settings: Change) -> None:
    source = SourceFactory.create()
    kfs_settings(MAX_ATTEMPTS=3, RETRY_BASE=0, RETRY_MAX=0)
    moves: list[Move] = []
    for number in range(3):
        batch = put(steps, steps.claim(1) or steps.discover(1))
        execute("UPDATE sources SET metadata = %s WHERE id = %s", json.dumps({"credentials": {"n": number}}), source.pk)
        moves.append(*steps.settle(batch))
    assert moves == [Move.REFRESH, Move.REFRESH, Move.FAIL]
    assert (only_job().last_error_code, only_job().last_error_message) == (
        JobError.UNSTABLE,
        "The credentials changed during every attempt.",
    )
    assert states() == ["retired"] * 3
    assert Source.objects.legacy().count() == 1


@pytest.mark.parametrize(
    "between", ["a ref", "no credentials", "an array", "null", "metadata: names", "metadata: a name"]
)
def test_where_nothing_is_left_to_move_the_job_ends_and_the_candidate_is_retired(steps: Backfill, between: str) -> None:
    source = SourceFactory.create()
    batch = put(steps)
    execute(
        {
            "a ref": "UPDATE sources SET credential_ref = 'somebody-elses' WHERE id = %s",
            "no credentials": "UPDATE sources SET metadata = '{}' WHERE id = %s",
            "an array": "UPDATE sources SET metadata = '{\"credentials\": [1]}' WHERE id = %s",
            "null": "UPDATE sources SET metadata = '{\"credentials\": null}' WHERE id = %s",
            # `jsonb - 'credentials'` would take that element out of the one, and raise at the other.
            "metadata: names": 'UPDATE sources SET metadata = \'["credentials", "a"]\' WHERE id = %s',
            "metadata: a name": "UPDATE sources SET metadata = '\"credentials\"' WHERE id = %s",
        }[between],
        source.pk,
    )
    before = Source.objects.values().get()
    assert steps.settle(batch) == {Move.ABANDON: 1}
    assert Source.objects.values().get() == before
    assert (only_job().run_state, only_job().last_error_code) == (RunState.SUCCEEDED, None)
    assert states() == [RefState.RETIRED]


def test_a_source_that_is_gone_took_its_job_along(steps: Backfill) -> None:
    source = SourceFactory.create()
    batch = put(steps)
    source.delete()
    assert steps.settle(batch) == {}
    assert SourceCredentialBackfill.objects.count() == 0
    # The candidate outlives it: whoever sweeps finds it past its recover_after.
    assert states() == [RefState.CANDIDATE]


def test_a_source_that_names_the_candidate_already_is_taken_as_it_is(steps: Backfill) -> None:
    source = SourceFactory.create()
    batch = put(steps)
    execute("UPDATE sources SET credential_ref = %s, version = 9 WHERE id = %s", batch.items[0].ref, source.pk)
    assert steps.settle(batch) == {Move.ADOPT: 1}
    ref = SourceSecretLifecycleRef.objects.get()
    assert (ref.state, ref.source_version, ref.next_delete_at) == (RefState.ACTIVE, 9, None)
    assert only_job().run_state == RunState.SUCCEEDED
    assert Source.objects.referenced().get().metadata["credentials"] == source.metadata["credentials"]


def test_a_locked_source_is_passed_over_and_comes_again(
    steps: Backfill, other: Other, run: Callable[..., BackfillSummary]
) -> None:
    held, free = SourceFactory.create(), SourceFactory.create()
    batch = put(steps)
    other.execute("SELECT FROM sources WHERE id = %s FOR UPDATE", [held.pk])
    assert steps.settle(batch) == {Move.ACTIVATE: 1, Move.RELEASE: 1}
    assert Source.objects.get(pk=free.pk).credential_ref is not None
    assert SourceCredentialBackfill.objects.get(source=held).run_state == RunState.QUEUED
    other.rollback()
    assert run().moves == {Move.ACTIVATE: 1}
    assert SourceCredentialBackfill.objects.get(source=held).retry_count == 0


# The ledger.


@pytest.mark.parametrize("state", ["retired", "deleting", "deleted", "active"])
def test_a_candidate_that_cannot_be_used_is_replaced(steps: Backfill, state: str) -> None:
    SourceFactory.create()
    batch = put(steps)
    lease = "'w', gen_random_uuid(), now(), now()" if state == "deleting" else "NULL, NULL, NULL, NULL"
    execute(
        "UPDATE source_secret_lifecycle_refs SET state = %s, deleted_at = %s, "
        f"(worker_id, lease_token, lease_expires_at, heartbeat_at) = ({lease})",
        state,
        "2026-01-01T00:00:00Z" if state == "deleted" else None,
    )
    assert steps.settle(batch) == {Move.REFRESH: 1}
    assert states() == sorted([state, "candidate"])


def test_without_its_ledger_row_the_job_fails(steps: Backfill) -> None:
    SourceFactory.create()
    batch = put(steps)
    SourceSecretLifecycleRef.objects.all().delete()
    assert steps.settle(batch) == {Move.FAIL: 1}
    assert only_job().last_error_code == JobError.LEDGER_MISSING


def test_a_ledger_row_of_another_source_does_not_count(steps: Backfill) -> None:
    SourceFactory.create()
    batch = put(steps)
    SourceSecretLifecycleRef.objects.update(source_id=uuid.uuid4())
    assert steps.settle(batch) == {Move.FAIL: 1}
    assert states() == [RefState.CANDIDATE]


# The fence.


def test_rows_of_another_worker_are_left_alone_and_the_rest_goes_on(steps: Backfill) -> None:
    lost, ours = SourceFactory.create(), SourceFactory.create()
    batch = put(steps)
    SourceCredentialBackfill.objects.filter(source=lost).update(lease_token=uuid.uuid4())
    assert steps.settle(batch) == {Move.ACTIVATE: 1}
    assert Source.objects.get(pk=lost.pk).credential_ref is None
    assert Source.objects.get(pk=ours.pk).credential_ref is not None


def test_a_lease_that_the_database_calls_expired_writes_nothing(steps: Backfill) -> None:
    SourceFactory.create()
    batch = put(steps)
    SourceCredentialBackfill.objects.update(lease_expires_at=Now() - timedelta(milliseconds=1))
    assert steps.settle(batch) == {}
    assert Source.objects.get().credential_ref is None


def test_a_lease_that_this_worker_no_longer_believes_in_is_rolled_back(steps: Backfill) -> None:
    SourceFactory.create()
    batch = put(steps)
    batch.lease.confirmed_at -= 61
    with pytest.raises(LeaseLost):
        steps.settle(batch)
    assert Source.objects.get().credential_ref is None
    assert only_job().run_state == RunState.RUNNING


def test_a_job_with_another_candidate_by_now_is_another_job(steps: Backfill) -> None:
    SourceFactory.create()
    batch = put(steps)
    SourceCredentialBackfill.objects.update(candidate_credential_ref=f"source-secret:v1:{uuid.uuid4()}")
    assert steps.settle(batch) == {}


def test_nothing_becomes_visible_in_the_store_once_the_lease_is_lost(steps: Backfill, files: Files) -> None:
    SourceFactory.create()
    batch = steps.discover(10)
    assert batch is not None
    batch.lease.confirmed_at -= 61
    steps.start_put(batch)
    with pytest.raises(LeaseLost):
        steps.finish_put(batch)
    assert files() == []


# One bad row.


@pytest.fixture
def rejecting_trigger(request: pytest.FixtureRequest) -> Any:
    """A host's trigger that keeps the row named 'bad' from being changed."""
    execute(
        "CREATE FUNCTION reject() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF OLD.name = 'bad' THEN {request.param} END IF; RETURN NEW; END $$"
    )
    execute("CREATE TRIGGER reject BEFORE UPDATE ON sources FOR EACH ROW EXECUTE FUNCTION reject()")
    yield
    execute("DROP FUNCTION reject CASCADE")


@pytest.mark.parametrize(
    "rejecting_trigger",
    ["RAISE EXCEPTION 'no: %%', OLD.metadata;", "RETURN NULL;", "PERFORM 1 / 0;"],
    indirect=True,
    ids=["raises", "skips the row", "data error"],
)
def test_a_row_that_the_database_rejects_fails_alone(steps: Backfill, rejecting_trigger: None) -> None:
    sources = [SourceFactory.create(name="bad" if place == 5 else "good") for place in range(9)]
    assert steps.settle(put(steps)) == {Move.ACTIVATE: 8, Move.FAIL: 1}
    job = SourceCredentialBackfill.objects.failed().get()
    assert (job.source_id, job.last_error_code) == (sources[5].pk, JobError.ROW_REJECTED)
    assert job.last_error_message == "The database refused the change to this source (a constraint or trigger)."
    assert Source.objects.get(name="bad").metadata == sources[5].metadata
    assert states() == ["active"] * 8 + ["retired"]


def test_an_error_that_is_not_about_a_row_blames_no_row(steps: Backfill) -> None:
    SourceFactory.create()
    batch = put(steps)
    execute("ALTER TABLE sources RENAME COLUMN credential_ref TO hidden")
    try:
        with pytest.raises(DatabaseError):
            steps.settle(batch)
    finally:
        execute("ALTER TABLE sources RENAME COLUMN hidden TO credential_ref")
    assert only_job().run_state == RunState.RUNNING
    assert steps.settle(batch) == {Move.ACTIVATE: 1}


def test_a_constraint_that_speaks_only_at_the_commit_is_heard_before_it(steps: Backfill) -> None:
    sources = [SourceFactory.create(name="bad" if place == 2 else "good") for place in range(5)]
    batch = put(steps)
    execute(
        "CREATE FUNCTION reject() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.name = 'bad' THEN RAISE EXCEPTION 'no'; END IF; RETURN NULL; END $$"
    )
    execute(
        "CREATE CONSTRAINT TRIGGER reject AFTER UPDATE ON sources DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION reject()"
    )
    try:
        assert steps.settle(batch) == {Move.ACTIVATE: 4, Move.FAIL: 1}
    finally:
        execute("DROP FUNCTION reject CASCADE")
    assert SourceCredentialBackfill.objects.failed().get().source_id == sources[2].pk


def test_a_settling_that_was_rolled_back_is_decided_anew(steps: Backfill, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadlock, say, after the refresh was written: nothing of it may be remembered."""
    changed, failing = SourceFactory.create(), SourceFactory.create()
    batch = put(steps)
    execute("UPDATE sources SET metadata = %s WHERE id = %s", '{"credentials": {"n": 2}}', changed.pk)
    next(item for item in batch.items if item.source_id == failing.pk).failed(JobError.CONFLICT)
    real = steps._requeue
    monkeypatch.setattr(steps, "_requeue", _raises(DatabaseError("deadlock detected")))
    with pytest.raises(DatabaseError):
        steps.settle(batch)
    monkeypatch.setattr(steps, "_requeue", real)
    assert steps.settle(batch) == {Move.REFRESH: 1, Move.FAIL: 1}
    assert SourceCredentialBackfill.objects.failed().get().last_error_code == JobError.CONFLICT


def test_a_delete_that_holds_a_job_is_not_waited_for(steps: Backfill, other: Other) -> None:
    """It goes from source to job by cascade, in an order of its own; a deadlock would kill it."""
    leaving, staying = SourceFactory.create(), SourceFactory.create()
    batch = put(steps)
    other.execute("DELETE FROM sources WHERE id = %s", [leaving.pk])
    assert steps.settle(batch) == {Move.ACTIVATE: 1}
    steps.release(batch)
    batch.lease.confirmed_at -= 30
    steps.renew(batch)
    other.commit()
    assert SourceCredentialBackfill.objects.get().source_id == staying.pk


# What the store answers.


def test_too_large_fails_at_once_and_the_others_go_on(steps: Backfill, kfs_settings: Change, files: Files) -> None:
    kfs_settings(MAX_SECRET_BYTES=30)
    SourceFactory.create(credentials={"token": "x" * 50})
    SourceFactory.create(credentials={"token": "x"})
    assert steps.settle(put(steps)) == {Move.ACTIVATE: 1, Move.FAIL: 1}
    job = SourceCredentialBackfill.objects.failed().get()
    assert (job.last_error_code, job.retry_count) == (JobError.TOO_LARGE, 0)
    assert len(files()) == 1


def test_an_invalid_tenant_fails_alone(steps: Backfill) -> None:
    SourceFactory.create(knowledge_space__tenant_id=" ")
    SourceFactory.create()
    assert steps.settle(put(steps)) == {Move.ACTIVATE: 1, Move.FAIL: 1}
    assert SourceCredentialBackfill.objects.failed().get().last_error_code == JobError.SCOPE_INVALID


def test_another_secret_at_the_candidates_address_is_a_conflict_and_stands(
    steps: Backfill, store: EncryptedStore
) -> None:
    SourceFactory.create()
    batch = steps.discover(10)
    assert batch is not None
    item = batch.items[0]
    store.put(item.scope, item.ref, {"token": "there first"})
    assert steps.settle(put(steps, batch)) == {Move.FAIL: 1}
    assert only_job().last_error_code == JobError.CONFLICT
    assert store.get(item.scope, item.ref) == {"token": "there first"}


def test_where_only_rounding_differs_the_exact_value_gets_a_fresh_ref(
    steps: Backfill, store: EncryptedStore, run: Callable[..., BackfillSummary], kfs_settings: Change
) -> None:
    """The Node service put the value with its big integers rounded, and died."""
    source = SourceFactory.create(credentials={"n": 9007199254740993})
    batch = steps.discover(10)
    assert batch is not None
    item = batch.items[0]
    store.put(item.scope, item.ref, {"n": 9007199254740992})
    assert steps.settle(put(steps, batch)) == {Move.REFRESH: 1}
    kfs_settings(RETRY_BASE=0)
    run()
    ref = Source.objects.get().credential_ref
    assert ref is not None
    assert store.get(Scope("tenant-a", source.knowledge_space_id, source.pk), ref) == {"n": 9007199254740993}


def test_a_damaged_object_at_the_candidates_address_is_an_integrity_failure(
    steps: Backfill, store: EncryptedStore, files: Files
) -> None:
    SourceFactory.create()
    batch = steps.discover(10)
    assert batch is not None
    store.put(batch.items[0].scope, batch.items[0].ref, {"token": "x"})
    files()[0].chmod(0o600)
    files()[0].write_bytes(b"damaged")
    assert steps.settle(put(steps, batch)) == {Move.FAIL: 1}
    assert only_job().last_error_code == JobError.INTEGRITY


def test_the_same_secret_put_before_by_a_worker_that_died_is_success(
    steps: Backfill, store: EncryptedStore, files: Files
) -> None:
    SourceFactory.create(credentials={"token": "x"})
    batch = steps.discover(10)
    assert batch is not None
    store.put(batch.items[0].scope, batch.items[0].ref, {"token": "x"})
    before = [(path, path.read_bytes()) for path in files()]
    assert steps.settle(put(steps, batch)) == {Move.ACTIVATE: 1}
    assert [(path, path.read_bytes()) for path in files()] == before


def test_an_unavailable_store_gives_everything_back_and_counts_no_attempt(
    steps: Backfill, monkeypatch: pytest.MonkeyPatch
) -> None:
    SourceFactory.create()
    batch = steps.discover(10)
    assert batch is not None
    monkeypatch.setattr(steps.store, "_put_many", _raises(StoreUnavailable("down")))
    steps.start_put(batch)
    with pytest.raises(StoreUnavailable):
        steps.finish_put(batch)
    assert steps.settle(batch) == {Move.RELEASE: 1}
    assert (only_job().run_state, only_job().retry_count, only_job().last_error_code) == (RunState.QUEUED, 0, None)


def test_an_unexpected_failure_is_the_one_items_and_not_the_batchs(
    steps: Backfill, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = SourceFactory.create(credentials={"bad": True}), SourceFactory.create()
    batch = steps.discover(10)
    assert batch is not None
    real = store._put_many
    ref = next(item.ref for item in batch.items if item.source_id == bad.pk)

    def put_many(entries: Any, *, deadline: Any) -> Any:
        if any(entry.ref == ref for entry in entries):
            raise RuntimeError("something quotes a secret here")
        return real(entries, deadline=deadline)

    monkeypatch.setattr(store, "_put_many", put_many)
    assert steps.settle(put(steps, batch)) == {Move.ACTIVATE: 1, Move.RETRY: 1}
    job = SourceCredentialBackfill.objects.get(source=bad)
    assert (job.run_state, job.retry_count, job.last_error_code) == (RunState.QUEUED, 1, JobError.UNEXPECTED)
    assert job.last_error_message == "The secret store failed in an unexpected way."
    assert Source.objects.get(pk=good.pk).credential_ref is not None


def _raises(error: Exception) -> Callable[..., Any]:
    def raising(*_: Any, **__: Any) -> Any:
        raise error

    return raising

"""What a worker looks at beside the credentials: the candidate's ledger row, a deletion, and what is in use already."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Item, Move
from kfs_credentials.errors import (
    KfsCredentialsError,
    NotAsSaid,
    SecretConflict,
    SecretIntegrityError,
    StoreUnavailable,
)
from kfs_credentials.models import (
    JobError,
    RefState,
    RunState,
    Source,
    SourceSecretLifecycleRef,
)
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.backfill.conftest import Files
from tests.backfill.runs import VALUE, claim_and_put, execute, only_job, waiting
from tests.factories import SourceFactory

pytestmark = pytest.mark.django_db(transaction=True)


# A deletion that begins after the claim.


@pytest.mark.parametrize("how", ["space", "source", "status"])
def test_a_deletion_that_began_after_the_claim_keeps_the_secret_from_being_activated(steps: Backfill, how: str) -> None:
    item = waiting(steps)
    batch = claim_and_put(steps)
    execute("CREATE TABLE deletion_jobs (target_id uuid, active_slot int)")
    try:
        if how == "status":
            Source.objects.update(status="deleting")
        else:
            execute("INSERT INTO deletion_jobs VALUES (%s, 1)", item.space_id if how == "space" else item.source_id)
        assert steps.settle(batch) == {Move.RELEASE: 1}
        assert Source.objects.get().credential_ref is None
        assert (only_job().run_state, only_job().retry_count) == (RunState.QUEUED, 0)
        assert SourceSecretLifecycleRef.objects.get().state == RefState.CANDIDATE
        # Given up: it is moved.
        Source.objects.update(status="active")
        execute("UPDATE deletion_jobs SET active_slot = NULL")
        assert steps.settle(claim_and_put(steps)) == {Move.ACTIVATE: 1}
    finally:
        execute("DROP TABLE deletion_jobs")


# A ledger row under which nothing may be put.


@pytest.mark.parametrize(("state", "move"), [("deleted", Move.REFRESH), ("retired", Move.REFRESH), ("", Move.FAIL)])
def test_nothing_is_put_at_a_candidate_whose_ledger_row_is_over_or_missing(
    steps: Backfill, files: Files, state: str, move: Move
) -> None:
    waiting(steps)
    if state:
        execute(
            "UPDATE source_secret_lifecycle_refs SET state = %s, deleted_at = %s",
            state,
            "2026-01-01T00:00:00Z" if state == "deleted" else None,
        )
    else:
        SourceSecretLifecycleRef.objects.all().delete()
    assert steps.settle(claim_and_put(steps)) == {move: 1}
    assert files() == []


# A candidate that is in use, with nothing left to put.


def in_use(item: Item, state: str = "active") -> None:
    """Let the source name the candidate, and have no credentials any more."""
    execute("UPDATE sources SET credential_ref = %s, metadata = '{}' WHERE id = %s", item.ref, item.source_id)
    SourceSecretLifecycleRef.objects.update(state=state)


def test_one_that_can_be_read_is_taken_as_it_is(steps: Backfill, store: EncryptedStore) -> None:
    item = waiting(steps)
    store.put(item.scope, item.ref, VALUE)
    in_use(item)
    assert steps.settle(claim_and_put(steps)) == {Move.ADOPT: 1}
    assert only_job().run_state == RunState.SUCCEEDED


@pytest.mark.parametrize("state", ["active", "candidate"])
@pytest.mark.parametrize("object_is", ["missing", "damaged"])
def test_one_that_cannot_be_read_is_a_finding_and_its_ref_stays_in_use(
    steps: Backfill, store: EncryptedStore, files: Files, state: str, object_is: str
) -> None:
    item = waiting(steps)
    if object_is == "damaged":
        store.put(item.scope, item.ref, VALUE)
        files()[0].chmod(0o600)
        files()[0].write_bytes(b"damaged")
    before = len(files())
    in_use(item, state)
    assert steps.settle(claim_and_put(steps)) == {Move.FAIL: 1}
    assert (only_job().run_state, only_job().last_error_code) == (RunState.FAILED, JobError.TRANSITION_CONFLICT)
    assert only_job().last_error_message == (
        "The source names the candidate already, and the store holds nothing readable under it."
    )
    ref = SourceSecretLifecycleRef.objects.get()
    assert (ref.state, ref.next_delete_at) == (RefState.ACTIVE, None)
    assert Source.objects.get().credential_ref == item.ref
    assert len(files()) == before


CONTRADICTIONS = [NotAsSaid("nothing there"), SecretIntegrityError("damaged"), SecretConflict()]


@pytest.mark.parametrize("answer", CONTRADICTIONS, ids=lambda answer: type(answer).__name__)
@pytest.mark.parametrize("object_is", ["there", "missing"])
def test_one_that_comes_into_use_after_a_put_that_failed_is_read_first(
    steps: Backfill, store: EncryptedStore, answer: KfsCredentialsError, object_is: str
) -> None:
    """What the store has just contradicted is not taken for done: the next claim reads it."""
    item = waiting(steps)
    batch = claim_and_put(steps)
    batch.items[0].put_outcome(answer)
    if object_is == "missing":
        store.delete(item.scope, item.ref)
    in_use(item, "candidate")
    assert steps.settle(batch) == {Move.RELEASE: 1}
    ref = SourceSecretLifecycleRef.objects.get()
    assert (only_job().run_state, only_job().retry_count, ref.state) == (RunState.QUEUED, 0, RefState.CANDIDATE)
    moved = Move.ADOPT if object_is == "there" else Move.FAIL
    assert steps.settle(claim_and_put(steps)) == {moved: 1}
    assert SourceSecretLifecycleRef.objects.get().state == RefState.ACTIVE


@pytest.mark.parametrize("object_is", ["there", "missing"])
def test_one_in_use_whose_credentials_cannot_be_put_is_read(
    steps: Backfill, store: EncryptedStore, object_is: str
) -> None:
    """An old application has saved its copy, with other credentials: what its source names counts."""
    item = waiting(steps)
    if object_is == "there":
        store.put(item.scope, item.ref, VALUE)
    execute(
        "UPDATE sources SET credential_ref = %s, metadata = %s",
        item.ref,
        json.dumps({"credentials": {"token": "x" * 100_000}}),
    )
    assert steps.settle(claim_and_put(steps)) == {Move.ADOPT if object_is == "there" else Move.FAIL: 1}


def test_one_in_use_that_no_scope_fits_fails_at_once(steps: Backfill) -> None:
    SourceFactory.create(knowledge_space__tenant_id=" ", credentials=VALUE)
    batch = steps.discover(1)
    assert batch is not None
    steps.release(batch)
    in_use(batch.items[0])
    assert steps.settle(claim_and_put(steps)) == {Move.FAIL: 1}
    assert (only_job().last_error_code, only_job().run_state) == (JobError.SCOPE_INVALID, RunState.FAILED)
    assert SourceSecretLifecycleRef.objects.get().state == RefState.ACTIVE


def test_one_in_use_whose_worker_died_over_it_too_often_is_not_read_again(
    steps: Backfill, store: EncryptedStore, kfs_settings: Any
) -> None:
    kfs_settings(MAX_ATTEMPTS=1)
    item = waiting(steps)
    store.put(item.scope, item.ref, VALUE)
    in_use(item)
    assert steps.claim(1) is not None
    execute("UPDATE source_credential_backfills SET lease_expires_at = now() - interval '1 minute'")
    assert steps.settle(claim_and_put(steps)) == {Move.FAIL: 1}
    assert only_job().last_error_code == JobError.WORKER_LOST
    assert SourceSecretLifecycleRef.objects.get().state == RefState.ACTIVE


def test_a_store_that_does_not_answer_decides_nothing(
    steps: Backfill, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = waiting(steps)
    in_use(item)

    def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("down")

    monkeypatch.setattr(store, "_get_many", away)
    batch = steps.claim(10)
    assert batch is not None
    steps.start_put(batch)
    with pytest.raises(StoreUnavailable):
        steps.finish_put(batch)
    assert steps.settle(batch) == {Move.RELEASE: 1}
    assert (only_job().run_state, only_job().retry_count) == (RunState.QUEUED, 0)


def test_what_was_only_read_is_never_activated(steps: Backfill, store: EncryptedStore) -> None:
    """The source lets go of the candidate meanwhile, and has other credentials than the store."""
    item = waiting(steps)
    store.put(item.scope, item.ref, VALUE)
    in_use(item, "candidate")
    batch = claim_and_put(steps)
    execute(
        "UPDATE sources SET credential_ref = NULL, metadata = %s WHERE id = %s",
        '{"credentials": {"token": "new"}}',
        item.source_id,
    )
    assert steps.settle(batch) == {Move.RELEASE: 1}
    assert Source.objects.get().credential_ref is None

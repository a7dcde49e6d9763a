"""What a worker looks at beside the credentials: the candidate's ledger row, a deletion, and what is in use already."""

from __future__ import annotations

from typing import Any

import pytest

from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Item, Move
from kfs_credentials.errors import StoreUnavailable
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

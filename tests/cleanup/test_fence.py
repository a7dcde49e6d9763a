"""What a worker that has lost its rows may still write: nothing."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.db.models.functions import Now

from kfs_credentials.cleanup import Cleanup, Outcome
from kfs_credentials.errors import LeaseLost
from kfs_credentials.models import Receipt, RefState
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import PAST, add_secret, known, reread
from tests.cleanup.runs import Files, NewSteps, claim, delete
from tests.management.rows import table_contents

pytestmark = pytest.mark.django_db(transaction=True)

NOT_LEASED = dict.fromkeys(("worker_id", "lease_token", "lease_expires_at", "heartbeat_at"))
LOST: dict[str, dict[str, Any]] = {
    "its lease ran out": {"lease_expires_at": PAST},
    "another worker has claimed it": {"lease_token": uuid.UUID(int=1), "worker_id": "another#1"},
    "it was given back": {"state": RefState.RETIRED, **NOT_LEASED},
    "it is erased": {"state": RefState.DELETED, "deleted_at": Now(), **NOT_LEASED},
}


@pytest.mark.parametrize("how", LOST)
def test_a_stalled_eraser_settles_nothing(steps: Cleanup, store: EncryptedStore, how: str) -> None:
    row = add_secret(store)
    erasure = claim(steps)
    delete(steps, erasure)
    LedgerRow.objects.filter(pk=row.pk).update(**LOST[how])
    before = table_contents()
    assert steps.settle(erasure) == {}
    assert steps.release(erasure) == 0
    assert table_contents() == before


def test_what_is_still_its_own_is_settled_beside_what_is_lost(steps: Cleanup, store: EncryptedStore) -> None:
    ours, lost, gone = add_secret(store), add_secret(store), add_secret(store)
    erasure = claim(steps)
    delete(steps, erasure)
    LedgerRow.objects.filter(pk=lost.pk).update(lease_token=uuid.uuid4())
    LedgerRow.objects.filter(pk=gone.pk).delete()
    before = reread(lost)
    assert steps.settle(erasure) == {Outcome.ERASED: 1}
    assert reread(ours).state == RefState.DELETED
    assert (reread(lost).state, reread(lost).row_version) == (RefState.DELETING, before.row_version)
    assert known(lost.credential_ref).receipt is None


def test_an_eraser_whose_own_watch_has_run_out_writes_nothing(steps: Cleanup, store: EncryptedStore) -> None:
    add_secret(store)
    erasure = claim(steps)
    delete(steps, erasure)
    erasure.lease.confirmed_at -= 61
    before = table_contents()
    with pytest.raises(LeaseLost):
        steps.settle(erasure)
    assert table_contents() == before


def test_an_eraser_whose_own_watch_has_run_out_erases_nothing(
    steps: Cleanup, store: EncryptedStore, files: Files
) -> None:
    add_secret(store)
    erasure = claim(steps)
    erasure.lease.confirmed_at -= 61
    with pytest.raises(LeaseLost):
        delete(steps, erasure)
    assert len(files()) == 1
    assert erasure.items[0].result is None


def test_who_takes_over_settles_and_the_one_before_does_not(
    steps: Cleanup, new_steps: NewSteps, store: EncryptedStore, files: Files
) -> None:
    row = add_secret(store)
    stalled = claim(steps)
    LedgerRow.objects.update(lease_expires_at=PAST)
    another = new_steps(worker="another")
    taken = claim(another)
    delete(steps, stalled)
    assert steps.settle(stalled) == {}
    assert reread(row).state == RefState.DELETING
    delete(another, taken)
    assert another.settle(taken) == {Outcome.ERASED: 1}
    assert files() == []
    assert known(row.credential_ref).receipt == Receipt.ABSENT, "it was gone when the one that counts looked"


def test_a_second_settling_finds_nothing_of_its_own(steps: Cleanup, store: EncryptedStore) -> None:
    add_secret(store)
    erasure = claim(steps)
    delete(steps, erasure)
    assert steps.settle(erasure) == {Outcome.ERASED: 1}
    before = table_contents()
    assert steps.settle(erasure) == {}
    assert steps.erased(erasure) == 1, "a commit that was not answered took place"
    assert table_contents() == before

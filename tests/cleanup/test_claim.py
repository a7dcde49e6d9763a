"""What is claimed for erasure, in which order, by whom; and what a worker that died leaves behind."""

from __future__ import annotations

import uuid

import pytest

from kfs_credentials.cleanup import Cleanup
from kfs_credentials.errors import LeaseLost
from kfs_credentials.models import Attention, RefError, RefState, SecretObject
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.conftest import Other
from tests.cleanup.rows import (
    FUTURE,
    HOUR,
    IN_STATE,
    PAST,
    add_ref,
    bare_source,
    due_between,
    known,
    make_due,
    name_ref,
    reread,
)
from tests.cleanup.runs import Change, NewSteps, claim
from tests.factories import SourceFactory
from tests.management.rows import JobFactory

pytestmark = pytest.mark.django_db(transaction=True)


def refs(steps: Cleanup, limit: int = 100) -> list[str] | None:
    """Claim; return the refs, None if nothing is due."""
    erasure = steps.claim(limit)
    return None if erasure is None else sorted(item.ref for item in erasure.items)


def test_what_is_due_is_leased_under_a_fresh_token(steps: Cleanup) -> None:
    row = add_ref(next_delete_at=PAST)
    erasure = claim(steps)
    after = reread(row)
    assert (after.state, after.lease_token) == (RefState.DELETING, erasure.lease.token)
    assert after.worker_id == "tests#1"
    assert (after.row_version, after.delete_attempts) == (row.row_version + 1, 0)
    assert after.lease_expires_at is not None
    assert after.heartbeat_at is not None
    assert 59 <= (after.lease_expires_at - after.heartbeat_at).total_seconds() <= 61
    (item,) = erasure.items
    assert (item.ref, item.store, item.confirms) == (row.credential_ref, "default", False)


@pytest.mark.parametrize("situation", [name for name in IN_STATE if name.endswith(("due", "expired"))])
def test_claimable(steps: Cleanup, situation: str) -> None:
    row = add_ref(situation=situation)
    assert refs(steps) == [row.credential_ref]
    assert refs(steps) is None


@pytest.mark.parametrize("situation", [name for name in IN_STATE if not name.endswith(("due", "expired"))])
def test_not_claimable(steps: Cleanup, situation: str) -> None:
    row = add_ref(situation=situation)
    assert refs(steps) is None
    assert reread(row).row_version == row.row_version


def test_the_first_claim_is_recorded_and_kept(steps: Cleanup) -> None:
    row = add_ref()
    steps.release(claim(steps))
    first = known(row.credential_ref).first_claimed_at
    assert first is not None
    steps.release(claim(steps))
    assert known(row.credential_ref).first_claimed_at == first


def test_a_ref_that_our_own_table_does_not_know_is_known_from_its_claim_on(steps: Cleanup) -> None:
    row = add_ref(situation="deleted, due")
    SecretObject.objects.all().delete()
    (item,) = claim(steps).items
    assert item.confirms, "the Node service erased it, and the horizon has passed"
    assert known(row.credential_ref).first_erased_at == row.deleted_at
    assert known(row.credential_ref).first_claimed_at is not None


def test_a_tombstone_that_is_claimed_does_not_read_deleted(steps: Cleanup) -> None:
    row = add_ref(situation="deleted, due")
    claim(steps)
    assert (reread(row).state, reread(row).deleted_at) == (RefState.DELETING, None)


def test_the_longest_due_first_and_not_more_than_the_limit(steps: Cleanup) -> None:
    rows = [add_ref() for _ in range(3)]
    for seconds, row in enumerate(rows):
        LedgerRow.objects.filter(pk=row.pk).update(next_delete_at=row.created_at.replace(year=2020, second=seconds))
    assert refs(steps, 2) == sorted(row.credential_ref for row in rows[:2])
    assert refs(steps, 2) == [rows[2].credential_ref]


def test_what_a_dead_worker_held_comes_first(steps: Cleanup) -> None:
    fresh, stuck = add_ref(), add_ref(situation="deleting, expired")
    assert refs(steps, 1) == [stuck.credential_ref]
    assert refs(steps, 1) == [fresh.credential_ref]


def test_retired_refs_come_before_confirmations(steps: Cleanup) -> None:
    confirmation = add_ref(situation="deleted, due")
    fresh = add_ref()
    assert refs(steps) == [fresh.credential_ref], "however long the other one has been due"
    assert refs(steps) == [confirmation.credential_ref]


def test_two_workers_never_have_one_row(steps: Cleanup, new_steps: NewSteps) -> None:
    rows = sorted(add_ref().credential_ref for _ in range(4))
    first, second = refs(steps, 2), refs(new_steps(worker="another"), 4)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == rows


def test_a_row_that_somebody_holds_is_passed_over(steps: Cleanup, other: Other) -> None:
    held, free = add_ref(), add_ref()
    other.execute("SELECT FROM source_secret_lifecycle_refs WHERE id = %s FOR NO KEY UPDATE", [held.pk])
    assert refs(steps) == [free.credential_ref]
    assert refs(steps) is None


def test_an_expired_row_that_a_frozen_worker_holds_does_not_stand_before_the_others(
    steps: Cleanup, other: Other
) -> None:
    frozen = add_ref(situation="deleting, expired")
    other.execute("SELECT FROM source_secret_lifecycle_refs WHERE id = %s FOR NO KEY UPDATE", [frozen.pk])
    stuck = add_ref(situation="deleting, expired", lease_token=uuid.uuid4())
    fresh = add_ref()
    assert refs(steps) == [stuck.credential_ref]
    assert refs(steps) == [fresh.credential_ref]


def test_a_ref_that_a_live_job_holds_is_not_claimed_but_put_off(steps: Cleanup, kfs_settings: Change) -> None:
    kfs_settings(RETRY_BASE=30)
    source = SourceFactory.create()
    used, free = add_ref(source, delete_attempts=2), add_ref()
    JobFactory.create(source=source, candidate_credential_ref=used.credential_ref, queued=True)
    erasure = claim(steps)
    assert ([item.ref for item in erasure.items], erasure.in_use) == ([free.credential_ref], [])
    after = reread(used)
    assert (after.state, after.delete_attempts) == (RefState.RETIRED, 2)
    assert due_between(used, 29, 31)


@pytest.mark.parametrize("situation", ["retired, due", "deleting, expired", "deleted, due"])
def test_a_ref_that_a_source_names_is_held_without_a_time_for_its_erasure(steps: Cleanup, situation: str) -> None:
    """With one, the Node service would claim it, and make it active again whatever became of it before."""
    source = bare_source()
    used, free = add_ref(source, situation, delete_attempts=2), add_ref()
    name_ref(source, used.credential_ref)
    erasures = [erasure for _ in range(3) if (erasure := steps.claim(10)) is not None]
    assert [item.ref for erasure in erasures for item in erasure.items] == [free.credential_ref]
    assert [ref for erasure in erasures for ref in erasure.in_use] == [used.credential_ref]
    after = reread(used)
    assert (after.state, after.delete_attempts, after.next_delete_at) == (RefState.RETIRED, 2, None)


def test_five_hundred_refs_in_use_do_not_stand_before_one_that_is_not(steps: Cleanup) -> None:
    space = SourceFactory.create().knowledge_space
    used = [add_ref(SourceFactory.create(knowledge_space=space, bare=True)) for _ in range(5)]
    for row in used:
        LedgerRow.objects.filter(pk=row.pk).update(next_delete_at=row.created_at.replace(year=2020))
        name_ref(bare_source(knowledge_space=space), row.credential_ref)
    free = add_ref()
    assert refs(steps, 5) == []
    assert refs(steps, 5) == [free.credential_ref]


def test_a_batch_that_killed_its_worker_is_claimed_in_ever_smaller_groups(steps: Cleanup) -> None:
    for _ in range(8):
        add_ref()
    sizes: list[int] = []
    attempts: list[int] = []
    for _ in range(5):
        erasure = claim(steps, 8)
        sizes.append(len(erasure.items))
        LedgerRow.objects.leased().update(lease_expires_at=FUTURE)
        LedgerRow.objects.filter(lease_token=erasure.lease.token).update(lease_expires_at=PAST)
        attempts += LedgerRow.objects.values_list("delete_attempts", flat=True).order_by("-delete_attempts")[:1]
    assert sizes == [8, 4, 2, 1, 1]
    assert attempts == [0, 0, 0, 0, 1], "only a crash of a ref that was leased alone counts"


def test_a_claim_of_the_node_service_that_ran_out_counts_as_alone(steps: Cleanup) -> None:
    row = add_ref(situation="deleting, expired", worker_id="node-worker")
    assert refs(steps) == [row.credential_ref]
    assert reread(row).delete_attempts == 1


def test_a_ref_that_kills_every_worker_is_parked_in_the_end(steps: Cleanup, kfs_settings: Change) -> None:
    kfs_settings(PARK_AFTER=3)
    killer, fine = add_ref(), add_ref(situation="retired")
    for _ in range(3):
        assert refs(steps) == [killer.credential_ref]
        LedgerRow.objects.leased().update(lease_expires_at=PAST)
    assert refs(steps) == [], "claimed by nobody this time"
    after = reread(killer)
    assert (after.state, after.delete_attempts) == (RefState.RETIRED, 3)
    assert after.last_error_code == RefError.NEEDS_ATTENTION
    assert known(killer.credential_ref).attention == Attention.ERASURE_FAILS
    assert due_between(killer, 24 * HOUR - 1, 24 * HOUR + 1)
    make_due(killer.credential_ref, fine.credential_ref)
    assert refs(steps) == sorted([killer.credential_ref, fine.credential_ref]), "tried again once a day"


def test_renewal_is_no_move_and_only_of_what_is_still_ours(steps: Cleanup) -> None:
    ours, lost = add_ref(), add_ref()
    erasure = claim(steps)
    LedgerRow.objects.filter(pk=lost.pk).update(lease_token=uuid.uuid4())
    before, before_lost = reread(ours), reread(lost)
    erasure.lease.confirmed_at -= 30
    steps.renew(erasure)
    after = reread(ours)
    assert after.lease_expires_at is not None
    assert before.lease_expires_at is not None
    assert after.lease_expires_at > before.lease_expires_at
    assert after.row_version == before.row_version
    assert reread(lost).lease_expires_at == before_lost.lease_expires_at


def test_a_renewal_that_comes_too_late_says_so(steps: Cleanup) -> None:
    row = add_ref()
    erasure = claim(steps)
    LedgerRow.objects.filter(pk=row.pk).update(lease_expires_at=PAST)
    erasure.lease.confirmed_at -= 61
    before = reread(row)
    with pytest.raises(LeaseLost, match="another worker takes over"):
        steps.renew(erasure)
    assert reread(row).lease_expires_at == before.lease_expires_at
    assert reread(row).state == RefState.DELETING


def test_what_is_given_back_is_as_due_as_it_was(steps: Cleanup) -> None:
    row = add_ref(delete_attempts=3)
    assert steps.release(claim(steps)) == 1
    after = reread(row)
    assert (after.state, after.next_delete_at, after.delete_attempts) == (RefState.RETIRED, row.next_delete_at, 3)
    assert (after.worker_id, after.lease_token, after.lease_expires_at, after.heartbeat_at) == (None,) * 4


def test_only_the_tenant_and_the_space_that_were_asked_for(new_steps: NewSteps, store: EncryptedStore) -> None:
    ours, theirs = add_ref(), add_ref(tenant_id="tenant-b")
    assert refs(new_steps(tenant="tenant-b")) == [theirs.credential_ref]
    assert refs(new_steps(space=theirs.knowledge_space_id)) is None
    assert refs(new_steps(space=ours.knowledge_space_id)) == [ours.credential_ref]

"""What an operator decides about refs: erase again, give up, and which one of two a source names."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from kfs_credentials import services
from kfs_credentials.cleanup import Cleanup
from kfs_credentials.crypto import new_ref
from kfs_credentials.models import Attention, RefError, RefState, SecretObject, SourceSecretLifecycleRef
from kfs_credentials.models.ledger import LedgerQuerySet
from kfs_credentials.ref_operations import RefResult, abandon, discard, erase_again, restore
from kfs_credentials.repairs import Repair
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.runs import sweep
from tests.factories import SpaceFactory
from tests.invariants import check_invariants
from tests.management.rows import table_contents
from tests.ref_scenes import (
    DECISIONS,
    NEW,
    OLD,
    TENANT,
    Decide,
    Pair,
    displaced,
    due_in_grace,
    execute,
    made,
    name,
    object_of,
    out_of_use,
    parked,
    refs,
    repaired,
    rotated,
    row_of,
    rows,
    unreadable,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("store")]

ROUNDS = "kfs_credentials_round"

every_decision = pytest.mark.parametrize("decide", DECISIONS.values(), ids=DECISIONS)


# Erase again.


@pytest.mark.parametrize("attention", [Attention.ERASURE_FAILS, Attention.RETAINED])
def test_a_parked_ref_is_due_at_once(attention: Attention) -> None:
    ref = parked(attention)
    before = row_of(ref)
    assert not refs(ref).due()
    assert erase_again("default", rows(ref)) == RefResult(done=1)
    row = row_of(ref)
    assert refs(ref).due().retired().exists()
    assert (row.delete_attempts, row.row_version) == (20, before.row_version + 1)
    assert row.last_error_code == RefError.NEEDS_ATTENTION
    assert object_of(ref).attention is None


def test_many_in_batches(kfs_settings: Callable[..., None]) -> None:
    kfs_settings(BATCH_SIZE=2)
    chosen = rows(*(parked() for _ in range(5)))
    gone = uuid.uuid4()
    assert erase_again("default", [*chosen, (gone, None)]) == RefResult(done=5, missing=1)
    assert erase_again("default", chosen) == RefResult(changed=5)
    assert SourceSecretLifecycleRef.objects.due().count() == 5


# Giving up.


def test_an_abandoned_ref_is_recorded_as_not_erased() -> None:
    ref = parked()
    before = row_of(ref)
    assert abandon("default", rows(ref), by="an operator", reason=" the bucket is gone ") == RefResult(done=1)
    row, stored = row_of(ref), object_of(ref)
    assert (row.state, row.next_delete_at, row.deleted_at) == (RefState.RETIRED, None, None)
    assert (row.last_error_code, row.last_error_message) == (RefError.ABANDONED, RefError.ABANDONED.message)
    assert (row.row_version, row.delete_attempts) == (before.row_version + 1, 20)
    assert stored.abandoned_at is not None
    assert (stored.abandoned_by, stored.abandoned_reason) == ("an operator", "the bucket is gone")
    assert (stored.first_erased_at, stored.receipt, stored.attention) == (None, None, None)


def test_an_abandoned_ref_is_never_due_again(store: EncryptedStore) -> None:
    ref = parked()
    abandon("default", rows(ref), by="tests", reason="the bucket is gone")
    before = table_contents()
    everything: LedgerQuerySet = SourceSecretLifecycleRef.objects.all()
    assert not everything.due()
    assert not everything.unfinished()
    assert everything.ahead()[1] is None
    cleanup = Cleanup(using="default", worker="tests", lease=60.0)
    assert sweep(cleanup)[0] == 0
    assert cleanup.claim(100) is None
    assert {**table_contents(), ROUNDS: []} == {**before, ROUNDS: []}
    assert check_invariants("default", store) == []


@every_decision
def test_an_abandoned_ref_is_left_alone(decide: Decide) -> None:
    ref = parked()
    abandon("default", rows(ref), by="tests", reason="the bucket is gone")
    # Even if something is found about it again.
    SecretObject.objects.mark([ref], Attention.ERASURE_FAILS)
    before = table_contents()
    assert decide("default", rows(ref)) == RefResult(changed=1)
    assert table_contents() == before


@pytest.mark.parametrize("reason", ["", " \n", "a\x00b"])
def test_giving_up_takes_a_reason(reason: str) -> None:
    ref = parked()
    before = table_contents()
    with pytest.raises(
        ValueError, match=r"^Give a reason, as text without the character U\+0000: nothing else will tell"
    ):
        abandon("default", rows(ref), by="tests", reason=reason)
    assert table_contents() == before


def test_a_ref_that_a_source_names_is_not_given_up() -> None:
    ref = parked()
    name(made().pk, ref)
    before = table_contents()
    assert abandon("default", rows(ref), by="tests", reason="the bucket is gone") == RefResult(changed=1)
    assert table_contents() == before


# Restoring.


def test_a_displaced_ref_is_named_again(store: EncryptedStore) -> None:
    pair = displaced()
    version = pair.read().version
    assert pair.credentials() == OLD
    assert restore("default", rows(pair.other)) == RefResult(done=1)
    assert pair.credentials() == NEW
    assert (pair.read().credential_ref, pair.read().version) == (pair.other, version + 1)
    row = row_of(pair.other)
    assert (row.state, row.source_version, row.next_delete_at) == (RefState.ACTIVE, version + 1, None)
    assert (row.last_error_code, row.last_error_message) == (None, None)
    assert object_of(pair.other).attention is None
    assert (row_of(pair.named).state, object_of(pair.named).attention) == (RefState.RETIRED, None)
    assert due_in_grace(pair.named)
    assert check_invariants("default", store) == []


def test_what_an_old_writer_brought_back_in_clear_is_left_alone() -> None:
    """Restoring decides about refs alone: which credentials count is not known, and none are lost."""
    pair = displaced()
    execute('UPDATE sources SET metadata = \'{"credentials": {"a": 1}}\'')
    assert restore("default", rows(pair.other)) == RefResult(done=1)
    assert pair.read().metadata == {"credentials": {"a": 1}}


def test_of_two_displaced_refs_one_is_restored_and_the_other_still_waits() -> None:
    pair = displaced()
    third = services.rotate_credentials(tenant=TENANT, source_id=pair.source, credentials={"k": 3}).credential_ref
    assert third
    name(pair.source, pair.named)
    assert repaired(pair) == Repair.REINSTATED
    assert restore("default", rows(pair.other)) == RefResult(done=1)
    assert pair.credentials() == NEW
    assert restore("default", rows(third)) == RefResult(done=1)
    assert pair.credentials() == {"k": 3}
    assert row_of(pair.other).state == RefState.RETIRED


def test_a_source_that_names_an_unreadable_ref_gets_its_active_one_back(store: EncryptedStore) -> None:
    pair = unreadable()
    assert restore("default", rows(pair.other)) == RefResult(done=1)
    assert pair.credentials() == NEW
    assert row_of(pair.other).state == RefState.ACTIVE
    assert row_of(pair.other).source_version == pair.read().version
    assert due_in_grace(pair.named)
    assert object_of(pair.named).attention is None
    assert check_invariants("default", store) == []


@pytest.mark.parametrize("state", [RefState.RETIRED, RefState.DELETING, RefState.DELETED])
def test_an_erasure_that_is_at_work_goes_on(state: RefState) -> None:
    pair = out_of_use(state)
    SecretObject.objects.mark([pair.named], Attention.RETAINED)
    before = refs(pair.named).values().get()
    assert restore("default", rows(pair.other)) == RefResult(done=1)
    assert pair.credentials() == NEW
    assert refs(pair.named).values().get() == before
    assert object_of(pair.named).attention == Attention.RETAINED


def names_none(pair: Pair) -> None:
    name(pair.source, None)


def is_gone(pair: Pair) -> None:
    execute("DELETE FROM sources WHERE id = %s", pair.source)


def is_elsewhere(pair: Pair) -> None:
    execute("UPDATE sources SET knowledge_space_id = %s WHERE id = %s", SpaceFactory.create().pk, pair.source)


def is_of_another_tenant(pair: Pair) -> None:
    execute("UPDATE knowledge_spaces SET tenant_id = 'tenant-z'")


def is_being_deleted(pair: Pair) -> None:
    execute("UPDATE sources SET status = 'deleting' WHERE id = %s", pair.source)


def names_it_already(pair: Pair) -> None:
    name(pair.source, pair.other)


def was_claimed(pair: Pair) -> None:
    execute("UPDATE kfs_credentials_secret_object SET first_claimed_at = now() WHERE credential_ref = %s", pair.other)


def was_claimed_by_the_node_service(pair: Pair) -> None:
    execute("UPDATE source_secret_lifecycle_refs SET delete_attempts = 1 WHERE credential_ref = %s", pair.other)


def has_moved(pair: Pair) -> None:
    execute("UPDATE source_secret_lifecycle_refs SET row_version = 99 WHERE credential_ref = %s", pair.other)


REFUSED = [
    *(names_none, is_gone, is_elsewhere, is_of_another_tenant, is_being_deleted, names_it_already),
    *(was_claimed, was_claimed_by_the_node_service, has_moved),
]


@pytest.mark.parametrize("scene", [displaced, unreadable])
@pytest.mark.parametrize("change", REFUSED)
def test_refs_that_cannot_be_restored(scene: Callable[[], Pair], change: Callable[[Pair], None]) -> None:
    pair = scene()
    chosen = rows(pair.other)
    change(pair)
    before = table_contents()
    assert restore("default", chosen) == RefResult(changed=1)
    assert table_contents() == before


def test_refs_that_there_is_nothing_to_choose_about() -> None:
    active, retired, parked_one, gone = made().credential_ref, rotated().named, parked(), uuid.uuid4()
    assert active
    unused = displaced()
    refs(unused.other).retire()
    before = table_contents()
    chosen = [*rows(active, retired, parked_one, unused.other), (gone, None)]
    assert restore("default", chosen) == RefResult(changed=4, missing=1)
    assert discard("default", chosen) == RefResult(changed=4, missing=1)
    assert erase_again("default", rows(active, retired, unused.other)) == RefResult(changed=3)
    assert table_contents() == before


def test_one_of_two_refs_in_use_is_not_exchanged_for_the_other() -> None:
    """That both are active is a finding of its own, which the sweep decides about."""
    pair = rotated()
    refs(pair.named).activate(1)
    assert restore("default", rows(pair.other)) == RefResult(changed=1)


def test_another_sources_ref_makes_way_and_stays_in_use() -> None:
    """Nobody can read it under this source; what becomes of it is up to its own."""
    pair, owner = rotated(), made()
    name(owner.pk, None)
    name(pair.source, owner.credential_ref)
    assert restore("default", rows(pair.other)) == RefResult(done=1)
    assert pair.credentials() == NEW
    assert row_of(str(owner.credential_ref)).state == RefState.ACTIVE


def test_a_ref_that_the_ledger_does_not_know_makes_way_and_is_erased_too() -> None:
    pair = displaced()
    unknown = new_ref()
    name(pair.source, unknown)
    assert restore("default", rows(pair.other)) == RefResult(done=1)
    assert row_of(unknown).state == RefState.RETIRED


# Letting go.


def test_a_displaced_ref_is_let_go() -> None:
    pair = displaced()
    before = pair.read()
    assert discard("default", rows(pair.other)) == RefResult(done=1)
    row = row_of(pair.other)
    assert (row.state, row.last_error_code) == (RefState.RETIRED, None)
    assert due_in_grace(pair.other)
    assert object_of(pair.other).attention is None
    assert (pair.read().credential_ref, pair.read().version) == (pair.named, before.version)
    assert pair.credentials() == OLD
    assert restore("default", rows(pair.other)) == RefResult(changed=1), "what was let go is not chosen again"


def test_a_displaced_ref_that_cannot_be_restored_any_more_can_be_let_go() -> None:
    pair = displaced()
    was_claimed_by_the_node_service(pair)
    assert discard("default", rows(pair.other)) == RefResult(done=1)


def test_a_displaced_ref_that_a_source_names_again_is_not_let_go() -> None:
    pair = displaced()
    name(pair.source, pair.other)
    before = table_contents()
    assert discard("default", rows(pair.other)) == RefResult(changed=1)
    assert table_contents() == before

"""The patrol goes through what the store lists: late objects are erased again, unknown ones reported and left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import OperationalError
from django.db.models.functions import Now

from kfs_credentials.cleanup import Cleanup, Outcome
from kfs_credentials.crypto import Scope, new_ref, object_name
from kfs_credentials.errors import LeaseLost, StoreUnavailable
from kfs_credentials.models import RefState, Round, SecretObject
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.repairs import Repair
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.conftest import Other
from tests.cleanup.rows import (
    IN_STATE,
    PAST,
    SECRET,
    add_ref,
    add_secret,
    bare_source,
    is_due,
    known,
    make_source,
    name_ref,
    pass_horizon,
    put_late,
    ref_of,
    reread,
    scope_of,
)
from tests.cleanup.runs import Change, Files, claim, erase, patrol
from tests.invariants import check_invariants

pytestmark = pytest.mark.django_db(transaction=True)

NOWHERE = Scope("tenant-a", "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002")


def test_an_object_that_was_written_after_its_confirmation_is_erased_again(
    steps: Cleanup, store: EncryptedStore, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    row = add_ref(situation="final")
    put_late(store, row)
    assert patrol(steps).found == 0
    assert "1 objects were written after their erasure was confirmed: erased again" in caplog.text
    assert is_due(row)
    assert erase(steps) == {Outcome.ERASED: 1}
    assert files() == []
    pass_horizon()
    assert erase(steps) == {Outcome.CONFIRMED: 1}
    assert reread(row).next_delete_at is None
    patrol(steps)
    assert not is_due(row)
    assert check_invariants("default", store) == []


@pytest.mark.parametrize("situation", [situation for situation in IN_STATE if situation != "final"])
def test_objects_of_rows_that_are_not_final_are_left_to_their_own_moves(
    steps: Cleanup, store: EncryptedStore, files: Files, caplog: pytest.LogCaptureFixture, situation: str
) -> None:
    row = add_secret(store, situation=situation)
    position = patrol(steps)
    assert (position.found, caplog.text) == (0, "")
    after = reread(row)
    assert (after.state, after.row_version, after.next_delete_at) == (row.state, row.row_version, row.next_delete_at)
    assert len(files()) == 1


def test_a_final_row_without_an_object_stays_final(steps: Cleanup) -> None:
    row = add_ref(situation="final")
    patrol(steps)
    assert reread(row).row_version == row.row_version


def test_a_late_object_that_a_source_names_is_rescued_and_not_erased(steps: Cleanup, store: EncryptedStore) -> None:
    source = bare_source()
    row = add_secret(store, source, "final")
    name_ref(source, row.credential_ref)
    patrol(steps)
    erasure = claim(steps)
    assert (erasure.items, erasure.in_use) == ([], [row.credential_ref])
    assert steps.repair(row.credential_ref) is Repair.RESCUED
    assert store.get(scope_of(source), ref_of(source)) == SECRET


def test_an_unknown_object_is_reported_by_its_name_and_not_erased(
    steps: Cleanup, store: EncryptedStore, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    make_source()
    ref = new_ref()
    store.put(NOWHERE, ref, SECRET)
    position = patrol(steps)
    assert position.found == 1
    assert Round.objects.get(pk="patrol:default").found == 1
    assert f"store 'default' has 1 objects that no ledger row accounts for: {object_name(ref)}" in caplog.text
    assert len(files()) == 2
    assert steps.claim(10) is None
    assert patrol(steps).found == 1, "each patrol reports it"


def test_an_object_whose_ref_somebody_else_has_just_reserved_is_no_orphan(
    steps: Cleanup, store: EncryptedStore, caplog: pytest.LogCaptureFixture
) -> None:
    row = add_secret(store, situation="staged")
    SecretObject.objects.all().delete()  # the Node service writes no such row
    assert patrol(steps).found == 0
    assert "accounts for" not in caplog.text
    assert known(row.credential_ref).store == "default", "the next patrol finds it by the index"


@pytest.mark.parametrize("ref", ["C:\\x\\y", "\\x4", "é"])
def test_a_ref_that_nobody_can_have_made_stops_no_patrol(steps: Cleanup, store: EncryptedStore, ref: str) -> None:
    add_ref(situation="final", credential_ref=ref)
    store.put(NOWHERE, new_ref(), SECRET)
    assert patrol(steps).found == 1


def test_an_object_whose_row_comes_during_the_patrol_is_no_orphan(steps: Cleanup, store: EncryptedStore) -> None:
    ref = new_ref()
    store.put(NOWHERE, ref, SECRET)
    position = steps.begin_patrol("default", every=0)
    assert position is not None
    assert steps.patrol(position)
    assert len(position.unknown) == 1
    add_ref(situation="staged", credential_ref=ref)
    assert not steps.patrol(position)
    assert position.found == 0


def test_a_late_object_whose_row_somebody_holds_keeps_the_patrol_from_its_end(
    steps: Cleanup, store: EncryptedStore, other: Other, kfs_settings: Change
) -> None:
    """Its row could be purged otherwise, since a patrol would have passed it."""
    kfs_settings(LOCK_TIMEOUT=0.05)
    held, free = add_secret(store, situation="final"), add_secret(store, situation="final")
    other.execute("SELECT FROM source_secret_lifecycle_refs WHERE id = %s FOR NO KEY UPDATE", [held.pk])
    with pytest.raises(OperationalError, match="lock timeout"):
        patrol(steps)
    assert not Round.objects.filter(completed_at__isnull=False).exists()
    other.rollback()
    Round.objects.update(lease_expires_at=Now())
    patrol(steps)
    assert (is_due(held), is_due(free)) == (True, True)


def test_pages_of_two_see_every_object(steps: Cleanup, store: EncryptedStore) -> None:
    late = [add_secret(store, situation="final") for _ in range(5)]
    for _ in range(4):
        store.put(NOWHERE, new_ref(), SECRET)
    make_source()
    assert patrol(steps, limit=2).found == 4
    assert all(is_due(row) for row in late)


def test_a_listing_that_changes_between_pages_makes_no_false_orphan(
    steps: Cleanup, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources come and go, before and behind the place where the listing is."""
    monkeypatch.setattr("kfs_credentials.stores.encrypted.PAGE", 3)
    monkeypatch.setattr("kfs_credentials.cleanup.PAGE", 2)
    sources = [make_source() for _ in range(12)]
    unknown = new_ref()
    store.put(NOWHERE, unknown, SECRET)
    position = steps.begin_patrol("default", every=0)
    assert position is not None
    seen = 0
    while steps.patrol(position, 2):
        seen += 1
        make_source()
        gone = sources.pop() if sources else None
        if gone is not None:
            store.delete(scope_of(gone), ref_of(gone))
        assert seen < 50
    assert seen > 3
    assert list(position.unknown.values()) == [object_name(unknown)]


def test_no_more_unknown_objects_are_kept_in_mind_than_that(
    steps: Cleanup, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kfs_credentials.cleanup.MOST_UNKNOWN", 3)
    monkeypatch.setattr("kfs_credentials.cleanup.NAMED", 2)
    for _ in range(5):
        store.put(NOWHERE, new_ref(), SECRET)
    position = patrol(steps)
    assert len(position.unknown) == position.found == 3
    assert caplog.text.count(".enc") == 2


def test_a_page_that_was_not_written_is_kept_for_the_next_try(steps: Cleanup, store: EncryptedStore) -> None:
    row = add_secret(store, situation="final")
    position = steps.begin_patrol("default", every=0)
    assert position is not None
    token = position.lease.token
    Round.objects.update(lease_token=None)
    with pytest.raises(LeaseLost):
        steps.patrol(position)
    assert not is_due(row)
    Round.objects.update(lease_token=token)
    assert steps.patrol(position), "the listing has gone on, and the page is still there"
    assert is_due(row)


def test_a_store_that_fails_while_it_lists_is_no_end_of_the_listing(
    steps: Cleanup, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_source()

    def broken(after: str = "") -> Iterator[str]:
        yield object_name(new_ref())
        raise StoreUnavailable("down")

    monkeypatch.setattr(store, "list", broken)
    position = steps.begin_patrol("default", every=0)
    assert position is not None
    with pytest.raises(StoreUnavailable):
        steps.patrol(position)
    steps.give_up(position)
    assert Round.objects.get().covers_until is None


def test_a_store_that_cannot_list_is_not_patrolled(
    steps: Cleanup, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EncryptedStore, "can_list", False)
    assert steps.begin_patrol("default", every=0) is None
    assert not Round.objects.exists()


def test_foreign_files_are_no_objects(steps: Cleanup, store: EncryptedStore, files: Files) -> None:
    make_source()
    (path,) = files()
    (path.parent / "readme.txt").write_text("not ours")
    assert patrol(steps).found == 0


def test_a_frozen_writer_that_writes_long_after_the_confirmation_is_caught(
    steps: Cleanup, store: EncryptedStore, files: Files
) -> None:
    """The whole story of one ref: staged, given up, erased, confirmed, and written after all."""
    row = add_ref(situation="staged, unused")
    steps.reconcile(10)
    LedgerRow.objects.update(next_delete_at=PAST)
    assert erase(steps) == {Outcome.ERASED: 1}
    pass_horizon()
    assert erase(steps) == {Outcome.CONFIRMED: 1}
    put_late(store, row)
    assert check_invariants("default", store)[0].startswith("an object is in the store, and its ledger row is final")
    patrol(steps)
    assert erase(steps) == {Outcome.ERASED: 1}
    pass_horizon()
    assert erase(steps) == {Outcome.CONFIRMED: 1}
    assert files() == []
    assert reread(row).state == RefState.DELETED
    assert check_invariants("default", store) == []

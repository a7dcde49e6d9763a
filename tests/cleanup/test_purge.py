"""A row is forgotten when it is final, old enough, named by nobody, and passed by a patrol since."""

from __future__ import annotations

from typing import Any

import pytest

from kfs_credentials.cleanup import Cleanup
from kfs_credentials.leases import seconds_from_now
from kfs_credentials.models import Round, SecretObject
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.conftest import Other
from tests.cleanup.rows import HOUR, IN_STATE, add_ref, add_secret, bare_source, make_source, name_ref
from tests.cleanup.runs import patrol
from tests.invariants import check_invariants

pytestmark = pytest.mark.django_db(transaction=True)

DAYS = 24 * HOUR
OLD: dict[str, Any] = {"updated_at": seconds_from_now(-91 * DAYS)}


def left() -> int:
    """Return how many ledger rows there are."""
    return LedgerRow.objects.count()


def test_an_old_final_row_that_a_patrol_has_passed_is_forgotten(steps: Cleanup, store: EncryptedStore) -> None:
    row = add_ref(situation="final", **OLD)
    kept = make_source()
    patrol(steps)
    assert steps.purge(10) == 1
    assert not LedgerRow.objects.filter(pk=row.pk).exists()
    assert not SecretObject.objects.filter(pk=row.credential_ref).exists()
    assert LedgerRow.objects.filter(source_id=kept.pk).exists()
    assert check_invariants("default", store) == []


def test_not_without_any_patrol(steps: Cleanup) -> None:
    add_ref(situation="final", **OLD)
    assert steps.purge(10) == 0


def test_not_after_a_patrol_that_was_not_made_to_the_end(steps: Cleanup) -> None:
    add_ref(situation="final", **OLD)
    position = steps.begin_patrol("default", every=0)
    assert position is not None
    while steps.patrol(position):
        pass
    assert steps.purge(10) == 0
    steps.give_up(position)
    assert steps.purge(10) == 0


def test_not_after_a_patrol_that_began_before_it_was_final(steps: Cleanup, kfs_settings: Any) -> None:
    kfs_settings(LEDGER_RETENTION=0)
    position = steps.begin_patrol("default", every=0)
    assert position is not None
    row = add_ref(situation="final")
    while steps.patrol(position):
        pass
    steps.complete(position)
    covers = Round.objects.get().covers_until
    assert covers is not None
    assert covers < row.updated_at
    assert steps.purge(10) == 0
    patrol(steps)
    assert steps.purge(10) == 1


def test_not_after_the_patrol_of_another_store(steps: Cleanup) -> None:
    row = add_ref(situation="final", **OLD)
    SecretObject.objects.filter(pk=row.credential_ref).update(store="another")
    patrol(steps)
    assert steps.purge(10) == 0


def test_not_before_its_time(steps: Cleanup) -> None:
    add_ref(situation="final", updated_at=seconds_from_now(-89 * DAYS))
    patrol(steps)
    assert steps.purge(10) == 0


@pytest.mark.parametrize("situation", [situation for situation in IN_STATE if situation != "final"])
def test_nothing_that_is_not_final(steps: Cleanup, situation: str) -> None:
    add_ref(situation=situation, **OLD)
    patrol(steps)
    assert steps.purge(10) == 0


def test_not_while_a_source_names_it(steps: Cleanup) -> None:
    source = bare_source()
    row = add_ref(source, "final", **OLD)
    name_ref(source, row.credential_ref)
    patrol(steps)
    assert steps.purge(10) == 0
    name_ref(source, None)
    assert steps.purge(10) == 1


def test_not_with_an_object_that_the_patrol_has_found(steps: Cleanup, store: EncryptedStore) -> None:
    add_secret(store, None, "final", **OLD)
    patrol(steps)
    assert steps.purge(10) == 0


def test_a_row_that_somebody_holds_is_passed_over(steps: Cleanup, other: Other) -> None:
    held = add_ref(situation="final", **OLD)
    add_ref(situation="final", **OLD)
    patrol(steps)
    other.execute("SELECT FROM source_secret_lifecycle_refs WHERE id = %s FOR NO KEY UPDATE", [held.pk])
    assert steps.purge(10) == 1
    assert LedgerRow.objects.get().pk == held.pk


def test_a_row_that_our_own_table_does_not_know_goes_too(steps: Cleanup) -> None:
    add_ref(situation="final", **OLD)
    SecretObject.objects.all().delete()
    patrol(steps)
    assert steps.purge(10) == 1


def test_not_more_than_the_limit_and_oldest_first(steps: Cleanup) -> None:
    younger, older = add_ref(situation="final", **OLD), add_ref(situation="final", **OLD)
    LedgerRow.objects.filter(pk=older.pk).update(updated_at=seconds_from_now(-200 * DAYS))
    patrol(steps)
    assert (steps.purge(1), LedgerRow.objects.get().pk) == (1, younger.pk)
    assert steps.purge(1) == 1
    assert (steps.purge(1), left()) == (0, 0)


def test_where_the_store_cannot_list_rows_are_kept(steps: Cleanup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EncryptedStore, "can_list", False)
    add_ref(situation="final", **OLD)
    assert steps.begin_patrol("default", every=0) is None
    assert steps.purge(10) == 0

"""What becomes of a ref after the store was asked to erase it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from kfs_credentials.cleanup import Cleanup, Outcome
from kfs_credentials.errors import SecretRetained, SecretStoreError, StoreDenied, StoreUnavailable
from kfs_credentials.models import Attention, Receipt, RefError, RefState
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import (
    HOUR,
    add_ref,
    add_secret,
    due_between,
    known,
    make_due,
    make_source,
    pass_horizon,
    put_late,
    reread,
    scope_of_row,
)
from tests.cleanup.runs import Change, Files, claim, delete, erase, erase_all
from tests.invariants import check_invariants
from tests.management.rows import table_contents

pytestmark = pytest.mark.django_db(transaction=True)

Answer = Callable[[str], Any]
CANARY = "made-up-canary-in-an-error"


@pytest.fixture
def answering(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    """Return a function that lets the store answer for each ref what another one says; what that raises is raised.

    Where it says nothing (None), the object is really erased.
    """
    real = store._delete_many

    def set_answer(answer: Answer) -> None:
        def delete_many(addresses: Any, *, deadline: Any) -> list[Any]:
            said = [answer(address.ref) for address in addresses]
            done = real([one for one, given in zip(addresses, said, strict=True) if given is None], deadline=deadline)
            rest = iter(done)
            return [next(rest) if given is None else given for given in said]

        monkeypatch.setattr(store, "_delete_many", delete_many)

    return set_answer


def raising(error: Exception) -> Answer:
    """Return an answer that raises."""

    def answer(_: str) -> None:
        raise error

    return answer


def error_of(row: LedgerRow) -> tuple[str | None, str | None]:
    """Return what the ledger row tells of its last error."""
    row = reread(row)
    return row.last_error_code, row.last_error_message


def test_erased(steps: Cleanup, store: EncryptedStore, files: Files, kfs_settings: Change) -> None:
    kfs_settings(LATE_WRITE_HORIZON=100)
    row = add_secret(store)
    assert erase(steps) == {Outcome.ERASED: 1}
    after, stored = reread(row), known(row.credential_ref)
    assert files() == []
    assert after.state == RefState.DELETED
    assert after.deleted_at == after.updated_at
    assert stored.first_erased_at is not None
    assert (stored.receipt, after.delete_attempts, after.last_error_code) == (Receipt.ERASED, 0, None)
    assert due_between(row, 99, 101), "it is confirmed after the horizon"
    assert steps.claim(10) is None
    assert after.worker_id is None
    assert after.lease_token is None


def test_already_absent_counts_and_is_told_apart(steps: Cleanup) -> None:
    row = add_ref()
    assert erase(steps) == {Outcome.ERASED: 1}
    assert reread(row).state == RefState.DELETED
    assert known(row.credential_ref).receipt == Receipt.ABSENT


def test_confirmed_after_the_horizon_it_is_final(steps: Cleanup, store: EncryptedStore) -> None:
    row = add_secret(store)
    erase(steps)
    pass_horizon()
    first = known(row.credential_ref).first_erased_at
    assert erase(steps) == {Outcome.CONFIRMED: 1}
    after = reread(row)
    assert (after.state, after.next_delete_at) == (RefState.DELETED, None)
    assert after.deleted_at is not None
    assert (known(row.credential_ref).receipt, known(row.credential_ref).first_erased_at) == (Receipt.ERASED, first)
    make_due()
    assert steps.claim(10) is None, "never again, unlike the original"


def test_one_that_is_due_before_the_horizon_is_no_confirmation(steps: Cleanup) -> None:
    row = add_ref()
    erase(steps)
    make_due()
    assert erase(steps) == {Outcome.ERASED: 1}
    assert reread(row).next_delete_at is not None


def test_a_late_write_is_erased_at_the_confirmation_and_gets_another_horizon(
    steps: Cleanup, store: EncryptedStore, files: Files, kfs_settings: Change
) -> None:
    kfs_settings(LATE_WRITE_HORIZON=100)
    row = add_ref()
    erase(steps)
    put_late(store, row)
    assert steps.claim(10) is None, "not before it is due"
    assert len(files()) == 1
    pass_horizon()
    assert erase(steps) == {Outcome.ERASED: 1}
    assert files() == []
    assert due_between(row, 99, 101)
    assert known(row.credential_ref).receipt == Receipt.ERASED
    pass_horizon()
    assert erase(steps) == {Outcome.CONFIRMED: 1}


def test_an_unavailable_store_counts_no_attempt_and_leaves_it_as_due_as_it_was(
    steps: Cleanup, store: EncryptedStore, answering: Callable[[Answer], None], files: Files
) -> None:
    row = add_secret(store, delete_attempts=3)
    answering(raising(StoreUnavailable("down")))
    erasure = claim(steps)
    with pytest.raises(StoreUnavailable):
        delete(steps, erasure)
    assert steps.settle(erasure) == {Outcome.RELEASED: 1}
    after = reread(row)
    assert (after.state, after.next_delete_at, after.delete_attempts) == (RefState.RETIRED, row.next_delete_at, 3)
    assert error_of(row) == (None, None)
    assert len(files()) == 1
    assert claim(steps).items[0].ref == row.credential_ref


def test_one_ref_that_is_unavailable_is_given_back_alone(
    steps: Cleanup, store: EncryptedStore, answering: Callable[[Answer], None]
) -> None:
    slow, fine = add_secret(store), add_secret(store)
    answering(lambda ref: StoreUnavailable("busy") if ref == slow.credential_ref else None)
    assert erase(steps) == {Outcome.ERASED: 1, Outcome.RELEASED: 1}
    assert (reread(slow).state, reread(slow).next_delete_at) == (RefState.RETIRED, slow.next_delete_at)
    assert reread(fine).state == RefState.DELETED


def test_a_store_that_denies_erases_nothing_and_fails_nothing(
    steps: Cleanup, store: EncryptedStore, answering: Callable[[Answer], None]
) -> None:
    row = add_secret(store)
    answering(raising(StoreDenied("403")))
    erasure = claim(steps)
    with pytest.raises(StoreDenied):
        delete(steps, erasure)
    assert steps.settle(erasure) == {Outcome.RELEASED: 1}
    assert (reread(row).delete_attempts, error_of(row)) == (0, (None, None))


@pytest.mark.parametrize(("attempts", "delay"), [(0, 10), (1, 20), (2, 40), (5, 320)])
def test_an_unexpected_error_is_retried_after_a_delay_that_grows(
    steps: Cleanup, store: EncryptedStore, answering: Callable[[Answer], None], attempts: int, delay: int
) -> None:
    row = add_secret(store, delete_attempts=attempts)
    answering(raising(ValueError(CANARY)))
    assert erase(steps) == {Outcome.RETRY: 1}
    after = reread(row)
    assert (after.state, after.delete_attempts) == (RefState.RETIRED, attempts + 1)
    assert error_of(row) == (RefError.DELETE_FAILED, RefError.DELETE_FAILED.message)
    assert due_between(row, delay - 1, delay + 1)
    assert known(row.credential_ref).attention is None


def test_each_of_a_batch_waits_by_its_own_attempts(
    steps: Cleanup, store: EncryptedStore, answering: Callable[[Answer], None]
) -> None:
    rows = [add_secret(store, delete_attempts=attempts) for attempts in (0, 3, 0)]
    answering(lambda _: SecretStoreError(CANARY))
    assert erase(steps) == {Outcome.RETRY: 3}
    for row, delay in zip(rows, (10, 80, 10), strict=True):
        assert due_between(row, delay - 1, delay + 1)


def test_after_park_after_attempts_it_is_parked_and_still_tried_once_a_day(
    steps: Cleanup, store: EncryptedStore, answering: Callable[[Answer], None], kfs_settings: Change, files: Files
) -> None:
    kfs_settings(PARK_AFTER=3)
    row, others = add_secret(store), [add_secret(store) for _ in range(3)]
    answering(lambda ref: SecretStoreError(CANARY) if ref == row.credential_ref else None)
    assert erase(steps) == {Outcome.RETRY: 1, Outcome.ERASED: 3}
    make_due(row.credential_ref)
    assert erase(steps) == {Outcome.RETRY: 1}
    for _ in range(2):
        make_due(row.credential_ref)
        assert erase(steps) == {Outcome.PARKED: 1}
        assert reread(row).state == RefState.RETIRED
        assert error_of(row) == (RefError.NEEDS_ATTENTION, RefError.NEEDS_ATTENTION.message)
        assert due_between(row, 24 * HOUR - 1, 24 * HOUR + 1)
        assert known(row.credential_ref).attention == Attention.ERASURE_FAILS
    assert {reread(one).state for one in others} == {RefState.DELETED}
    assert len(files()) == 1
    answering(lambda _: None)
    make_due(row.credential_ref)
    assert erase(steps) == {Outcome.ERASED: 1}
    assert (error_of(row), known(row.credential_ref).attention) == ((None, None), None)


def test_what_the_store_retains_waits_until_then_and_never_reads_deleted(
    steps: Cleanup, store: EncryptedStore, answering: Callable[[Answer], None]
) -> None:
    row, until = add_secret(store), datetime(2099, 1, 1, tzinfo=UTC)
    answering(lambda _: SecretRetained(until))
    assert erase(steps) == {Outcome.RETAINED: 1}
    after = reread(row)
    assert (after.state, after.deleted_at, after.next_delete_at) == (RefState.RETIRED, None, until)
    assert error_of(row) == (RefError.RETAINED, RefError.RETAINED.message)
    assert (after.delete_attempts, known(row.credential_ref).attention) == (0, Attention.RETAINED)
    assert store.get(scope_of_row(row), row.credential_ref) == {"token": "made-up"}
    answering(lambda _: None)
    make_due()
    assert erase(steps) == {Outcome.ERASED: 1}
    assert known(row.credential_ref).attention is None


@pytest.mark.parametrize(
    ("until", "delay"), [(None, 24 * HOUR), (datetime(2000, 1, 1, tzinfo=UTC), 10)], ids=["unknown", "past"]
)
def test_a_store_that_names_no_moment_to_come_is_not_asked_all_the_time(
    steps: Cleanup,
    store: EncryptedStore,
    answering: Callable[[Answer], None],
    until: datetime | None,
    delay: float,
) -> None:
    row = add_secret(store)
    answering(lambda _: SecretRetained(until))
    assert erase(steps) == {Outcome.RETAINED: 1}
    assert due_between(row, delay - 1, delay + 1)


def test_a_confirmation_that_fails_reads_retired_until_it_is_done(
    steps: Cleanup, store: EncryptedStore, answering: Callable[[Answer], None]
) -> None:
    row = add_ref(situation="deleted, due")
    put_late(store, row)
    answering(lambda _: SecretStoreError(CANARY))
    assert erase(steps) == {Outcome.RETRY: 1}
    after = reread(row)
    assert (after.state, after.deleted_at) == (RefState.RETIRED, None), "a value can be read back"


ODD: dict[str, dict[str, Any]] = {
    "a blank tenant": {"tenant_id": " "},
    "a tenant that is too long": {"tenant_id": "t" * 256},
    "no ref": {"credential_ref": "no-ref"},
    "a ref in upper case": {"credential_ref": "source-secret:v1:A0000000-0000-4000-8000-000000000000"},
    "a path": {"credential_ref": "../../etc/passwd"},
    "a backslash": {"credential_ref": "C:\\secrets\\x"},
    "hexadecimal": {"credential_ref": "\\x4"},
    "an empty ref": {"credential_ref": ""},
    "not ASCII": {"credential_ref": "é\U0001f511"},
}


@pytest.mark.parametrize("odd", ODD)
def test_a_row_that_cannot_be_is_parked_in_the_end_and_stops_nobody(
    steps: Cleanup, store: EncryptedStore, kfs_settings: Change, odd: str
) -> None:
    kfs_settings(PARK_AFTER=2)
    row, fine = add_ref(**ODD[odd]), add_secret(store)
    assert erase(steps) == {Outcome.RETRY: 1, Outcome.ERASED: 1}
    make_due(row.credential_ref)
    assert erase(steps) == {Outcome.PARKED: 1}
    assert reread(row).state == RefState.RETIRED
    assert known(row.credential_ref).attention == Attention.ERASURE_FAILS
    assert reread(fine).state == RefState.DELETED


def test_only_rows_that_cannot_be_are_settled_without_the_store(steps: Cleanup) -> None:
    add_ref(tenant_id=" ")
    erasure = claim(steps)
    assert steps.start_delete(erasure)
    assert erasure.call is None
    steps.finish_delete(erasure)
    assert not steps.start_delete(erasure)
    assert steps.settle(erasure) == {Outcome.RETRY: 1}


@pytest.mark.parametrize(
    "error", [ValueError(CANARY), SecretStoreError(CANARY), StoreUnavailable(CANARY), SecretRetained()]
)
def test_the_ledger_never_holds_text_from_outside(
    steps: Cleanup,
    store: EncryptedStore,
    answering: Callable[[Answer], None],
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    error.args = (CANARY,)
    row = add_secret(store)
    answering(raising(error))
    erasure = claim(steps)
    try:
        delete(steps, erasure)
    except StoreUnavailable:
        pass
    except SecretStoreError as failed:
        erasure.items[0].result = failed
    steps.settle(erasure)
    assert CANARY not in str(table_contents())
    assert CANARY not in caplog.text
    code, message = error_of(row)
    assert (code, message) in [(None, None), *((one.value, one.message) for one in RefError)]


def test_killed_after_the_delete_and_before_the_commit_it_is_erased_once(steps: Cleanup, store: EncryptedStore) -> None:
    """As after a crash: the delete is made, nothing is settled, the lease runs out."""
    row = add_secret(store)
    delete(steps, claim(steps))
    assert reread(row).state == RefState.DELETING
    LedgerRow.objects.update(lease_expires_at=row.created_at)
    assert erase(steps) == {Outcome.ERASED: 1}
    after = reread(row)
    assert (after.state, known(row.credential_ref).receipt) == (RefState.DELETED, Receipt.ABSENT)
    assert after.delete_attempts == 1, "its worker died while it was leased alone"
    assert after.last_error_code is None


def test_a_secret_in_use_is_never_touched_by_all_this(
    steps: Cleanup, store: EncryptedStore, answering: Callable[[Answer], None], files: Files
) -> None:
    make_source()
    for situation in ("retired, due", "deleted, due", "deleting, expired"):
        add_secret(store, None, situation)
    answering(lambda _: None)
    erase_all(steps)
    assert len(files()) == 1
    assert check_invariants("default", store) == []

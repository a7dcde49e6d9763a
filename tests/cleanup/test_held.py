"""A ref that was due while a source named it is held, and dated again as soon as nobody names it."""

from __future__ import annotations

from typing import Any

import pytest

from kfs_credentials import services
from kfs_credentials.cleanup import Cleanup, Outcome
from kfs_credentials.errors import StoreUnavailable
from kfs_credentials.models import RefState, SecretObject, Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.repairs import Repair
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.worker import End
from tests.cleanup.conftest import Other
from tests.cleanup.rows import PAST, add_ref, add_secret, bare_source, in_database, name_ref, reread
from tests.cleanup.runs import Change, NewSteps, claim
from tests.cleanup.workers import instead_of_waiting, new_worker

pytestmark = pytest.mark.django_db(transaction=True)


def held_ref(steps: Cleanup, store: EncryptedStore) -> tuple[Source, LedgerRow]:
    """Make a source that names a ref which was due, and which a claim has come across."""
    source = bare_source()
    row = add_secret(store, source, "retired, due")
    name_ref(source, row.credential_ref)
    assert claim(steps).in_use == [row.credential_ref]
    assert reread(row).next_delete_at is None
    return source, row


@pytest.mark.parametrize("how", ["rotated", "revoked", "deleted"])
def test_a_service_that_lets_go_of_it_dates_it(steps: Cleanup, store: EncryptedStore, how: str) -> None:
    source, row = held_ref(steps, store)
    of: dict[str, Any] = {"tenant": source.knowledge_space.tenant_id, "source_id": source.pk}
    match how:
        case "rotated":
            services.rotate_credentials(**of, credentials={"token": "newer"})
        case "revoked":
            services.revoke_credentials(**of)
        case _:
            services.delete_source(**of)
    after = reread(row)
    assert (after.state, after.next_delete_at is None) == (RefState.RETIRED, False)


def test_a_repair_that_finds_it_named_by_nobody_any_more_dates_it(steps: Cleanup, store: EncryptedStore) -> None:
    source, row = held_ref(steps, store)
    name_ref(source, None)
    assert steps.repair(row.credential_ref) is Repair.FINE
    assert reread(row).next_delete_at is not None


def test_one_that_was_given_up_is_never_dated(steps: Cleanup, store: EncryptedStore) -> None:
    source, row = held_ref(steps, store)
    SecretObject.objects.filter(pk=row.credential_ref).update(abandoned_at=PAST)
    name_ref(source, None)
    assert steps.repair(row.credential_ref) is Repair.FINE
    assert reread(row).next_delete_at is None


def test_a_drain_gives_up_if_the_store_is_away_during_every_repair(
    store: EncryptedStore, kfs_settings: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of its sweep that move nothing are no moves."""
    kfs_settings(RETRY_MAX=0, LEASE=0.05)
    source = bare_source()
    row = add_secret(store, source, "retired")
    SecretObject.objects.filter(pk=row.credential_ref).update(first_claimed_at=PAST)
    name_ref(source, row.credential_ref)

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(EncryptedStore, "_get_many", away)
    summary = new_worker().run()
    assert (summary.end, summary.reason) == (End.UNREACHABLE, "the secret store is out of reach: away")


def test_a_store_that_is_away_for_the_last_look_ends_no_run(
    store: EncryptedStore, other: Other, kfs_settings: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source whose row somebody held during the sweep is looked after once more, before the end."""
    kfs_settings(ERASE_GRACE=0, LATE_WRITE_HORIZON=0, LOCK_TIMEOUT=0.05, RECOVER_AFTER=0)
    source = bare_source()
    row = add_secret(store, source, "retired")
    SecretObject.objects.filter(pk=row.credential_ref).update(first_claimed_at=PAST)
    LedgerRow.objects.filter(pk=row.pk).update(next_delete_at=None)
    name_ref(source, row.credential_ref)
    other.execute("SELECT FROM sources FOR UPDATE")
    worker = new_worker()
    real, answers = EncryptedStore._get_many, iter([None, StoreUnavailable("away")])

    def sometimes(*arguments: object, **options: object) -> object:
        if (error := next(answers, None)) is not None:
            raise error
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(EncryptedStore, "_get_many", sometimes)

    def let_go() -> bool:
        other.rollback()
        return True

    monkeypatch.setattr(worker, "_quiet", let_go)
    instead_of_waiting(worker, monkeypatch, lambda _: None)
    summary = worker.run()
    assert (summary.end, summary.repairs[Repair.RESCUED]) == (End.DRAINED, 1)
    assert reread(row).state == RefState.DELETED


def test_a_row_that_may_have_killed_its_worker_is_claimed_alone(steps: Cleanup, new_steps: NewSteps) -> None:
    """Beside another batch it could not be held responsible: it waits until that one is settled."""
    suspect = add_ref(situation="deleting, expired")
    for _ in range(2):
        add_ref()
    assert steps.claim(10, beside=True) is None
    batch = claim(steps)
    assert [item.ref for item in batch.items] == [suspect.credential_ref]
    assert (batch.lease.size, reread(suspect).delete_attempts) == (1, 1)
    beside = steps.claim(10, beside=True)
    assert beside is not None
    assert len(beside.items) == 2


def test_a_single_ref_beside_another_batch_does_not_count_as_alone(steps: Cleanup) -> None:
    add_ref()
    erasure = steps.claim(10, beside=True)
    assert erasure is not None
    assert erasure.lease.size == 2
    in_database("UPDATE source_secret_lifecycle_refs SET lease_expires_at = now()")
    again = claim(steps)
    assert (again.lease.size, LedgerRow.objects.get().delete_attempts) == (1, 0)


def test_what_was_given_back_does_not_count_towards_the_limit(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [add_secret(store) for _ in range(4)]
    real, answers = EncryptedStore._delete_many, iter([StoreUnavailable("away")])

    def sometimes(*arguments: object, **options: object) -> object:
        if (error := next(answers, None)) is not None:
            raise error
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(EncryptedStore, "_delete_many", sometimes)
    worker = new_worker(batch_size=2, limit=2)
    instead_of_waiting(worker, monkeypatch, lambda _: None)
    summary = worker.run()
    assert (summary.end, summary.outcomes[Outcome.ERASED]) == (End.LIMIT, 2)
    assert sum(reread(row).state == RefState.DELETED for row in rows) == 2

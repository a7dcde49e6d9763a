"""The loop where the store is slow, out of reach, refuses, or fails for single refs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.utils import timezone

from kfs_credentials.cleanup import Cleanup, Erasure, Outcome
from kfs_credentials.cleanup_worker import CleanupWorker
from kfs_credentials.errors import (
    SecretRetained,
    SecretStoreError,
    StoreDenied,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.models import Attention, RefState, Round, SecretObject
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.repairs import Repair
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.worker import End
from tests.cleanup.rows import FUTURE, PAST, add_secret, make_source, put_late, ref_of, reread
from tests.cleanup.workers import (
    before_each_look,
    failing_deletes,
    failing_lists,
    failing_reads,
    failing_refs,
    instead_of_waiting,
    leased,
    new_worker,
    running,
    time_passes,
)
from tests.invariants import check_invariants
from tests.leases import outlast_a_lease
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)

Change = Callable[..., None]
Files = Callable[[], list[Path]]
Other = psycopg.Connection[Any]
DOWN = StoreUnavailable("down")


@pytest.fixture(autouse=True)
def _at_once(store: EncryptedStore, kfs_settings: Change) -> None:
    kfs_settings(ERASE_GRACE=0, LATE_WRITE_HORIZON=0)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> CleanupWorker:
    """A worker that waits for nothing."""
    made = new_worker()
    instead_of_waiting(made, monkeypatch, lambda _: None)
    return made


def attempts() -> set[tuple[str, int]]:
    return set(LedgerRow.objects.values_list("state", "delete_attempts"))


# Out of reach.


def test_an_outage_costs_no_attempt_and_ends_by_itself(
    store: EncryptedStore, files: Files, kfs_settings: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfs_settings(RETRY_MAX=0.01, RETRY_BASE=0.01)
    for _ in range(5):
        add_secret(store)
    calls = failing_deletes(monkeypatch, *[DOWN] * 4)
    summary = new_worker().run()
    assert summary.outcomes == {Outcome.RELEASED: 20, Outcome.ERASED: 5, Outcome.CONFIRMED: 5}
    assert summary.end is End.DRAINED
    assert (calls, attempts(), files()) == ([5] * 6, {("deleted", 0)}, [])


def test_a_batch_that_the_store_does_not_do_in_time_makes_the_next_ones_smaller_for_a_while(
    store: EncryptedStore, worker: CleanupWorker, monkeypatch: pytest.MonkeyPatch, kfs_settings: Change
) -> None:
    kfs_settings(LATE_WRITE_HORIZON=600)
    for _ in range(60):
        add_secret(store)
    calls = failing_deletes(monkeypatch, *[StoreUnavailable("late", late=True)] * 2)
    worker.batch_size = worker._size = worker._store_size = 40
    worker.due_only = True
    assert worker.run().outcomes == {Outcome.RELEASED: 60, Outcome.ERASED: 60}
    assert calls == [40, 20, 20, 10, 11, 12, 7]


def test_what_the_store_asks_for_is_kept(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    add_secret(store)
    failing_deletes(monkeypatch, StoreUnavailable("busy", retry_after=30), DOWN)
    worker = new_worker()
    asked: list[float | None] = []

    def at_once(at_least: float | None = None) -> float:
        asked.append(at_least)
        return 0.0

    monkeypatch.setattr(worker._store_backoff, "next", at_once)
    assert worker.run().end is End.DRAINED
    assert asked == [30, None]


def test_each_outage_waits_longer_and_an_answer_ends_that(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_secret(store)
    failing_deletes(monkeypatch, DOWN, DOWN, DOWN, None, DOWN)
    worker = new_worker()
    failures: list[int] = []
    backoff = worker._store_backoff

    def at_once(at_least: float | None = None) -> float:
        backoff.failures += 1
        failures.append(backoff.failures)
        return 0.0

    monkeypatch.setattr(backoff, "next", at_once)
    assert worker.run().end is End.DRAINED
    assert failures == [1, 2, 3, 1]


def test_a_store_that_stays_down_ends_the_drain_as_out_of_reach(
    store: EncryptedStore, files: Files, kfs_settings: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfs_settings(RETRY_BASE=0, RETRY_MAX=0.2, LEASE=0.2)
    add_secret(store)
    failing_deletes(monkeypatch, *[DOWN] * 1000)
    summary = new_worker().run()
    assert (summary.end, summary.reason) == (End.UNREACHABLE, "the secret store is out of reach: down")
    assert (attempts(), len(files()), leased()) == ({("retired", 0)}, 1, 0)


def test_a_store_that_is_down_for_some_refs_is_waited_for(
    store: EncryptedStore, worker: CleanupWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it cannot serve now is due at once again: without a wait it would be asked without end."""
    rows = [add_secret(store) for _ in range(3)]
    failing_refs(monkeypatch, {rows[1].credential_ref: [StoreUnavailable("slow down", retry_after=7)] * 2})
    delays: list[float] = []
    real = worker._store_backoff.next

    def watched(at_least: float | None = None) -> float:
        delays.append(real(at_least))
        return 0.0

    monkeypatch.setattr(worker._store_backoff, "next", watched)
    summary = worker.run()
    assert delays == [7, 7]
    assert summary.outcomes == {Outcome.ERASED: 3, Outcome.CONFIRMED: 3, Outcome.RELEASED: 2}
    assert (attempts(), summary.end) == ({("deleted", 0)}, End.DRAINED)


# Refuses.


@pytest.mark.parametrize("error", [StoreDenied("no"), StoreMisconfigured("no")], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("done", [0, 2])
def test_a_store_that_refuses_ends_the_run_and_nothing_is_deleted_or_counted(
    store: EncryptedStore,
    files: Files,
    kfs_settings: Change,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    done: int,
) -> None:
    kfs_settings(LATE_WRITE_HORIZON=600)
    for _ in range(9):
        add_secret(store)
    failing_deletes(monkeypatch, *[None] * done, error, error)
    summary = new_worker(batch_size=3).run()
    assert (summary.end, summary.reason) == (End.DENIED, "no")
    # Given back: the batch that was refused, and the one behind it.
    given_back = {Outcome.RELEASED: 6 if done < 2 else 3}
    assert summary.outcomes == ({Outcome.ERASED: 3 * done} if done else {}) | given_back
    assert len(files()) == 9 - 3 * done
    assert attempts() == ({("deleted", 0)} if done else set()) | {("retired", 0)}
    assert leased() == 0


@pytest.mark.parametrize("error", [StoreDenied("no"), StoreMisconfigured("no")], ids=lambda error: type(error).__name__)
def test_a_store_that_refuses_a_repair_ends_the_run(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    source = make_source()
    LedgerRow.objects.update(state=RefState.RETIRED, delete_attempts=1, next_delete_at=FUTURE)
    failing_reads(monkeypatch, error)
    summary = new_worker().run()
    assert (summary.end, summary.reason, leased()) == (End.DENIED, "no", 0)
    assert summary.repairs == {}
    assert ref_of(source) == LedgerRow.objects.get().credential_ref


# Fails for single refs.


def test_one_that_fails_is_parked_in_the_end_and_holds_nobody_up(
    store: EncryptedStore, worker: CleanupWorker, files: Files, kfs_settings: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfs_settings(RETRY_BASE=0, PARK_AFTER=3)
    rows = [add_secret(store) for _ in range(3)]
    bad = rows[1]
    failing_refs(monkeypatch, {bad.credential_ref: [SecretStoreError("canary")] * 3})
    summary = worker.run()
    assert summary.outcomes == {
        Outcome.ERASED: 2,
        Outcome.CONFIRMED: 2,
        Outcome.RETRY: 2,
        Outcome.PARKED: 1,
    }
    # Parked is a person's: nobody waits for the try of tomorrow.
    assert (summary.end, summary.findings, len(files())) == (End.DRAINED, 1, 1)
    now = reread(bad)
    assert (now.state, now.delete_attempts, now.last_error_code) == ("retired", 3, "SOURCE_SECRET_NEEDS_ATTENTION")
    assert SecretObject.objects.get(pk=bad.credential_ref).attention == Attention.ERASURE_FAILS
    # The slow tries go on, and one that works ends it.
    time_passes()
    assert new_worker().run().outcomes == {Outcome.ERASED: 1, Outcome.CONFIRMED: 1}
    assert (SecretObject.objects.get(pk=bad.credential_ref).attention, files()) == (None, [])


def test_what_the_store_keeps_waits_for_its_time(
    store: EncryptedStore, worker: CleanupWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    until = datetime(2040, 1, 2, tzinfo=timezone.get_current_timezone())
    row = add_secret(store)
    failing_refs(monkeypatch, {row.credential_ref: [SecretRetained(until)]})
    summary = worker.run()
    assert (summary.outcomes, summary.end) == ({Outcome.RETAINED: 1}, End.DRAINED)
    assert (reread(row).state, reread(row).next_delete_at) == ("retired", until)
    time_passes()
    assert new_worker().run().outcomes == {Outcome.ERASED: 1, Outcome.CONFIRMED: 1}
    assert SecretObject.objects.get().attention is None


# Slow.


def test_a_batch_that_takes_longer_than_its_lease_is_renewed(
    store: EncryptedStore, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = add_secret(store)
    real = EncryptedStore._delete_many

    def slow(store: EncryptedStore, addresses: Any, *, deadline: Any) -> Any:
        outlast_a_lease(other, "source_secret_lifecycle_refs")
        return real(store, addresses, deadline=deadline)

    monkeypatch.setattr(EncryptedStore, "_delete_many", slow)
    summary = new_worker(Cleanup(using="default", worker="tests", lease=2)).run()
    assert summary.outcomes == {Outcome.ERASED: 1, Outcome.CONFIRMED: 1}
    assert (reread(row).delete_attempts, summary.lost) == (0, 0)


def test_a_stop_does_not_wait_for_a_store_that_hangs(
    store: EncryptedStore, kfs_settings: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfs_settings(STORE_TIMEOUT=3600)
    for _ in range(2):
        add_secret(store)
    never, entered = threading.Event(), threading.Event()

    def hang(store: EncryptedStore, addresses: Any, *, deadline: Any) -> Any:
        entered.set()
        never.wait()
        raise StoreUnavailable("late")

    monkeypatch.setattr(EncryptedStore, "_delete_many", hang)
    monkeypatch.setattr("kfs_credentials.worker.STOP_WITHIN", 0.1)
    worker = new_worker()
    with running(worker):
        assert entered.wait(PATIENCE)
    never.set()
    assert worker.summary.outcomes == {Outcome.RELEASED: 2}
    assert (worker.summary.end, attempts(), leased()) == (End.INTERRUPTED, {("retired", 0)}, 0)


def test_a_lease_that_is_lost_meanwhile_writes_nothing(
    store: EncryptedStore, worker: CleanupWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next claim takes the refs over; they are absent by then, and that is as good."""
    rows = [add_secret(store) for _ in range(4)]
    real, lost = worker.steps.finish_delete, list[Erasure]()

    def lose(erasure: Erasure) -> None:
        real(erasure)
        if not lost:
            erasure.lease.confirmed_at -= 61
            LedgerRow.objects.leased().update(lease_expires_at=PAST)
            lost.append(erasure)

    monkeypatch.setattr(worker.steps, "finish_delete", lose)
    summary = worker.run()
    assert (summary.end, summary.outcomes[Outcome.CONFIRMED]) == (End.DRAINED, 4)
    assert len(lost) == 1
    assert set(SecretObject.objects.values_list("receipt", flat=True)) == {"absent"}
    assert {reread(row).delete_attempts for row in rows} == {0}


def test_a_lease_that_is_lost_while_room_is_made_is_one_like_any_other(
    store: EncryptedStore, worker: CleanupWorker, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen for longer than its lease, on a disk that is full: the batch is given back, and the worker goes on."""
    rows = [add_secret(store) for _ in range(4)]
    replace, room = EncryptedStore._replace_probe, worker.steps._make_room
    frozen = list[Erasure]()

    def replace_probe(store: EncryptedStore, probe: Any, *, deadline: Any) -> None:
        if len(files()) == 4:
            raise StoreFull("no room")
        replace(store, probe, deadline=deadline)

    def make_room(store: Any, erasure: Erasure, *rest: Any) -> None:
        if not frozen:
            frozen.append(erasure)
            erasure.lease.confirmed_at -= 61
            LedgerRow.objects.leased().update(lease_expires_at=PAST)
        room(store, erasure, *rest)

    monkeypatch.setattr(EncryptedStore, "_replace_probe", replace_probe)
    monkeypatch.setattr(worker.steps, "_make_room", make_room)
    summary = worker.run()
    assert (summary.end, summary.outcomes) == (End.DRAINED, {Outcome.ERASED: 4, Outcome.CONFIRMED: 4})
    assert (len(frozen), files(), leased()) == (1, [], 0)
    assert {reread(row).delete_attempts for row in rows} == {0}


def test_the_look_at_the_probe_before_room_is_made_lets_leases_be_renewed(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_secret(store)
    steps, renewed = Cleanup(using="default", worker="tests", lease=60.0), threading.Event()
    erasure = steps.claim(1)
    assert erasure is not None
    real = EncryptedStore._read_probe

    def slow(store: EncryptedStore) -> Any:
        assert renewed.wait(PATIENCE)
        return real(store)

    monkeypatch.setattr(EncryptedStore, "_read_probe", slow)
    erasure.erasing = erasure.items
    addresses = [address for item in erasure.items if (address := item.address()) is not None]
    assert steps._make_room(store, erasure, addresses, renewed.set)
    assert erasure.made_room == {addresses[0].ref}


def test_rows_that_another_worker_took_over_are_lost_and_the_others_settled(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, kfs_settings: Change
) -> None:
    kfs_settings(LATE_WRITE_HORIZON=600)
    rows = [add_secret(store) for _ in range(3)]
    worker = new_worker(due_only=True)
    real = worker.steps.finish_delete

    def lose(erasure: Erasure) -> None:
        real(erasure)
        LedgerRow.objects.filter(pk=rows[0].pk).update(lease_token="00000000-0000-0000-0000-000000000001")

    monkeypatch.setattr(worker.steps, "finish_delete", lose)
    summary = worker.run()
    assert (summary.outcomes, summary.lost, summary.end) == ({Outcome.ERASED: 2}, 1, End.DRAINED)
    assert reread(rows[0]).state == RefState.DELETING


# Not too fast.


def test_a_limited_run_takes_a_seconds_worth_at_a_time(
    store: EncryptedStore, kfs_settings: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfs_settings(RATE_LIMIT=40, LATE_WRITE_HORIZON=600)
    for _ in range(50):
        add_secret(store)
    calls = failing_deletes(monkeypatch)
    summary = new_worker(batch_size=500, due_only=True).run()
    assert (calls, summary.outcomes) == ([40, 10], {Outcome.ERASED: 50})


def test_a_limited_run_waits_before_it_takes_more(
    store: EncryptedStore, kfs_settings: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfs_settings(RATE_LIMIT=0.001, LATE_WRITE_HORIZON=600)
    for _ in range(2):
        add_secret(store)
    calls = failing_deletes(monkeypatch)
    worker = new_worker(due_only=True)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        assert calls == [1] * len(waits)
        worker._pace._free_at = 0.0

    instead_of_waiting(worker, monkeypatch, wait)
    assert worker.run().outcomes == {Outcome.ERASED: 2}
    assert len(waits) == 2
    assert all(500 < seconds <= 1000 for seconds in waits)


# Rounds.


def test_the_sweep_is_made_again_if_the_store_failed_in_the_middle_of_its_repairs(
    store: EncryptedStore, worker: CleanupWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [make_source() for _ in range(3)]
    before = [ref_of(source) for source in sources]
    # Claimed once, by the Node service: they cannot be used again, only copied.
    LedgerRow.objects.update(state=RefState.RETIRED, delete_attempts=1, next_delete_at=FUTURE)
    failing_reads(monkeypatch, None, DOWN)
    sweeps: list[float] = []
    real = worker.steps.begin_sweep

    def begin(*, every: float) -> Any:
        sweeps.append(every)
        return real(every=every)

    monkeypatch.setattr(worker.steps, "begin_sweep", begin)
    before_each_look(worker, time_passes)
    summary = worker.run()
    assert sweeps == [0.0, 0.0]
    assert summary.repairs == {Repair.RESCUED: 3}
    assert summary.end is End.DRAINED
    assert not set(before) & {ref_of(source) for source in sources}
    assert check_invariants("default", store) == []


def test_a_patrol_that_is_interrupted_begins_anew(
    store: EncryptedStore, worker: CleanupWorker, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        make_source()
    late = add_secret(store, None, "final")
    put_late(store, late)
    pages = failing_lists(monkeypatch, None, None, DOWN)
    summary = worker.run()
    assert (pages[0], pages[2] != "", pages[3]) == ("", True, "")
    assert summary.outcomes == {Outcome.ERASED: 1, Outcome.CONFIRMED: 1}
    assert (summary.end, len(files())) == (End.DRAINED, 3)
    assert Round.objects.get(name="patrol:default").completed_at is not None


def test_objects_that_no_row_accounts_for_are_told_of_and_left_alone(
    store: EncryptedStore, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        row = add_secret(store)
        SecretObject.objects.filter(pk=row.credential_ref).delete()
        row.delete()
    summary = new_worker().run()
    assert (summary.unknown, summary.findings, summary.end) == (2, 2, End.DRAINED)
    assert len(files()) == 2
    assert "has 2 objects that no ledger row accounts for: " in caplog.text


def test_a_store_that_cannot_list_is_not_patrolled(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EncryptedStore, "can_list", False)
    add_secret(store)
    assert new_worker().run().end is End.DRAINED
    assert list(Round.objects.values_list("name", flat=True)) == ["sweep"]

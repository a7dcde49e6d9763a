"""The loop: when it goes on, when it waits, when it ends and as what. Its faults: test_worker_store and _database."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db.models.functions import Now

from kfs_credentials.cleanup import Cleanup, Outcome
from kfs_credentials.cleanup_worker import CleanupSummary
from kfs_credentials.models import RefState, Round, Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.repairs import Repair
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.worker import End
from tests.cleanup.rows import (
    FUTURE,
    PAST,
    add_ref,
    add_secret,
    bare_source,
    in_database,
    make_source,
    name_ref,
    put_late,
    ref_of,
    reread,
)
from tests.cleanup.workers import (
    before_each_look,
    failing_deletes,
    instead_of_waiting,
    leased,
    new_worker,
    running,
    spy,
    time_passes,
    together,
)
from tests.factories import SpaceFactory
from tests.invariants import check_invariants
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

Change = Callable[..., None]
Files = Callable[[], list[Path]]
Other = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def _at_once(store: EncryptedStore, kfs_settings: Change) -> None:
    kfs_settings(ERASE_GRACE=0, LATE_WRITE_HORIZON=0)


def states() -> dict[str, int]:
    found: dict[str, int] = {}
    for state, due in LedgerRow.objects.values_list("state", "next_delete_at"):
        name = "final" if state == RefState.DELETED and due is None else state
        found[name] = found.get(name, 0) + 1
    return found


# Draining.


def test_drains_to_the_last_ref(store: EncryptedStore, files: Files) -> None:
    kept = make_source()
    for _ in range(25):
        add_secret(store)
    worker = new_worker()
    summary = worker.run()
    assert summary.outcomes == {Outcome.ERASED: 25, Outcome.CONFIRMED: 25}
    assert (summary.end, summary.reason, summary.lost, summary.findings) == (End.DRAINED, "", 0, 0)
    assert states() == {"final": 25, "active": 1}
    assert len(files()) == 1
    assert check_invariants("default", store) == []
    assert LedgerRow.objects.get(state="active").credential_ref == ref_of(kept)


def test_nothing_to_do_ends_at_once() -> None:
    assert new_worker().run() == CleanupSummary()
    assert set(Round.objects.values_list("name", "found")) == {("sweep", 0), ("patrol:default", 0)}
    assert not Round.objects.filter(completed_at__isnull=True).exists()


def test_what_nobody_names_is_retired_and_erased_in_the_same_run(store: EncryptedStore, files: Files) -> None:
    gone = make_source()
    in_database("DELETE FROM knowledge_spaces WHERE id = %s", gone.knowledge_space_id)
    add_secret(store, None, "staged, unused")
    summary = new_worker().run()
    assert (summary.retired, summary.outcomes[Outcome.CONFIRMED], summary.end) == (2, 2, End.DRAINED)
    assert (states(), files()) == ({"final": 2}, [])


def test_waits_for_grace_and_horizon_and_patrols_when_nothing_is_left(
    store: EncryptedStore, kfs_settings: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfs_settings(LATE_WRITE_HORIZON=600)
    add_secret(store, None, "retired", next_delete_at=FUTURE)
    kfs_settings(RETRY_MAX=3600)
    worker = new_worker()
    looks = before_each_look(worker, lambda look: time_passes() if look % 3 == 0 else None)
    left: list[int] = []
    spy(monkeypatch, worker.steps, "begin_patrol", lambda: left.append(LedgerRow.objects.unfinished().count()))
    summary = worker.run()
    assert (summary.outcomes, summary.end) == ({Outcome.ERASED: 1, Outcome.CONFIRMED: 1}, End.DRAINED)
    assert (len(looks) >= 6, left) == (True, [0])
    assert states() == {"final": 1}


def test_a_moment_that_is_too_far_ends_it_at_once_with_the_reason(store: EncryptedStore, kfs_settings: Change) -> None:
    kfs_settings(LATE_WRITE_HORIZON=86_400)
    add_secret(store)
    add_secret(store)
    summary = new_worker().run()
    assert (summary.outcomes, summary.end) == ({Outcome.ERASED: 2}, End.STUCK)
    assert summary.reason in ("nothing of 2 is due for 86400 s", "nothing of 2 is due for 86399 s")


def test_limit_takes_so_many_and_no_more(store: EncryptedStore, kfs_settings: Change) -> None:
    kfs_settings(LATE_WRITE_HORIZON=600)
    for _ in range(7):
        add_secret(store)
    summary = new_worker(limit=5, batch_size=2).run()
    assert (summary.outcomes, summary.end) == ({Outcome.ERASED: 5}, End.LIMIT)
    assert summary.reason == "the limit of 5 is reached"
    assert states() == {"deleted": 5, "retired": 2}
    assert leased() == 0  # the sweep that it had begun included


def test_due_only_waits_for_nothing(store: EncryptedStore, kfs_settings: Change) -> None:
    kfs_settings(LATE_WRITE_HORIZON=600)
    add_secret(store)
    add_secret(store, None, "retired")
    add_ref(None, "deleting")
    summary = new_worker(due_only=True).run()
    assert (summary.outcomes, summary.end) == ({Outcome.ERASED: 1}, End.DRAINED)
    assert states() == {"deleted": 1, "retired": 1, "deleting": 1}
    assert not Round.objects.filter(completed_at__isnull=True).exists()


def test_progress_is_told_after_each_batch(store: EncryptedStore, kfs_settings: Change) -> None:
    kfs_settings(LATE_WRITE_HORIZON=600)
    for _ in range(5):
        add_secret(store)
    seen: list[int] = []
    new_worker(
        batch_size=2, due_only=True, progress=lambda summary: seen.append(summary.outcomes[Outcome.ERASED])
    ).run()
    assert seen == [2, 4, 5]


def test_the_steps_of_one_batch_in_order(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Original 77: of two retired refs one tick erases one, in this order."""
    add_secret(store)
    add_secret(store)
    worker = new_worker(batch_size=1, limit=1)
    taken: list[str] = []
    for name in ("claim", "start_delete", "renew", "finish_delete", "settle", "reconcile", "begin_sweep", "patrol"):
        spy(monkeypatch, worker.steps, name, partial(taken.append, name))
    worker.run()
    # While the store erases, the others are looked after. A second start_delete: is there another store to ask?
    meanwhile = {"reconcile", "begin_sweep", "patrol"}
    assert [step for step in taken if step not in meanwhile] == [
        *("claim", "start_delete", "finish_delete", "start_delete", "settle"),
    ]
    assert states() == {"deleted": 1, "retired": 1}


def test_a_late_write_is_erased_once_its_tombstone_is_due_and_not_before(
    store: EncryptedStore, files: Files, kfs_settings: Change
) -> None:
    """Original 72."""
    kfs_settings(LATE_WRITE_HORIZON=600)
    row = add_secret(store)
    new_worker(due_only=True).run()
    assert files() == []
    put_late(store, row)
    summary = new_worker(due_only=True).run()
    assert (summary.outcomes, len(files())) == ({}, 1)
    time_passes()
    summary = new_worker(due_only=True).run()
    # It was there once more, and gets another horizon.
    assert (summary.outcomes, files(), states()) == ({Outcome.ERASED: 1}, [], {"deleted": 1})
    time_passes()
    assert new_worker(due_only=True).run().outcomes == {Outcome.CONFIRMED: 1}
    assert states() == {"final": 1}


def test_what_is_written_after_the_confirmation_is_found_by_the_patrol(store: EncryptedStore, files: Files) -> None:
    row = add_secret(store, None, "final")
    put_late(store, row)
    summary = new_worker().run()
    assert (summary.outcomes, summary.end) == ({Outcome.ERASED: 1, Outcome.CONFIRMED: 1}, End.DRAINED)
    assert (files(), states()) == ([], {"final": 1})


# Waiting for others.


def test_waits_for_the_lease_of_a_worker_that_died(store: EncryptedStore) -> None:
    """Original 80: it died between the erasure and the commit."""
    row = add_secret(store)
    dead = Cleanup(using="default", worker="dead", lease=60.0)
    erasure = dead.claim(1)
    assert erasure is not None
    dead.start_delete(erasure)
    dead.finish_delete(erasure)
    worker = new_worker()
    before_each_look(worker, _expire_leases)
    summary = worker.run()
    assert summary.end is End.DRAINED
    assert (states(), reread(row).delete_attempts) == ({"final": 1}, 1)  # it was leased alone


def test_waits_for_delayed_retries(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Original 73, 79: back-off instead of at once; before the time has come there is nothing to claim."""
    row = add_secret(store)
    calls = failing_deletes(monkeypatch, RuntimeError("canary"))
    worker = new_worker()
    seen: list[tuple[Any, ...]] = []

    def look(number: int) -> None:
        if number == 1:
            now = reread(row)
            seen.append((now.state, now.delete_attempts, now.last_error_code, now.last_error_message))
            (wait,) = LedgerRow.objects.values_list("next_delete_at", flat=True)
            assert wait is not None
            assert 9 < (wait - now.updated_at).total_seconds() <= 10  # RETRY_BASE, and twice as long each time
        if number == 4:
            assert calls == [1]
            time_passes()

    before_each_look(worker, look)
    summary = worker.run()
    assert seen == [
        (
            *("retired", 1, "SOURCE_SECRET_DELETE_FAILED"),
            "The secret store could not erase the object; tried again later.",
        )
    ]
    assert summary.outcomes == {Outcome.RETRY: 1, Outcome.ERASED: 1, Outcome.CONFIRMED: 1}
    assert summary.end is End.DRAINED


def test_waits_for_a_row_that_somebody_has_locked_and_does_not_spin(
    store: EncryptedStore, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = add_secret(store)
    other.execute("SELECT FROM source_secret_lifecycle_refs WHERE id = %s FOR UPDATE", [row.pk])
    worker = new_worker()
    claims, waits = list[int](), list[float]()
    spy(monkeypatch, worker.steps, "claim", lambda: claims.append(1))

    def wait(seconds: float) -> None:
        if waits:
            assert len(claims) == 1  # one look in vain for each wait
        claims.clear()
        waits.append(seconds)
        if len(waits) == 5:
            other.rollback()

    instead_of_waiting(worker, monkeypatch, wait)
    assert worker.run().end is End.DRAINED
    assert waits[:5] == [0.05] * 5  # POLL_INTERVAL
    assert states() == {"final": 1}


def test_gives_up_when_nothing_moves_any_more(store: EncryptedStore, other: Other, kfs_settings: Change) -> None:
    kfs_settings(RETRY_BASE=0, RETRY_MAX=0, LEASE=0.1)
    row = add_secret(store)
    other.execute("SELECT FROM source_secret_lifecycle_refs WHERE id = %s FOR UPDATE", [row.pk])
    summary = new_worker().run()
    assert (summary.outcomes, summary.end, summary.reason) == ({}, End.STUCK, "nothing has moved for 0.2 s")


def test_what_is_put_off_for_ever_is_not_waited_for_for_ever(store: EncryptedStore, kfs_settings: Change) -> None:
    """A retired ref that a live job holds is put off each time it is due: that is no move."""
    kfs_settings(RETRY_BASE=0, RETRY_MAX=0.2, LEASE=0.1, POLL_INTERVAL=0.3)
    row = add_secret(store)
    source = make_source()
    in_database(
        "INSERT INTO source_credential_backfills (id, tenant_id, knowledge_space_id, source_id, source_version, "
        "candidate_credential_ref, secret_fingerprint, run_state, retry_count, row_version, created_at, updated_at) "
        "VALUES (gen_random_uuid(), %s, %s, %s, 1, %s, repeat('0', 64), 'queued', 0, 0, now(), now())",
        *("tenant-a", source.knowledge_space_id, source.pk, row.credential_ref),
    )
    summary = new_worker().run()
    assert (summary.outcomes, summary.end, summary.reason) == ({}, End.STUCK, "nothing has moved for 0.4 s")
    assert reread(row).state == RefState.RETIRED


@pytest.mark.parametrize("name", ["sweep", "patrol:default"])
def test_a_drain_waits_for_a_round_that_a_dead_worker_had_begun(store: EncryptedStore, name: str) -> None:
    dead = Cleanup(using="default", worker="dead", lease=60.0)
    begun = dead.begin_sweep(every=0) if name == "sweep" else dead.begin_patrol("default", every=0)
    assert begun is not None
    gone = make_source()
    if name == "sweep":
        in_database("DELETE FROM sources WHERE id = %s", gone.pk)
    else:
        LedgerRow.objects.update(state=RefState.DELETED, deleted_at=Now())
        name_ref(gone, None)

    worker = new_worker()
    looks = before_each_look(worker, lambda look: _expire_leases() if look == 4 else None)
    summary = worker.run()
    assert (summary.outcomes, summary.end) == ({Outcome.ERASED: 1, Outcome.CONFIRMED: 1}, End.DRAINED)
    assert len(looks) >= 4
    # Whoever waits for nothing does not wait for that either.
    dead.leases.worker = "dead again"
    assert dead.begin_sweep(every=0) is not None
    assert new_worker(due_only=True).run().end is End.DRAINED


def _expire_leases(_: int = 0) -> None:
    LedgerRow.objects.leased().update(lease_expires_at=PAST)
    Round.objects.filter(lease_token__isnull=False).update(lease_expires_at=PAST)


@pytest.mark.parametrize("narrow", ["tenant", "space"])
def test_one_tenant_or_space_and_no_round_is_made_by_that(store: EncryptedStore, narrow: str) -> None:
    mine, others = SpaceFactory.create(tenant_id="mine"), SpaceFactory.create(tenant_id="others")
    for space in (mine, others):
        in_database("DELETE FROM sources WHERE id = %s", make_source(space).pk)
        LedgerRow.objects.filter(pk=add_secret(store).pk).update(tenant_id=space.tenant_id, knowledge_space_id=space.pk)
    LedgerRow.objects.filter(state=RefState.RETIRED).update(next_delete_at=FUTURE)
    selected = {"tenant": "mine"} if narrow == "tenant" else {"space": mine.pk}
    steps = Cleanup(using="default", worker="tests", lease=60.0, **selected)
    summary = new_worker(steps, due_only=True).run()
    assert (summary.retired, summary.outcomes) == (1, {Outcome.ERASED: 1, Outcome.CONFIRMED: 1})
    assert set(LedgerRow.objects.filter(tenant_id="others").values_list("state", flat=True)) == {"active", "retired"}
    # The others' refs were not looked at: that is no sweep that anybody may rely on.
    assert list(Round.objects.values_list("name", "completed_at", "lease_token")) == [("sweep", None, None)]


def test_two_drains_at_once(store: EncryptedStore, files: Files) -> None:
    for _ in range(60):
        add_secret(store)
    in_database("DELETE FROM sources WHERE id = %s", make_source().pk)
    workers = [
        new_worker(Cleanup(using="default", worker=name, lease=60.0), batch_size=7, due_only=False) for name in "ab"
    ]
    together(*workers)
    total = workers[0].summary.outcomes + workers[1].summary.outcomes
    assert (total[Outcome.ERASED], total[Outcome.CONFIRMED], total[Outcome.RETRY]) == (61, 61, 0)
    assert [(worker.summary.end, worker.summary.lost) for worker in workers] == [(End.DRAINED, 0)] * 2
    assert (states(), files(), leased()) == ({"final": 61}, [], 0)


def test_a_finding_counts_once_however_often_somebody_comes_across_it(store: EncryptedStore) -> None:
    source = bare_source()
    name_ref(source, add_ref(source, "deleted, due").credential_ref)
    worker = new_worker()
    looked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        spy(patch, worker.steps, "repair", partial(looked.append, 1))
        summary = worker.run()
    assert (len(looked), summary.repairs, summary.findings) == (1, {Repair.UNREADABLE: 1}, 1)
    assert summary.end is End.DRAINED


# Staying.


def test_watch_stays_until_it_is_stopped(store: EncryptedStore) -> None:
    worker = new_worker(watch=True)
    with running(worker):
        for _ in range(2):
            add_secret(store, None, "retired")
            LedgerRow.objects.filter(state=RefState.RETIRED).update(next_delete_at=PAST)
            until(lambda: not LedgerRow.objects.filter(next_delete_at__isnull=False).exists())
    assert worker.summary.outcomes == {Outcome.ERASED: 2, Outcome.CONFIRMED: 2}
    assert (worker.summary.end, worker.summary.reason) == (End.INTERRUPTED, "interrupted by a signal")


@pytest.mark.parametrize("every", [0, 300])
def test_an_idle_watch_does_the_same_few_things_each_time(
    kfs_settings: Change, monkeypatch: pytest.MonkeyPatch, every: float
) -> None:
    """With a period of 0 a round would be due whenever one is over."""
    kfs_settings(RECOVER_AFTER=every, LATE_WRITE_HORIZON=every, POLL_INTERVAL=300)
    make_source()
    worker = new_worker(watch=True)
    taken: list[str] = []
    for name in ("claim", "reconcile", "begin_sweep", "sweep", "begin_patrol", "patrol", "complete", "purge"):
        spy(monkeypatch, worker.steps, name, partial(taken.append, name))
    waits: list[list[str]] = []

    def wait(_: float) -> None:
        waits.append(taken.copy())
        taken.clear()
        if len(waits) == 4:
            worker.stop.ask()

    instead_of_waiting(worker, monkeypatch, wait)
    worker.run()
    assert (waits[0].count("begin_sweep"), waits[0].count("begin_patrol")) == (1, 1)
    assert waits[1:] == [["claim"]] * 3


def test_active_refs_are_left_alone(store: EncryptedStore, files: Files) -> None:
    """Original 76."""
    for _ in range(3):
        make_source()
    summary = new_worker().run()
    assert summary == CleanupSummary()
    assert len(files()) == 3
    assert Source.objects.referenced().count() == 3

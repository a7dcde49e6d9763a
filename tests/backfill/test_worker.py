"""The loop: when it goes on, when it waits, when it ends and as what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections
from django.db.models.functions import Now

from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillSummary, BackfillWorker
from kfs_credentials.batch import Batch, Move
from kfs_credentials.errors import ImproperlyPrepared, StoreDenied, StoreUnavailable
from kfs_credentials.models import JobError, RunState, Source, SourceCredentialBackfill
from kfs_credentials.status import read_left
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.worker import Backoff, End, Pace
from tests.backfill.conftest import Change, Other
from tests.factories import SourceFactory
from tests.leases import outlast_a_lease
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def worker(steps: Backfill) -> BackfillWorker:
    return BackfillWorker(steps, remaining=lambda: read_left("default"), batch_size=10)


@pytest.fixture
def failing(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Let the store's next calls raise these errors, one a call, before it works again."""

    def fail(*errors: Exception) -> list[int]:
        real, left, calls = store._put_many, list(errors), []

        def put_many(entries: Any, *, deadline: Any) -> Any:
            calls.append(len(entries))
            if left:
                raise left.pop(0)
            return real(entries, deadline=deadline)

        monkeypatch.setattr(store, "_put_many", put_many)
        return calls

    return fail


def test_drains_to_the_last_source(run: Callable[..., BackfillSummary]) -> None:
    SourceFactory.create_batch(25)
    summary = run()
    assert (summary.moves, summary.end, summary.lost) == ({Move.ACTIVATE: 25}, End.DRAINED, 0)
    assert read_left("default") == (0, 0, 0)
    assert Source.objects.referenced().count() == 25


def test_nothing_to_do_ends_at_once(run: Callable[..., BackfillSummary]) -> None:
    assert run() == BackfillSummary(empty_claims=1)


def test_limit_takes_so_many_and_no_more(run: Callable[..., BackfillSummary]) -> None:
    SourceFactory.create_batch(7)
    summary = run(limit=5, batch_size=2)
    assert (summary.moves, summary.end) == ({Move.ACTIVATE: 5}, End.LIMIT)
    assert summary.reason == "the limit of 5 is reached"
    assert SourceCredentialBackfill.objects.count() == 5


def test_progress_is_told_after_each_batch(run: Callable[..., BackfillSummary]) -> None:
    SourceFactory.create_batch(5)
    seen: list[int] = []
    run(batch_size=2, progress=lambda summary: seen.append(summary.moves[Move.ACTIVATE]))
    assert seen == [2, 4, 5]


def test_waits_for_a_row_that_somebody_has_locked(worker: BackfillWorker, other: Other) -> None:
    source = SourceFactory.create()
    other.execute("SELECT FROM sources WHERE id = %s FOR UPDATE", [source.pk])
    waits = 0

    def remaining() -> tuple[int, ...]:
        nonlocal waits
        waits += 1
        if waits == 2:
            other.rollback()
        return read_left("default")

    worker.remaining = remaining
    assert worker.run().moves == {Move.ACTIVATE: 1}
    assert waits >= 2


def test_a_single_job_that_cannot_be_settled_holds_nobody_up(worker: BackfillWorker, other: Other) -> None:
    locked = SourceFactory.create()
    batch = worker.steps.discover(1)
    assert batch is not None
    worker.steps.release(batch)
    worker.steps.after = None
    free = SourceFactory.create()
    other.execute("SELECT FROM sources WHERE id = %s FOR UPDATE", [locked.pk])

    def remaining() -> tuple[int, ...]:
        # That it comes here at all is the point: the locked job alone would be claimed again and again.
        assert Source.objects.get(pk=free.pk).credential_ref is not None
        other.rollback()
        return read_left("default")

    worker.remaining = remaining
    summary = worker.run()
    assert summary.moves[Move.ACTIVATE] == 2
    assert summary.moves[Move.RELEASE] >= 1


def test_whatever_ends_a_run_gives_back_what_it_had(worker: BackfillWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    SourceFactory.create_batch(25)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("made up")

    monkeypatch.setattr(worker.steps, "settle", refuse)
    with pytest.raises(RuntimeError, match="made up"):
        worker.run()
    assert set(SourceCredentialBackfill.objects.values_list("run_state", "retry_count")) == {(RunState.QUEUED, 0)}


def test_a_lease_that_is_lost_while_the_store_is_down_ends_no_run(
    worker: BackfillWorker, failing: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    SourceFactory.create_batch(20)
    failing(StoreUnavailable("down"))
    real, lost = worker._renew, []

    def lose(batch: Batch) -> None:
        batch.lease.confirmed_at -= 61
        SourceCredentialBackfill.objects.leased().update(lease_expires_at=Now() - timedelta(seconds=1))
        lost.append(batch)
        real(batch)

    monkeypatch.setattr(worker, "_renew", lose)
    assert worker.run().end is End.DRAINED
    assert lost
    assert Source.objects.referenced().count() == 20


def test_waits_for_the_lease_of_a_worker_that_died(worker: BackfillWorker, new_steps: Callable[..., Backfill]) -> None:
    SourceFactory.create()
    assert new_steps(worker="dead").discover(1) is not None

    def remaining() -> tuple[int, ...]:
        SourceCredentialBackfill.objects.leased().update(lease_expires_at=Now() - timedelta(seconds=1))
        return read_left("default")

    worker.remaining = remaining
    assert worker.run().moves == {Move.ACTIVATE: 1}


def test_gives_up_when_nothing_moves_any_more(worker: BackfillWorker, other: Other, kfs_settings: Change) -> None:
    kfs_settings(RETRY_BASE=0, RETRY_MAX=0, LEASE=0.1)
    source = SourceFactory.create()
    other.execute("SELECT FROM sources WHERE id = %s FOR UPDATE", [source.pk])
    summary = worker.run()
    assert (summary.end, summary.reason) == (End.STUCK, "nothing has moved for 0.2 s")


def test_watch_stays_until_it_is_stopped(worker: BackfillWorker) -> None:
    worker.watch = True
    thread = threading.Thread(target=_in_thread, args=(worker,))
    thread.start()
    try:
        for _ in range(2):
            SourceFactory.create()
            until(lambda: not Source.objects.legacy().exists())
    finally:
        worker.stop.ask()
        thread.join(10)
    assert not thread.is_alive()
    assert (worker.summary.moves, worker.summary.end) == ({Move.ACTIVATE: 2}, End.INTERRUPTED)


def test_a_stop_finishes_what_is_in_flight(worker: BackfillWorker) -> None:
    SourceFactory.create_batch(9)
    worker.batch_size = worker._size = 3
    worker.progress = lambda summary: worker.stop.ask()
    summary = worker.run()
    assert (summary.moves, summary.end) == ({Move.ACTIVATE: 6}, End.INTERRUPTED)
    assert SourceCredentialBackfill.objects.leased().count() == 0


def test_a_stop_does_not_wait_for_a_store_that_hangs(
    worker: BackfillWorker, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    SourceFactory.create_batch(2)
    never, entered = threading.Event(), threading.Event()

    def hang(entries: Any, *, deadline: Any) -> Any:
        entered.set()
        never.wait()
        raise StoreUnavailable("late")

    monkeypatch.setattr(store, "_put_many", hang)
    monkeypatch.setattr("kfs_credentials.worker.STOP_WITHIN", 0.1)
    thread = threading.Thread(target=_in_thread, args=(worker,))
    thread.start()
    assert entered.wait(10)
    worker.stop.ask()
    thread.join(30)
    never.set()
    assert not thread.is_alive()
    assert worker.summary.moves == {Move.RELEASE: 2}
    assert set(SourceCredentialBackfill.objects.values_list("run_state", "retry_count")) == {(RunState.QUEUED, 0)}


# The store.


def test_an_outage_of_the_store_costs_no_attempt_and_ends_by_itself(
    run: Callable[..., BackfillSummary], failing: Callable[..., list[int]], kfs_settings: Change
) -> None:
    kfs_settings(RETRY_MAX=0.01, RETRY_BASE=0.01)
    SourceFactory.create_batch(5)
    failing(*[StoreUnavailable("down")] * 4)
    summary = run()
    assert summary.moves[Move.ACTIVATE] == 5
    assert summary.moves[Move.RELEASE] >= 5
    assert set(SourceCredentialBackfill.objects.values_list("run_state", "retry_count")) == {("succeeded", 0)}


def test_what_the_store_asks_for_is_kept() -> None:
    backoff = Backoff()
    assert 0.5 <= backoff.next() <= 1
    assert backoff.next(at_least=30) == 30
    assert 2 <= backoff.next() <= 4
    backoff.reset()
    assert backoff.next() <= 1


def test_a_store_that_stays_down_ends_the_drain_as_out_of_reach(
    run: Callable[..., BackfillSummary], failing: Callable[..., list[int]], kfs_settings: Change
) -> None:
    kfs_settings(RETRY_BASE=0, RETRY_MAX=0.2, LEASE=0.2)
    SourceFactory.create()
    failing(*[StoreUnavailable("down")] * 1000)
    summary = run()
    assert (summary.end, summary.reason) == (End.UNREACHABLE, "the secret store is out of reach: down")
    assert SourceCredentialBackfill.objects.get().retry_count == 0


@pytest.mark.parametrize("batches", [1, 3])
def test_a_store_that_denies_ends_the_run_and_nothing_has_failed(
    run: Callable[..., BackfillSummary], failing: Callable[..., list[int]], batches: int
) -> None:
    SourceFactory.create_batch(3 * batches)
    failing(StoreDenied("no"))
    summary = run(batch_size=3)
    assert (summary.end, summary.reason) == (End.DENIED, "no")
    assert not SourceCredentialBackfill.objects.exclude(run_state=RunState.QUEUED).exists()
    assert set(SourceCredentialBackfill.objects.values_list("retry_count", flat=True)) == {0}


def test_unexpected_failures_are_retried_with_a_growing_delay_and_fail_in_the_end(
    run: Callable[..., BackfillSummary], failing: Callable[..., list[int]], kfs_settings: Change
) -> None:
    kfs_settings(RETRY_BASE=0, RETRY_MAX=0, MAX_ATTEMPTS=3)
    SourceFactory.create()
    calls = failing(*[RuntimeError("made up")] * 3)
    assert run().moves == {Move.RETRY: 2, Move.FAIL: 1}
    assert calls == [1] * 3
    job = SourceCredentialBackfill.objects.get()
    assert (job.run_state, job.last_error_code) == (RunState.FAILED, JobError.UNEXPECTED)


def test_a_batch_that_takes_longer_than_its_lease_is_renewed(
    worker: BackfillWorker, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, other: Other
) -> None:
    worker.steps.leases.seconds = 2.0
    SourceFactory.create()
    real = store._put_many

    def slow(entries: Any, *, deadline: Any) -> Any:
        outlast_a_lease(other, "source_credential_backfills")
        return real(entries, deadline=deadline)

    monkeypatch.setattr(store, "_put_many", slow)
    assert worker.run().moves == {Move.ACTIVATE: 1}
    assert SourceCredentialBackfill.objects.get().retry_count == 0


def test_secrets_a_second_are_limited_in_even_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000.0]
    monkeypatch.setattr("kfs_credentials.worker.time.monotonic", lambda: now[0])
    pace = Pace(100.0)
    assert (pace.batch(500), pace.batch(20), Pace(0.5).batch(500), Pace(None).batch(500)) == (100, 20, 1, 500)
    pace.spend(100)
    assert pace.delay() == 1.0
    now[0] += 0.25
    assert pace.delay() == 0.75


def test_a_limited_run_takes_a_seconds_worth_at_a_time(
    run: Callable[..., BackfillSummary], failing: Callable[..., list[int]], kfs_settings: Change
) -> None:
    kfs_settings(RATE_LIMIT=40)
    SourceFactory.create_batch(50)
    calls = failing()
    run(batch_size=500)
    assert calls == [40, 10]


# The database.


def test_a_connection_that_is_lost_is_made_anew_and_costs_no_attempt(
    worker: BackfillWorker, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, other: Other
) -> None:
    SourceFactory.create_batch(30)
    real = store._put_many

    def put_many(entries: Any, *, deadline: Any) -> Any:
        other.autocommit = True
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        return real(entries, deadline=deadline)

    monkeypatch.setattr(store, "_put_many", put_many)
    worker.steps.leases.seconds = 1.0
    assert worker.run().end is End.DRAINED
    assert Source.objects.referenced().count() == 30
    assert set(SourceCredentialBackfill.objects.values_list("run_state", "retry_count")) == {("succeeded", 0)}


def test_a_commit_whose_answer_was_lost_counts_as_done(worker: BackfillWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import OperationalError

    SourceFactory.create_batch(3)
    real = worker.steps.settle
    answers = [False]

    def settle(batch: Any) -> Any:
        moves = real(batch)
        if answers:
            answers.pop()
            raise OperationalError("server closed the connection unexpectedly")
        return moves

    monkeypatch.setattr(worker.steps, "settle", settle)
    assert worker.run().moves == {Move.ACTIVATE: 3}


def test_smaller_batches_where_a_statement_takes_too_long(worker: BackfillWorker) -> None:
    SourceFactory.create_batch(16)
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_sleep(0.05); RETURN NEW; END $$"
        )
        cursor.execute("CREATE TRIGGER slow BEFORE UPDATE ON sources FOR EACH ROW EXECUTE FUNCTION slow()")
        cursor.execute("SET statement_timeout = '300ms'")
    worker.batch_size = worker._size = 16
    try:
        summary = worker.run()
        assert summary.moves == {Move.ACTIVATE: 16}
        assert set(SourceCredentialBackfill.objects.values_list("retry_count", flat=True)) == {0}
        assert worker._size < 16
    finally:
        connections["default"].close()
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION slow CASCADE")


def test_a_database_that_refuses_says_what_to_do(run: Callable[..., BackfillSummary]) -> None:
    SourceFactory.create()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE kfs_credentials_secret_object RENAME TO hidden")
    try:
        with pytest.raises(ImproperlyPrepared, match=r"UndefinedTable, SQLSTATE 42P01.*manage.py migrate"):
            run()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE hidden RENAME TO kfs_credentials_secret_object")


def test_transactions_of_somebody_else_around_it_are_refused(steps: Backfill) -> None:
    from django.db import transaction

    with transaction.atomic(), pytest.raises(ImproperlyPrepared, match="outside of atomic"):
        steps.discover(1)


def _in_thread(worker: BackfillWorker) -> None:
    try:
        worker.run()
    finally:
        connections.close_all()

"""A pause lives in the database: nobody claims any more, and what is held ends within one lease."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillWorker
from kfs_credentials.cleanup import Cleanup
from kfs_credentials.cleanup_worker import CleanupWorker
from kfs_credentials.errors import StoreDenied, StoreUnavailable, WorkersPaused
from kfs_credentials.models import Event, Pause, Source, SourceCredentialBackfill
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.pause import current, pause_workers, resume_workers
from kfs_credentials.status import read_cleanup_left, read_left
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.worker import End
from tests.cleanup.rows import add_secret
from tests.factories import SourceFactory
from tests.management.rows import table_contents
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

WHY = {"by": "somebody", "reason": "moving the volume"}


def pause() -> None:
    assert pause_workers("default", **WHY)


@pytest.fixture
def backfill(store: EncryptedStore) -> Callable[..., BackfillWorker]:
    """Return a function that makes a worker of the backfill."""

    def make(lease: float = 60.0, **options: Any) -> BackfillWorker:
        steps = Backfill(using="default", store=store, worker="tests", lease=lease)
        return BackfillWorker(steps, **{"remaining": lambda: read_left("default"), "batch_size": 10, **options})

    return make


@pytest.fixture
def cleanup(store: EncryptedStore) -> Callable[..., CleanupWorker]:
    """Return a function that makes a worker of the cleanup."""

    def make(lease: float = 60.0, **options: Any) -> CleanupWorker:
        steps = Cleanup(using="default", worker="tests", lease=lease)
        left = {"next_move_in": lambda: read_cleanup_left("default")}
        return CleanupWorker(steps, **{**left, "batch_size": 10, "due_only": True, **options})

    return make


@contextmanager
def at_work(*workers: Any) -> Iterator[None]:
    """Run workers on threads of their own, and stop them at the end of the block."""

    def run(worker: Any) -> None:
        try:
            worker.run()
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.stop.ask()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


def is_moved(count: int) -> bool:
    return Source.objects.referenced().count() == count


def test_no_claim_is_made(backfill: Callable[..., BackfillWorker], cleanup: Callable[..., CleanupWorker]) -> None:
    """Each transaction that claims looks first, and touches nothing."""
    pause()
    before = table_contents()
    steps = backfill().steps
    for claim in (steps.claim, steps.discover, cleanup().steps.claim):
        with pytest.raises(WorkersPaused, match=r"paused by somebody at .*: moving the volume"):
            claim(10)
    assert table_contents() == before


def test_a_drain_ends_at_once(backfill: Callable[..., BackfillWorker], cleanup: Callable[..., CleanupWorker]) -> None:
    SourceFactory.create_batch(2)
    pause()
    before = table_contents()
    for worker in (backfill(), cleanup(), cleanup(due_only=False)):
        summary = worker.run()
        assert summary.end is End.PAUSED
        assert summary.reason.endswith("moving the volume")
    assert table_contents() == before


def test_a_pause_needs_no_worker(store: EncryptedStore, backfill: Callable[..., BackfillWorker]) -> None:
    """Nor does it need the one that died: what that held is taken over once the workers go on."""
    SourceFactory.create_batch(3)
    dead = backfill().steps
    assert dead.discover(2) is not None
    SourceCredentialBackfill.objects.update(lease_expires_at="2020-01-01T00:00:00Z")
    pause()
    assert backfill().run().end is End.PAUSED
    assert SourceCredentialBackfill.objects.filter(run_state="running").count() == 2
    assert resume_workers("default")
    assert backfill().run().end is End.DRAINED
    assert is_moved(3)


def test_many_workers_go_on_when_they_may(
    store: EncryptedStore, backfill: Callable[..., BackfillWorker], cleanup: Callable[..., CleanupWorker]
) -> None:
    """They stay, and find nothing lost and nothing done twice."""
    pause()
    SourceFactory.create_batch(5)
    due = add_secret(store, None, "retired, due")
    workers = [backfill(watch=True), backfill(watch=True), cleanup(watch=True, due_only=False)]
    with at_work(*workers):
        until(lambda: all(worker._was_paused for worker in workers))
        assert is_moved(0)
        resume_workers("default")
        until(lambda: is_moved(5))
        until(lambda: LedgerRow.objects.get(pk=due.pk).state == "deleted")
    assert LedgerRow.objects.filter(state="active").count() == 5
    assert LedgerRow.objects.count() == 6


def test_what_is_at_hand_is_finished(store: EncryptedStore, backfill: Callable[..., BackfillWorker]) -> None:
    """A batch whose secrets are put is settled, though the next one is not claimed any more."""
    SourceFactory.create_batch(4)
    worker = backfill(batch_size=2)
    real = worker.steps.start_put

    def start_put(batch: Any) -> None:
        real(batch)
        if current("default") is None:
            pause()

    worker.steps.start_put = start_put  # type: ignore[method-assign]
    assert worker.run().end is End.PAUSED
    assert is_moved(2)
    assert not SourceCredentialBackfill.objects.filter(run_state="running").exists()


@pytest.mark.parametrize("role", ["backfill", "cleanup"])
def test_what_takes_long_is_given_back_within_the_lease(
    role: str,
    store: EncryptedStore,
    monkeypatch: pytest.MonkeyPatch,
    backfill: Callable[..., BackfillWorker],
    cleanup: Callable[..., CleanupWorker],
) -> None:
    """The store hangs: the lease is not renewed any more, and is not left to run out either."""
    hangs, go_on = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> list[Any]:
        hangs.set()
        go_on.wait(60)
        return []

    monkeypatch.setattr(store, "_put_many", hang)
    monkeypatch.setattr(store, "_delete_many", hang)
    worker: BackfillWorker | CleanupWorker
    given_back: Any
    if role == "backfill":
        SourceFactory.create()
        worker = backfill(lease=1.5)
        given_back = SourceCredentialBackfill.objects.filter(run_state="queued")
    else:
        monkeypatch.undo()
        add_secret(store, None, "retired, due")
        monkeypatch.setattr(store, "_delete_many", hang)
        worker = cleanup(lease=1.5)
        given_back = LedgerRow.objects.filter(state="retired")
    with at_work(worker):
        assert hangs.wait(60)
        assert not given_back.exists()
        pause()
        until(lambda: given_back.all().exists())
        until(lambda: worker.summary.end is End.PAUSED)
    go_on.set()
    assert worker.summary.lost == 0


@pytest.mark.parametrize("error", [StoreDenied("the token has expired: made-up"), None], ids=["denied", "wrong place"])
def test_a_run_pauses_itself(
    error: StoreDenied | None,
    store: EncryptedStore,
    monkeypatch: pytest.MonkeyPatch,
    backfill: Callable[..., BackfillWorker],
    secrets_directory: Path,
    tmp_path: Path,
) -> None:
    """The store refuses in the middle: nothing has failed, everybody stops, and a watching worker goes on later."""
    SourceFactory.create_batch(4)
    real = store._put_many
    calls: list[int] = []

    def put_many(entries: Any, *, deadline: Any) -> Any:
        calls.append(len(entries))
        if len(calls) == 2:
            if error is not None:
                raise error
            secrets_directory.rename(tmp_path / "volume")
            secrets_directory.mkdir(mode=0o700)
        return real(entries, deadline=deadline)

    monkeypatch.setattr(store, "_put_many", put_many)
    worker = backfill(batch_size=2, watch=True)
    with at_work(worker):
        until(lambda: worker._was_paused)
        assert is_moved(2)
        found = Pause.objects.get()
        assert found.paused_by == "tests"
        assert found.reason == (
            "the secret store denies access" if error else "database and store do not know each other (no probe)"
        )
        queued = SourceCredentialBackfill.objects.filter(run_state="queued")
        assert list(queued.values_list("retry_count", flat=True)) == [0, 0]
        if error is None:
            secrets_directory.rmdir()
            (tmp_path / "volume").rename(secrets_directory)
        resume_workers("default")
        until(lambda: is_moved(4))
    assert list(Event.objects.filter(kind__in=["paused", "resumed"]).order_by("id").values_list("kind", "actor")) == [
        ("paused", "tests"),
        ("resumed", "application"),
    ]


def test_the_first_pause_stands(store: EncryptedStore) -> None:
    """Its reason is what has to be settled: a worker's own pause does not cover it."""
    pause()
    assert not pause_workers("default", by="another", reason="another one")
    assert Pause.objects.get().reason == "moving the volume"
    assert resume_workers("default")
    assert not resume_workers("default")
    assert current("default") is None


def test_an_outage_pauses_nobody(
    store: EncryptedStore,
    monkeypatch: pytest.MonkeyPatch,
    backfill: Callable[..., BackfillWorker],
    kfs_settings: Any,
) -> None:
    """A store that is only unavailable, for ten minutes and more: the run goes on by itself, and no row fails."""
    SourceFactory.create_batch(3)
    real, waited = store._put_many, [0.0]

    def put_many(entries: Any, *, deadline: Any) -> Any:
        if waited[0] < 600:
            raise StoreUnavailable("away")
        return real(entries, deadline=deadline)

    monkeypatch.setattr(store, "_put_many", put_many)
    worker = backfill()

    def wait(seconds: float) -> bool:
        waited[0] += seconds
        return False

    monkeypatch.setattr(worker.stop, "wait", wait)
    # The waits of an outage, without waiting.
    monkeypatch.setattr(worker, "_wait_for_store", lambda *_: wait(worker._store_backoff.next()))
    summary = worker.run()
    assert summary.end is End.DRAINED
    assert is_moved(3)
    assert waited[0] >= 600
    assert set(SourceCredentialBackfill.objects.values_list("retry_count", "last_error_code")) == {(0, None)}
    assert current("default") is None

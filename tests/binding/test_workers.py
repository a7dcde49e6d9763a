"""What the binding does to workers and services at work: how long they wait, whom they stop, what they forget."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from django.db import connection, connections, transaction
from pytest_django import Settings

from kfs_credentials import binding, services
from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillWorker
from kfs_credentials.binding import advance, bind, check_bound, known
from kfs_credentials.cleanup import Cleanup
from kfs_credentials.cleanup_worker import CleanupWorker
from kfs_credentials.conf import key_ring
from kfs_credentials.errors import (
    BindingBroken,
    BindingProblem,
    ImproperlyPrepared,
    KeyClosed,
    SecretNotFound,
    StoreUnavailable,
    WorkersPaused,
)
from kfs_credentials.keys import close_keys
from kfs_credentials.models import Pause, SecretObject, Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.pause import pause_workers
from kfs_credentials.status import read_cleanup_left, read_left
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.stores.values import Probe, Sighting
from kfs_credentials.worker import End
from tests.backfill.runs import execute
from tests.bound import seal_anew
from tests.cleanup.rows import add_secret, bare_source, make_source, name_ref
from tests.factories import SourceFactory
from tests.management.commands import dsn
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

Change = Callable[..., None]


def cleanup(**options: Any) -> CleanupWorker:
    steps = Cleanup(using="default", worker="tests", lease=60.0)
    left = {"next_move_in": lambda: read_cleanup_left("default")}
    return CleanupWorker(steps, **{**left, "batch_size": 10, "due_only": True, **options})


def on_thread(work: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_stop_does_not_wait_for_a_probe_that_hangs(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, kfs_settings: Change
) -> None:
    """The batch is given back, and nothing of it looks as if its worker had died."""
    add_secret(store)
    hangs, go_on = threading.Event(), threading.Event()

    def hang() -> Sighting:
        hangs.set()
        go_on.wait(60)
        return None

    monkeypatch.setattr(store, "_read_probe", hang)
    worker = cleanup(watch=True, due_only=False)
    thread = on_thread(worker.run)
    assert hangs.wait(60)
    monkeypatch.setattr("kfs_credentials.worker.STOP_WITHIN", 0.0)
    worker.stop.ask()
    thread.join(60)
    assert not thread.is_alive()
    assert not go_on.is_set()
    go_on.set()
    assert worker.summary.end is End.INTERRUPTED
    row = LedgerRow.objects.get()
    assert (row.state, row.delete_attempts, row.lease_token) == ("retired", 0, None)


def test_leases_are_renewed_while_the_probe_hangs(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claimed batch stays this worker's for as long as it takes."""
    add_secret(store)
    real, renewed = store._read_probe, threading.Event()
    steps = Cleanup(using="default", worker="tests", lease=0.6)
    renew = steps.renew

    def renewing(erasure: Any) -> None:
        before = erasure.lease.confirmed_at
        renew(erasure)
        if erasure.lease.confirmed_at > before:
            renewed.set()

    def slow() -> Sighting:
        assert renewed.wait(60)
        return real()

    monkeypatch.setattr(steps, "renew", renewing)
    monkeypatch.setattr(store, "_read_probe", slow)
    worker = CleanupWorker(steps, next_move_in=lambda: read_cleanup_left("default"), batch_size=10, due_only=True)
    summary = worker.run()
    assert summary.outcomes.total() == 1
    assert LedgerRow.objects.get().state == "deleted"


def test_what_is_in_use_is_not_forgotten_when_the_store_does_not_answer(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ref that was due and that a source names is held, and repaired before the run ends."""
    source = bare_source()
    row = add_secret(store, source, "retired, due")
    name_ref(source, row.credential_ref)
    add_secret(store, None, "retired, due")
    real, failures = store._read_probe, [StoreUnavailable("away")]

    def sometimes() -> Sighting:
        if failures:
            raise failures.pop()
        return real()

    monkeypatch.setattr(store, "_read_probe", sometimes)
    worker = cleanup()
    worker._sweep_over = True  # as after a drain's one sweep
    monkeypatch.setattr(worker, "_wait_for_store", lambda *_: None)
    worker.run()
    assert failures == []
    assert LedgerRow.objects.get(pk=row.pk).state == "active"


def test_a_cleanup_with_an_old_ring_seals_nothing_under_a_closed_key(
    store: EncryptedStore, settings: Settings, kfs_settings: Change
) -> None:
    """The probe stays under the key that is in use, so that the closed one can go."""
    (old,) = settings.KFS_CREDENTIALS["KEYS"]
    new = secrets.token_bytes(32)
    add_secret(store)
    kfs_settings(KEYS=[new, old])
    close_keys("default", [key_ring().key_ids[1]], by="tests", primary=key_ring().primary.id)
    seal_anew("default", store)
    kfs_settings(KEYS=[old, new])
    with pytest.raises(KeyClosed):
        cleanup().run()
    with pytest.raises(KeyClosed):
        bind("default", "default", by="tests")
    row = LedgerRow.objects.get()
    assert (row.state, row.delete_attempts, row.lease_token) == ("retired", 0, None)
    kfs_settings(KEYS=[new])
    check_bound("default", "default")


def test_wrong_settings_of_one_process_stop_nobody_else(
    store: EncryptedStore, settings: Settings, kfs_settings: Change
) -> None:
    """A key that it lacks, an alias that it lacks: it ends, and nobody is paused."""
    row = add_secret(store)
    key = settings.KFS_CREDENTIALS["KEYS"]
    kfs_settings(KEYS=[secrets.token_bytes(32)])
    with pytest.raises(ImproperlyPrepared, match="opens the probe"):
        cleanup().run()
    kfs_settings(KEYS=key)
    SecretObject.objects.filter(pk=row.credential_ref).update(store="archive")
    execute(
        "INSERT INTO kfs_credentials_binding SELECT 'archive', environment_id, environment, system_identifier, "
        "database_oid, epoch, shown_epoch, bound_at, bound_by, confirmed_at FROM kfs_credentials_binding"
    )
    with pytest.raises(ImproperlyPrepared, match="has no 'archive'"):
        cleanup().run()
    assert not Pause.objects.exists()
    row.refresh_from_db()
    assert (row.state, row.delete_attempts, row.lease_token) == ("retired", 0, None)


def test_a_binding_under_way_is_waited_for(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that looks in the middle of bind_secret_store pauses nobody."""
    SourceFactory.create()
    steps = Backfill(using="default", store=store, worker="tests", lease=60.0)
    worker = BackfillWorker(steps, remaining=lambda: read_left("default"), batch_size=10)
    real, waits = store._replace_probe, threading.Event()

    def slow(probe: Probe, *, deadline: Any) -> None:
        assert waits.wait(60)
        real(probe, deadline=deadline)

    monkeypatch.setattr(store, "_replace_probe", slow)
    monkeypatch.setattr(worker, "_wait_for_store", lambda *_: waits.set())
    thread = on_thread(lambda: bind("default", "default", by="tests"))
    until(lambda: (half := known("default", "default")) is not None and not half.is_confirmed)
    worker.run()
    thread.join(60)
    assert waits.is_set()
    assert not Pause.objects.exists()
    assert Source.objects.referenced().count() == 1


def test_a_pause_stops_repairs(store: EncryptedStore) -> None:
    """A rescue puts a secret."""
    source = bare_source()
    row = add_secret(store, source, "retired")
    name_ref(source, row.credential_ref)
    pause_workers("default", by="somebody", reason="moving the volume")
    with pytest.raises(WorkersPaused):
        Cleanup(using="default", worker="tests", lease=60.0).repair(row.credential_ref)
    assert LedgerRow.objects.get().state == "retired"


def test_resolve_leaves_the_callers_transaction_as_it_is(
    store: EncryptedStore, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong while the binding is looked at is caught with a savepoint."""
    source = make_source()
    files()[0].unlink()

    def fails(*_: Any) -> Any:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")

    monkeypatch.setattr(binding, "known", fails)
    with transaction.atomic():
        with pytest.raises(SecretNotFound):
            services.resolve_credentials(tenant="tenant-a", source_id=source.pk)
        assert Source.objects.filter(pk=source.pk).exists()


def test_a_role_that_may_not_ask_which_server_it_is(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with psycopg.connect(dsn(), autocommit=True) as admin:
        name = f"kfs_tests_{secrets.token_hex(4)}"
        admin.execute(f"CREATE ROLE {name}")
        try:
            execute(f"SET ROLE {name}")
            with pytest.raises(ImproperlyPrepared, match=r"GRANT EXECUTE ON FUNCTION pg_control_system\(\) to it"):
                check_bound("default", "default")
        finally:
            execute("RESET ROLE")
            admin.execute(f"DROP ROLE {name}")


def test_advances_one_after_the_other_are_no_false_alarm(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many epochs begin between the two looks of a check."""
    real = store._read_probe

    def slow() -> Sighting:
        monkeypatch.setattr(store, "_read_probe", real)
        for _ in range(5):
            advance("default", "default", worker="another")
        connections.close_all()  # those of the store's thread
        return real()

    monkeypatch.setattr(store, "_read_probe", slow)
    assert check_bound("default", "default").epoch == 5
    execute("UPDATE kfs_credentials_binding SET epoch = 4, shown_epoch = 4")
    with pytest.raises(BindingBroken) as caught:
        check_bound("default", "default")
    assert caught.value.problem is BindingProblem.OLD_DATABASE

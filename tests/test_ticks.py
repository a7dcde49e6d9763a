"""Workers tell that they are at work, and what keeps them from it."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, ProgrammingError, connection, transaction

from kfs_credentials import errors
from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillWorker
from kfs_credentials.errors import (
    DatabaseRefused,
    ImproperlyPrepared,
    KfsCredentialsError,
    StoreDenied,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.leases import seconds_from_now
from kfs_credentials.models import Refusal, RefusalReason, Tick, WorkerRole
from kfs_credentials.pause import pause_workers
from kfs_credentials.status import read_left
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.ticks import Ticker, reason_of, refuse
from tests.cleanup.rows import add_ref, in_database
from tests.cleanup.workers import new_worker
from tests.factories import SourceFactory
from tests.management.commands import Run, dsn, runner

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `manage.py` with these arguments."""
    return runner(capsys)


def refusals() -> dict[tuple[str, str], int]:
    """Return how often workers of which role have refused for which reason."""
    return {(role, reason): count for role, reason, count in Refusal.objects.values_list("role", "reason", "count")}


def backfill_worker(store: EncryptedStore) -> BackfillWorker:
    """Return a worker that drains."""
    steps = Backfill(using="default", store=store, worker="a worker", lease=60.0)
    return BackfillWorker(steps, remaining=lambda: read_left("default"), batch_size=10)


# Ticks.


def test_a_tick_says_when_and_who() -> None:
    Ticker("default", WorkerRole.CLEANUP, "one").tick()
    Tick.objects.update(ticked_at=seconds_from_now(-60))
    before = Tick.objects.get().ticked_at
    Ticker("default", WorkerRole.CLEANUP, "another").tick()
    tick = Tick.objects.get()
    assert (tick.role, tick.worker_id) == ("cleanup", "another")
    assert tick.ticked_at > before


def test_a_worker_ticks_once_a_second_at_most() -> None:
    ticker = Ticker("default", WorkerRole.CLEANUP, "one")
    ticker.tick()
    Tick.objects.all().delete()
    ticker.tick()
    assert not Tick.objects.exists()


def test_a_row_that_somebody_holds_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    Ticker("default", WorkerRole.CLEANUP, "one").tick()
    with psycopg.connect(dsn()) as other:
        other.execute("SELECT FROM kfs_credentials_tick FOR UPDATE")
        in_database("SET lock_timeout = '1ms'")
        Ticker("default", WorkerRole.CLEANUP, "another").tick()
        in_database("RESET lock_timeout")
    assert Tick.objects.get().worker_id == "one"
    assert "could not be written" not in caplog.text


def test_a_tick_that_cannot_be_written_keeps_nobody_from_working(caplog: pytest.LogCaptureFixture) -> None:
    in_database("ALTER TABLE kfs_credentials_tick RENAME TO elsewhere")
    try:
        with caplog.at_level("INFO"):
            Ticker("default", WorkerRole.CLEANUP, "one").tick()
    finally:
        in_database("ALTER TABLE elsewhere RENAME TO kfs_credentials_tick")
    assert "a tick could not be written (UndefinedTable, SQLSTATE 42P01)" in caplog.text


def test_both_workers_tick(store: EncryptedStore) -> None:
    SourceFactory.create()
    backfill_worker(store).run()
    new_worker(due_only=True).run()
    assert dict(Tick.objects.values_list("role", "worker_id")) == {"backfill": "a worker", "cleanup": "tests"}


def test_a_worker_that_only_waits_for_the_store_does_not_tick(store: EncryptedStore) -> None:
    """A worker that is alive and does nothing must not look as if it were at work."""
    worker = backfill_worker(store)
    worker._trouble = StoreUnavailable("down")
    worker._tick()
    assert not Tick.objects.exists()


# Refusals.


def test_refusals_are_counted_by_role_and_reason() -> None:
    for _ in range(3):
        refuse("default", WorkerRole.BACKFILL, RefusalReason.STORE_DENIED)
    refuse("default", WorkerRole.CLEANUP, RefusalReason.STORE_DENIED)
    refuse("default", WorkerRole.BACKFILL, RefusalReason.PAUSED)
    assert refusals() == {("backfill", "store_denied"): 3, ("cleanup", "store_denied"): 1, ("backfill", "paused"): 1}


def test_a_refusal_inside_a_transaction_does_not_break_it(caplog: pytest.LogCaptureFixture) -> None:
    in_database("ALTER TABLE kfs_credentials_refusal RENAME TO elsewhere")
    try:
        with caplog.at_level("INFO"), transaction.atomic():
            refuse("default", WorkerRole.CLEANUP, RefusalReason.PAUSED)
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
    finally:
        in_database("ALTER TABLE elsewhere RENAME TO kfs_credentials_refusal")
    assert "a refusal could not be counted (UndefinedTable, SQLSTATE 42P01)" in caplog.text


def test_every_error_that_keeps_a_worker_from_working_has_a_reason_of_the_list() -> None:
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, KfsCredentialsError)]
    named = {one.refusal for one in classes} - {None}
    assert named <= set(RefusalReason.values)
    assert {"store_denied", "store_unavailable", "not_migrated", "misconfigured"} <= named


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreUnavailable("down"), RefusalReason.STORE_UNAVAILABLE),
        (StoreDenied("no"), RefusalReason.STORE_DENIED),
        (StoreMisconfigured("where"), RefusalReason.STORE_MISCONFIGURED),
        (DatabaseRefused("no"), RefusalReason.DATABASE_REFUSED),
        (ImproperlyConfigured("no"), RefusalReason.MISCONFIGURED),
        (ImproperlyPrepared("wrong options"), None),
        (OperationalError("gone"), RefusalReason.DATABASE_UNREACHABLE),
        (ProgrammingError("no such table"), RefusalReason.DATABASE_REFUSED),
        (KeyError(), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_reason_of_an_error(error: Exception, reason: RefusalReason | None) -> None:
    assert reason_of(error) == reason


def test_a_store_that_denies_in_the_middle_counts_once(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: Any, **__: Any) -> None:
        raise StoreDenied("no")

    SourceFactory.create()
    monkeypatch.setattr(store, "_put_many", deny)
    backfill_worker(store).run()
    assert refusals() == {("backfill", "store_denied"): 1}


def test_each_wait_for_a_store_counts(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = store._delete_many
    answers = iter([StoreUnavailable("down"), StoreUnavailable("down")])

    def delete_many(addresses: Any, *, deadline: Any) -> Any:
        if (answer := next(answers, None)) is not None:
            raise answer
        return real(addresses, deadline=deadline)

    add_ref()
    monkeypatch.setattr(store, "_delete_many", delete_many)
    worker = new_worker(due_only=True)
    monkeypatch.setattr(worker.stop, "wait", lambda seconds: bool(worker.stop))
    monkeypatch.setattr(worker._store_backoff, "next", lambda at_least=None: 0.0)
    worker.run()
    assert refusals() == {("cleanup", "store_unavailable"): 2}


def test_a_pause_counts_once_and_nobody_looks_as_if_at_work(store: EncryptedStore) -> None:
    pause_workers("default", by="tests", reason="the bucket moves")
    SourceFactory.create()
    add_ref()
    backfill_worker(store).run()
    new_worker(due_only=True).run()
    assert refusals() == {("backfill", "paused"): 1, ("cleanup", "paused"): 1}
    assert not Tick.objects.exists()


@pytest.mark.parametrize("command", ["run_credential_backfill", "run_secret_cleanup"])
def test_a_command_that_cannot_begin_counts(run: Run, secrets_directory: Path, command: str) -> None:
    shutil.rmtree(secrets_directory)
    assert run(command, "--skip-checks").code == 1
    role = "backfill" if command == "run_credential_backfill" else "cleanup"
    assert refusals() == {(role, "store_misconfigured"): 1}


def test_a_database_that_refuses_a_worker_counts_once(run: Run, secrets_directory: Path) -> None:
    SourceFactory.create()
    in_database(
        "CREATE FUNCTION kfs_tests_refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION USING ERRCODE = '42501'; END $$"
    )
    in_database(
        "CREATE TRIGGER kfs_tests_refuse BEFORE UPDATE ON sources FOR EACH ROW EXECUTE FUNCTION kfs_tests_refuse()"
    )
    try:
        assert run("run_credential_backfill").code == 1
    finally:
        in_database("DROP FUNCTION kfs_tests_refuse CASCADE")
    assert refusals() == {("backfill", "database_refused"): 1}


def test_commands_that_are_no_workers_and_wrong_options_count_nothing(run: Run, secrets_directory: Path) -> None:
    assert run("retry_credential_backfill").code == 1
    assert run("run_credential_backfill", "--tenant", "nobody").code == 1
    shutil.rmtree(secrets_directory)
    assert run("credential_status", "--skip-checks").code == 0
    assert refusals() == {}

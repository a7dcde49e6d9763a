"""The loop where the database fails: connections, deadlocks, time-outs, answers that are lost, triggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection, connections

from kfs_credentials.cleanup import Outcome
from kfs_credentials.cleanup_worker import CleanupWorker
from kfs_credentials.errors import ImproperlyPrepared
from kfs_credentials.models import SecretObject
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.worker import End
from tests.cleanup.rows import add_secret, in_database
from tests.cleanup.workers import leased, new_worker

pytestmark = pytest.mark.django_db(transaction=True)

Change = Callable[..., None]
Files = Callable[[], list[Path]]
Other = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def _at_once(store: EncryptedStore, kfs_settings: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    kfs_settings(ERASE_GRACE=0, LATE_WRITE_HORIZON=0)
    monkeypatch.setattr("kfs_credentials.worker.pause_before_try", lambda _: 0.0)


@pytest.fixture
def trigger() -> Iterator[Callable[[str], None]]:
    """Return a function that lets each row that becomes `deleted` run these PL/pgSQL statements first."""

    def create(body: str) -> None:
        in_database(
            f"CREATE FUNCTION kfs_tests_erased() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} RETURN NEW; END $$"
        )
        in_database(
            "CREATE TRIGGER kfs_tests_erased BEFORE UPDATE ON source_secret_lifecycle_refs FOR EACH ROW "
            "WHEN (NEW.state = 'deleted' AND OLD.state = 'deleting') EXECUTE FUNCTION kfs_tests_erased()"
        )

    in_database("CREATE SEQUENCE kfs_tests_tries")
    yield create
    in_database("DROP FUNCTION IF EXISTS kfs_tests_erased CASCADE")
    in_database("DROP SEQUENCE kfs_tests_tries")


def secrets(store: EncryptedStore, count: int) -> None:
    for _ in range(count):
        add_secret(store)


def check_drained(worker: CleanupWorker, count: int, files: Files) -> None:
    summary = worker.summary
    assert summary.end is End.DRAINED
    assert summary.outcomes[Outcome.CONFIRMED] == count
    assert set(LedgerRow.objects.values_list("state", "next_delete_at", "delete_attempts")) == {("deleted", None, 0)}
    assert (files(), leased()) == ([], 0)


def test_a_connection_that_is_lost_is_made_anew_and_costs_no_attempt(
    store: EncryptedStore, files: Files, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets(store, 30)
    real = EncryptedStore._delete_many

    def delete_many(store: EncryptedStore, addresses: Any, *, deadline: Any) -> Any:
        other.autocommit = True
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        return real(store, addresses, deadline=deadline)

    monkeypatch.setattr(EncryptedStore, "_delete_many", delete_many)
    worker = new_worker()
    worker.run()
    check_drained(worker, 30, files)
    assert worker.summary.outcomes == {Outcome.ERASED: 30, Outcome.CONFIRMED: 30}


@pytest.mark.parametrize("state", ["40P01", "40001", "55P03", "57P01"])
def test_what_passes_is_tried_again_at_once(
    store: EncryptedStore, files: Files, trigger: Callable[[str], None], state: str
) -> None:
    """A deadlock, a serialization failure, a lock that is not to be had, a server that shuts down."""
    trigger(f"IF nextval('kfs_tests_tries') <= 3 THEN RAISE EXCEPTION 'canary' USING ERRCODE = '{state}'; END IF;")
    secrets(store, 5)
    worker = new_worker()
    worker.run()
    check_drained(worker, 5, files)
    assert worker.summary.outcomes == {Outcome.ERASED: 5, Outcome.CONFIRMED: 5}
    assert set(SecretObject.objects.values_list("receipt", flat=True)) == {"erased"}


def test_what_passes_too_late_is_given_back_and_taken_again(
    store: EncryptedStore, files: Files, trigger: Callable[[str], None]
) -> None:
    trigger("IF nextval('kfs_tests_tries') <= 8 THEN RAISE EXCEPTION 'canary' USING ERRCODE = '40P01'; END IF;")
    secrets(store, 5)
    worker = new_worker()
    worker.run()
    check_drained(worker, 5, files)
    assert worker.summary.outcomes == {Outcome.RELEASED: 5, Outcome.ERASED: 5, Outcome.CONFIRMED: 5}


def test_smaller_batches_where_a_statement_takes_too_long(
    store: EncryptedStore, files: Files, trigger: Callable[[str], None]
) -> None:
    trigger("PERFORM pg_sleep(0.05);")
    secrets(store, 16)
    worker = new_worker(batch_size=16)
    options = connection.settings_dict["OPTIONS"]
    connection.close()
    connection.settings_dict["OPTIONS"] = {**options, "options": "-c statement_timeout=300ms"}
    try:
        worker.run()
    finally:
        connection.close()
        connection.settings_dict["OPTIONS"] = options
    check_drained(worker, 16, files)
    assert worker._size < 16
    # Settled in halves: nothing was erased in vain, and nothing had to be asked again.
    assert worker.summary.outcomes == {Outcome.ERASED: 16, Outcome.CONFIRMED: 16}
    assert set(SecretObject.objects.values_list("receipt", flat=True)) == {"erased"}


def test_smaller_pages_where_a_sweep_takes_too_long(store: EncryptedStore) -> None:
    worker = new_worker(batch_size=10)
    assert worker._page() == 2000
    worker._size = 1
    assert worker._page() == 200


@pytest.mark.parametrize("step", ["claim", "settle", "reconcile", "sweep", "patrol", "complete", "purge"])
def test_a_commit_whose_answer_was_lost_counts_once(
    store: EncryptedStore, files: Files, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    secrets(store, 3)
    add_secret(store, None, "staged, unused")
    worker = new_worker()
    wrapped: Any = connections["default"]
    real, commit = getattr(worker.steps, step), wrapped._commit
    answers, inside = [False], [False]

    def inside_step(*arguments: Any, **options: Any) -> Any:
        inside[0] = True
        try:
            return real(*arguments, **options)
        finally:
            inside[0] = False

    def lose_the_answer() -> None:
        commit()
        if inside[0] and answers:
            answers.pop()
            raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(worker.steps, step, inside_step)
    monkeypatch.setattr(wrapped, "_commit", lose_the_answer)
    worker.run()
    assert answers == []
    check_drained(worker, 4, files)
    assert worker.summary.outcomes == {Outcome.ERASED: 4, Outcome.CONFIRMED: 4}
    assert worker.summary.lost == 0


def test_a_database_that_stays_away_ends_the_drain_as_out_of_reach(
    store: EncryptedStore, kfs_settings: Change, tmp_path: Path
) -> None:
    kfs_settings(RETRY_MAX=0, LEASE=0.1)
    secrets(store, 1)
    here = connection.settings_dict["HOST"]
    connection.close()
    connection.settings_dict["HOST"] = str(tmp_path)
    try:
        summary = new_worker().run()
    finally:
        connection.close()
        connection.settings_dict["HOST"] = here
    assert (summary.outcomes, summary.end, summary.reason) == ({}, End.UNREACHABLE, "the database is out of reach")


def test_a_database_that_refuses_says_what_to_do(store: EncryptedStore) -> None:
    secrets(store, 1)
    in_database("ALTER TABLE kfs_credentials_secret_object RENAME TO hidden")
    try:
        with pytest.raises(ImproperlyPrepared, match=r"UndefinedTable, SQLSTATE 42P01.*manage.py migrate"):
            new_worker().run()
    finally:
        in_database("ALTER TABLE hidden RENAME TO kfs_credentials_secret_object")
    assert leased() == 0


def test_a_trigger_of_the_host_that_refuses_a_row_ends_the_run_and_gives_back_the_others(
    store: EncryptedStore, trigger: Callable[[str], None]
) -> None:
    trigger("RAISE EXCEPTION 'canary' USING ERRCODE = '23514';")
    secrets(store, 3)
    with pytest.raises(ImproperlyPrepared, match=r"refused to change a row \(.*SQLSTATE 23514\)") as caught:
        new_worker().run()
    assert "canary" not in str(caught.value)
    assert set(LedgerRow.objects.values_list("state", "delete_attempts")) == {("retired", 0)}

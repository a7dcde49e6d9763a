"""What an operator decides: failed jobs are tried again, and credentials that stay in clear are acknowledged."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection, transaction

from kfs_credentials import operations
from kfs_credentials.backfill import lock_sources
from kfs_credentials.conf import key_ring
from kfs_credentials.crypto import Scope, fingerprint_matches
from kfs_credentials.errors import ImproperlyPrepared
from kfs_credentials.models import (
    Acknowledgement,
    JobError,
    SecretObject,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from kfs_credentials.operations import RetryResult, Unsettled, acknowledge, retry_failed_jobs, settled, unsettled
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.transactions import TRIES
from tests.factories import SourceFactory
from tests.invariants import check_invariants
from tests.management.commands import Admin, dsn
from tests.management.rows import JobFactory, RefFactory, give_ref, table_contents

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]


def failed(**values: Any) -> SourceCredentialBackfill:
    """Return a failed job with the retired candidate that it left."""
    job = JobFactory.create(**values)
    ref = RefFactory.create(job=job)
    SecretObject.objects.create(
        credential_ref=ref.credential_ref, store="default", created_at=ref.created_at, updated_at=ref.updated_at
    )
    return job


def retry(*jobs: SourceCredentialBackfill, version: int | None = None) -> RetryResult:
    return retry_failed_jobs("default", [(job.pk, version) for job in jobs])


@pytest.fixture
def admin(transactional_db: None) -> Iterator[Admin]:
    """A session of somebody else, who may do anything."""
    with psycopg.connect(dsn(), autocommit=True) as session:
        yield session


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Between two tries no time passes; returns how long it would have been, each time."""
    waited: list[float] = []
    monkeypatch.setattr("kfs_credentials.operations.time.sleep", waited.append)
    return waited


# Retrying.


def test_a_job_is_queued_again_with_a_fresh_candidate(store: EncryptedStore) -> None:
    job = failed(source=SourceFactory.create(version=4))
    old = job.candidate_credential_ref
    assert retry(job) == RetryResult(queued=1)
    job.refresh_from_db()
    assert (job.run_state, job.retry_count, job.row_version, job.source_version) == ("queued", 0, 8, 4)
    assert (job.last_error_code, job.last_error_message, job.completed_at) == (None, None, None)
    assert job.candidate_credential_ref != old
    assert SourceSecretLifecycleRef.objects.get(credential_ref=old).state == "retired"
    fresh = SourceSecretLifecycleRef.objects.get(credential_ref=job.candidate_credential_ref)
    assert (fresh.state, fresh.purpose, fresh.operation_id) == ("candidate", "backfill", str(job.pk))
    assert (fresh.source_version, fresh.delete_attempts, fresh.next_delete_at) == (4, 0, None)
    assert SecretObject.objects.get(credential_ref=job.candidate_credential_ref).store == "default"
    scope = Scope(job.tenant_id, job.knowledge_space_id, job.source_id)
    assert fingerprint_matches(key_ring(), scope, job.source.metadata["credentials"], job.secret_fingerprint)
    assert check_invariants("default", store) == []


def test_the_version_that_was_seen_has_to_be_the_one_that_is_there() -> None:
    job = failed()
    before = table_contents()
    assert retry(job, version=6) == RetryResult(changed=1)
    assert table_contents() == before
    assert retry(job, version=7) == RetryResult(queued=1)


def test_a_job_that_is_not_failed_any_more() -> None:
    job = failed()
    assert retry(job) == RetryResult(queued=1)
    before = table_contents()
    assert retry(job) == RetryResult(changed=1)
    assert table_contents() == before


@pytest.mark.parametrize("state", ["queued", "running", "succeeded"])
def test_no_other_state_is_touched(state: str) -> None:
    job = JobFactory.create(**{state: True})
    before = table_contents()
    assert retry(job) == RetryResult(changed=1)
    assert table_contents() == before


def test_a_job_that_is_gone() -> None:
    job = failed()
    job.source.delete()
    before = table_contents()
    assert retry(job) == RetryResult(missing=1)
    assert table_contents() == before


def test_a_source_that_has_a_ref_by_now() -> None:
    job = failed()
    ref = give_ref(job.source, in_ledger=False)
    assert retry(job) == RetryResult(ended=1)
    job.refresh_from_db()
    assert (job.run_state, job.last_error_code, job.row_version) == ("succeeded", None, 8)
    assert Source.objects.get().credential_ref == ref
    assert list(SourceSecretLifecycleRef.objects.values_list("state", flat=True)) == ["retired"]


@pytest.mark.parametrize("metadata", [{}, [], {"credentials": None}, {"credentials": "token"}])
def test_a_source_that_has_no_legacy_credentials_any_more(metadata: object) -> None:
    job = failed()
    Source.objects.update(metadata=metadata)
    assert retry(job) == RetryResult(ended=1)
    job.refresh_from_db()
    assert job.run_state == "succeeded"
    assert Source.objects.get().metadata == metadata


def test_a_job_whose_ledger_row_is_missing() -> None:
    job = JobFactory.create(last_error_code=JobError.LEDGER_MISSING)
    assert retry(job) == RetryResult(queued=1)
    job.refresh_from_db()
    assert SourceSecretLifecycleRef.objects.get().credential_ref == job.candidate_credential_ref


def test_credentials_that_are_too_large_or_not_valid_are_queued_too() -> None:
    """Whether they still fail is for the worker to say; the limit may be another one for it."""
    job = failed(source=SourceFactory.create(credentials={"bundle": "x" * 66_000}))
    assert retry(job) == RetryResult(queued=1)


@pytest.mark.parametrize("table", ["sources", "source_credential_backfills"])
def test_a_locked_row_is_left_alone(admin: Admin, table: str) -> None:
    locked, free = failed(), failed()
    key = locked.source_id if table == "sources" else locked.pk
    with admin.transaction():
        admin.execute(f"SELECT FROM {table} WHERE id = %s FOR UPDATE", [key])
        assert retry(locked, free) == RetryResult(queued=1, changed=1)
    locked.refresh_from_db()
    assert locked.run_state == "failed"


def test_many_in_batches(kfs_settings: Callable[..., None], store: EncryptedStore) -> None:
    kfs_settings(BATCH_SIZE=3)
    jobs = [failed() for _ in range(8)]
    jobs[4].source.delete()
    give_ref(jobs[5].source)
    retry(jobs[6])
    assert retry(*jobs) == RetryResult(queued=5, ended=1, changed=1, missing=1)


def test_results_add_up() -> None:
    assert RetryResult(1, 2, 3, 4) + RetryResult(10, 20, 30, 40) == RetryResult(11, 22, 33, 44)


def test_the_ledger_is_locked_and_the_database_busy(
    admin: Admin,
    kfs_settings: Callable[..., None],
    no_waiting: list[float],
) -> None:
    kfs_settings(LOCK_TIMEOUT=0.01)
    job = failed()
    with admin.transaction():
        admin.execute("SELECT FROM source_secret_lifecycle_refs FOR UPDATE")
        with pytest.raises(OperationalError, match="lock timeout"):
            retry(job)
    assert len(no_waiting) == TRIES - 1
    assert all(earlier < later for earlier, later in zip(no_waiting, no_waiting[2:], strict=False))
    assert retry(job) == RetryResult(queued=1)


def test_the_connection_is_lost_in_the_middle(
    admin: Admin,
    monkeypatch: pytest.MonkeyPatch,
    no_waiting: list[float],
    store: EncryptedStore,
) -> None:
    """The whole transaction is tried again."""
    jobs = [failed() for _ in range(3)]
    backends: list[int] = []

    def cut_off(using: str, items: Any) -> Any:
        if not backends:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                backends.extend(cursor.fetchone() or ())
            admin.execute("SELECT pg_terminate_backend(%s, 10000)", backends)
        return lock_sources(using, items)

    monkeypatch.setattr(operations, "lock_sources", cut_off)
    assert retry(*jobs) == RetryResult(queued=3)
    assert len(no_waiting) == 1
    assert check_invariants("default", store) == []


def test_a_transaction_that_takes_too_long_is_tried_with_fewer_rows(
    monkeypatch: pytest.MonkeyPatch, no_waiting: list[float]
) -> None:
    jobs = [failed() for _ in range(5)]
    sizes: list[int] = []

    def slow(using: str, items: Any) -> Any:
        sizes.append(len(items))
        if len(items) > 1:
            with connection.cursor() as cursor:
                cursor.execute("DO $$ BEGIN RAISE 'too long' USING ERRCODE = 'query_canceled'; END $$")
        return lock_sources(using, items)

    monkeypatch.setattr(operations, "lock_sources", slow)
    monkeypatch.setattr("kfs_credentials.operations.settings", type("Settings", (), {"BATCH_SIZE": 4}))
    assert retry(*jobs) == RetryResult(queued=5)
    assert sizes == [4, 2, 1, 1, 1, 1, 1]


def test_what_the_database_refuses_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, no_waiting: list[float]) -> None:
    job = failed()

    def refuse(using: str, items: Any) -> Any:
        with connection.cursor() as cursor:
            cursor.execute("SELECT FROM no_such_table")

    monkeypatch.setattr(operations, "lock_sources", refuse)
    with pytest.raises(Exception, match="no_such_table"):
        retry(job)
    assert no_waiting == []


def test_it_needs_transactions_of_its_own() -> None:
    job = failed()
    found = Unsettled(job.source_id, "tenant-a", "string")
    message = r"^This needs transactions of its own\. Call it outside of atomic\(\)"
    with transaction.atomic(), pytest.raises(ImproperlyPrepared, match=message):
        retry(job)
    with transaction.atomic(), pytest.raises(ImproperlyPrepared, match=message):
        acknowledge("default", [found], by="tests")


# Acknowledging.


def unsupported(number: int, credentials: object, tenant: str = "tenant-a") -> Unsettled:
    source = SourceFactory.create(id=uuid.UUID(int=number), credentials=credentials, knowledge_space__tenant_id=tenant)
    if isinstance(credentials, dict):
        JobFactory.create(source=source, last_error_code=JobError.TOO_LARGE)
    shapes = {str: "string", int: "number", bool: "boolean", list: "array", dict: "too_large"}
    return Unsettled(source.pk, tenant, shapes[type(credentials)])


def test_what_is_unsettled_and_in_which_order() -> None:
    large = {"bundle": "x" * 66_000}
    found = [
        unsupported(number, credentials)
        for number, credentials in [(4, 7), (1, large), (3, "token"), (2, True), (6, large), (5, [])]
    ]
    unsupported_ones = sorted((one for one in found if one.shape != "too_large"), key=lambda one: one.source_id)
    too_large_ones = [one for one in found if one.shape == "too_large"]
    assert list(unsettled("default")) == [*unsupported_ones, *too_large_ones]


def test_each_source_is_unsettled_once() -> None:
    """A source whose too large credentials became a string is unsupported, and not too large any more."""
    one = unsupported(1, {"bundle": "x" * 66_000})
    Source.objects.update(metadata={"credentials": "x" * 66_000})
    assert list(unsettled("default")) == [Unsettled(one.source_id, "tenant-a", "string")]
    acknowledge("default", list(unsettled("default")), by="tests")
    assert list(unsettled("default")) == []


def test_acknowledging_notes_who_and_what() -> None:
    found = [unsupported(1, "token"), unsupported(2, []), unsupported(3, {"bundle": "x" * 66_000})]
    before = table_contents()
    assert acknowledge("default", found, by="Security team") == 3
    notes = {row.source_id.int: row for row in Acknowledgement.objects.all()}
    assert {number: row.shape for number, row in notes.items()} == {1: "string", 2: "array", 3: "too_large"}
    assert {row.acknowledged_by for row in notes.values()} == {"Security team"}
    assert all(row.acknowledged_at is not None for row in notes.values())
    after = table_contents()
    for written in ("kfs_credentials_acknowledgement", "kfs_credentials_event"):
        del before[written], after[written]
    assert after == before
    assert list(unsettled("default")) == []
    assert settled("default", [one.source_id for one in found]) == {one.source_id for one in found}


def test_acknowledging_again_replaces_the_note() -> None:
    one = unsupported(1, "token")
    acknowledge("default", [one], by="first")
    Source.objects.update(metadata={"credentials": []})
    assert settled("default", [one.source_id]) == set()
    acknowledge("default", list(unsettled("default")), by="second")
    note = Acknowledgement.objects.get()
    assert (note.shape, note.acknowledged_by) == ("array", "second")


def test_what_changed_since_it_was_seen_is_not_acknowledged() -> None:
    one = unsupported(1, "token")
    Source.objects.update(metadata={"credentials": []})
    acknowledge("default", [one], by="tests")
    assert list(unsettled("default")) == [Unsettled(one.source_id, "tenant-a", "array")]


def test_acknowledging_many_in_batches(kfs_settings: Callable[..., None]) -> None:
    kfs_settings(BATCH_SIZE=2)
    found = [unsupported(number, "token") for number in range(1, 6)]
    assert acknowledge("default", found, by="tests") == 5
    assert acknowledge("default", [], by="tests") == 0
    assert Acknowledgement.objects.count() == 5


def test_unsettled_ones_of_one_tenant_and_one_space() -> None:
    here, there = unsupported(1, "token"), unsupported(2, "token", tenant="tenant-b")
    assert list(unsettled("default", tenant="tenant-b")) == [there]
    space = Source.objects.get(pk=here.source_id).knowledge_space_id
    assert list(unsettled("default", space=space)) == [here]

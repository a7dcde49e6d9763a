"""Discovery: which sources get a job, and what is reserved for them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillSummary
from kfs_credentials.conf import key_ring
from kfs_credentials.crypto import Scope, fingerprint, parse_json
from kfs_credentials.models import RunState, SecretObject, Source, SourceCredentialBackfill, SourceSecretLifecycleRef
from tests.backfill.conftest import Change, Files, Other
from tests.factories import SourceFactory, SpaceFactory

pytestmark = pytest.mark.django_db(transaction=True)


def found(steps: Backfill, limit: int = 10) -> set[uuid.UUID]:
    """Discover one page, and return the sources in it."""
    batch = steps.discover(limit)
    return set() if batch is None else {item.source_id for item in batch.items}


def test_job_candidate_and_object_are_reserved_together_before_any_byte_is_written(
    steps: Backfill, files: Files
) -> None:
    source = SourceFactory.create(credentials={"token": "made-up"}, version=7)
    batch = steps.discover(10)
    assert batch is not None
    job = SourceCredentialBackfill.objects.get()
    ref = SourceSecretLifecycleRef.objects.get()
    thing = SecretObject.objects.get()
    assert (job.run_state, job.source_version, job.retry_count, job.row_version) == (RunState.RUNNING, 7, 0, 0)
    assert (job.lease_token, job.worker_id) == (batch.lease.token, "tests#1")
    assert (ref.state, ref.purpose, ref.operation_id, ref.source_version) == ("candidate", "backfill", str(job.pk), 7)
    assert ref.credential_ref == job.candidate_credential_ref == thing.credential_ref == batch.items[0].ref
    assert (ref.source_id, ref.knowledge_space_id, ref.tenant_id) == (source.pk, source.knowledge_space_id, "tenant-a")
    scope = Scope("tenant-a", source.knowledge_space_id, source.pk)
    assert job.secret_fingerprint == fingerprint(key_ring(), scope, {"token": "made-up"})
    assert (thing.store, thing.key_id, thing.size) == ("default", key_ring().primary.id, len('{"token":"made-up"}'))
    assert files() == []
    assert Source.objects.get().metadata == source.metadata


def test_only_legacy_credentials_without_a_ref_are_found(steps: Backfill) -> None:
    legacy = {SourceFactory.create().pk, SourceFactory.create(credentials={}).pk}
    for odd in (None, [], [{"a": 1}], "", "token", 0, False):
        SourceFactory.create(credentials=odd)
    for metadata in ({}, [], ["credentials"], "credentials", 7, {"Credentials": {"a": 1}}):
        SourceFactory.create(metadata=metadata)
    referenced, null = SourceFactory.create(), SourceFactory.create()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE sources SET metadata = 'null' WHERE id = %s", [null.pk])
        cursor.execute("UPDATE sources SET credential_ref = 'x' WHERE id = %s", [referenced.pk])
    assert found(steps, 100) == legacy


def test_pages_go_through_the_table_in_id_order_and_start_anew_at_its_end(steps: Backfill) -> None:
    sources = sorted(SourceFactory.create().pk for _ in range(5))
    assert [found(steps, 2) for _ in range(4)] == [set(sources[:2]), set(sources[2:4]), set(sources[4:]), set()]
    early = SourceFactory.create(id=uuid.UUID(int=1)).pk
    assert found(steps, 2) == {early}


@pytest.mark.parametrize("state", ["queued", "running", "failed"])
def test_a_source_with_a_job_is_left_to_that_job(steps: Backfill, state: str) -> None:
    SourceFactory.create()
    steps.discover(10)
    now = timezone.now()
    fields = {"run_state": state, "completed_at": now if state == "failed" else None}
    if state != "running":
        fields |= dict.fromkeys(("worker_id", "lease_token", "lease_expires_at", "heartbeat_at"))
    SourceCredentialBackfill.objects.update(**fields)
    assert found(steps) == set()


def test_credentials_that_are_back_after_a_job_succeeded_get_the_same_row_and_a_fresh_candidate(
    steps: Backfill, run: Callable[..., BackfillSummary]
) -> None:
    source = SourceFactory.create()
    run()
    before = SourceCredentialBackfill.objects.get()
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sources SET credential_ref = NULL, metadata = %s WHERE id = %s",
            ['{"credentials": {"a": 2}}', source.pk],
        )
    assert found(steps) == {source.pk}
    after = SourceCredentialBackfill.objects.get()
    assert (after.pk, after.created_at, after.row_version) == (before.pk, before.created_at, before.row_version + 1)
    assert (after.run_state, after.retry_count, after.completed_at) == (RunState.RUNNING, 0, None)
    assert after.candidate_credential_ref != before.candidate_credential_ref
    assert SourceSecretLifecycleRef.objects.count() == 2


def test_a_row_that_is_locked_is_passed_over_and_found_by_the_next_pass(steps: Backfill, other: Other) -> None:
    locked, free = SourceFactory.create().pk, SourceFactory.create().pk
    other.execute("SELECT FROM sources WHERE id = %s FOR UPDATE", [locked])
    assert found(steps) == {free}
    assert found(steps) == set()
    other.rollback()
    assert found(steps) == {locked}


def test_a_space_that_the_node_service_holds_is_passed_over(steps: Backfill, other: Other) -> None:
    held, free = SourceFactory.create(), SourceFactory.create()
    other.execute("SELECT FROM knowledge_spaces WHERE id = %s FOR UPDATE", [held.knowledge_space_id])
    assert found(steps) == {free.pk}
    other.rollback()
    assert found(steps) | found(steps) == {held.pk}


def test_a_job_that_came_between_page_and_reservation_is_somebody_elses(
    steps: Backfill, new_steps: Callable[..., Backfill], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Node service inserts jobs without locking the source: the insert then finds the row taken."""
    taken, free = sorted([SourceFactory.create().pk, SourceFactory.create().pk])
    items = {item.source_id: item for item in (steps.discover(10) or pytest.fail("nothing found")).items}
    job = SourceCredentialBackfill.objects.get(source_id=taken)
    SourceCredentialBackfill.objects.filter(source_id=free).delete()
    SourceSecretLifecycleRef.objects.filter(source_id=free).delete()
    late = new_steps(worker="late")
    monkeypatch.setattr(late, "_discovered", lambda limit, leaving: list(items.values()))
    for item in items.values():
        item.ref, item.job_id = f"source-secret:v1:{uuid.uuid4()}", uuid.uuid4()
    batch = late.discover(10)
    assert batch is not None
    assert [item.source_id for item in batch.items] == [free]
    assert SourceCredentialBackfill.objects.get(source_id=taken).lease_token == job.lease_token
    assert SourceSecretLifecycleRef.objects.filter(source_id=taken).count() == 1


def test_a_version_below_one_is_legal_in_sources_and_awkward_elsewhere(
    steps: Backfill, run: Callable[..., BackfillSummary]
) -> None:
    source = SourceFactory.create(version=-1)
    steps.discover(10)
    assert SourceCredentialBackfill.objects.get().source_version == 1
    assert SourceSecretLifecycleRef.objects.get().source_version is None
    SourceCredentialBackfill.objects.update(lease_expires_at=timezone.now())
    run()
    assert Source.objects.get().version == source.version + 1
    assert SourceSecretLifecycleRef.objects.get().source_version is None


def test_one_row_that_the_database_rejects_spoils_no_page(steps: Backfill) -> None:
    sources = sorted(SourceFactory.create().pk for _ in range(9))
    with connection.cursor() as cursor:
        cursor.execute(
            f"ALTER TABLE source_credential_backfills ADD CONSTRAINT host_ck CHECK (source_id <> '{sources[4]}')"
        )
    try:
        assert found(steps) == set(sources) - {sources[4]}
        assert steps.rejected == {sources[4]}
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE source_credential_backfills DROP CONSTRAINT host_ck")


def test_a_batch_holds_so_many_bytes_and_at_least_one_source(steps: Backfill, kfs_settings: Change) -> None:
    sources = sorted(SourceFactory.create(credentials={"token": "x" * 100}).pk for _ in range(5))
    kfs_settings(BATCH_BYTES=250, MAX_SECRET_BYTES=200)
    assert found(steps) == set(sources[:3])
    kfs_settings(BATCH_BYTES=2, MAX_SECRET_BYTES=2)
    assert found(steps) == {sources[3]}


def test_values_beyond_the_batch_are_not_even_read(steps: Backfill, kfs_settings: Change) -> None:
    SourceFactory.create(credentials={"token": "x" * 1000})
    kfs_settings(BATCH_BYTES=500, MAX_SECRET_BYTES=500)
    batch = steps.discover(10)
    assert batch is not None
    assert batch.items[0].plaintext is None
    assert SourceCredentialBackfill.objects.get().secret_fingerprint == "0" * 64
    assert SecretObject.objects.get().size is None


def test_tenant_and_space_narrow_it_down(new_steps: Callable[..., Backfill]) -> None:
    mine = SourceFactory.create(knowledge_space=SpaceFactory.create(tenant_id="tenant-b"))
    theirs = SourceFactory.create()
    assert found(new_steps(tenant="tenant-b")) == {mine.pk}
    assert found(new_steps(space=theirs.knowledge_space_id)) == {theirs.pk}


def test_the_smallest_id_is_an_id_like_any_other(steps: Backfill) -> None:
    smallest, largest = uuid.UUID(int=0), uuid.UUID(int=2**128 - 1)
    for source in (smallest, largest):
        SourceFactory.create(id=source)
    assert [found(steps, 1) for _ in range(3)] == [{smallest}, {largest}, set()]


def test_what_the_database_rejected_is_tried_again_by_the_next_pass(steps: Backfill) -> None:
    source = SourceFactory.create()
    constraint = f"ADD CONSTRAINT host_ck CHECK (source_id <> '{source.pk}')"
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE source_credential_backfills {constraint}")
    try:
        assert (found(steps), found(steps)) == (set(), set())
        assert steps.rejected == {source.pk}
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE source_credential_backfills DROP CONSTRAINT host_ck")
    assert found(steps) == {source.pk}
    assert steps.rejected == set()


def test_the_value_is_read_exactly(steps: Backfill) -> None:
    text = '{"n": 9007199254740993, "big": 1e400, "d": 0.1234567890123456789012345, "no NUL": "\\\\u0000"}'
    source = SourceFactory.create()
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sources SET metadata = jsonb_build_object('credentials', %s::jsonb) WHERE id = %s",
            [text, source.pk],
        )
    batch = steps.discover(10)
    assert batch is not None
    assert batch.items[0].plaintext is not None
    exact: Any = parse_json(batch.items[0].plaintext.exact)
    assert exact["n"] == 9007199254740993
    assert exact["big"] == 10**400
    assert str(exact["d"]) == "0.1234567890123456789012345"
    assert exact["no NUL"] == "\\u0000"

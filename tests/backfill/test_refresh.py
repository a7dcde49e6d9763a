"""A refresh: a fresh candidate for credentials that changed, in one transaction with the end of the old one."""

from __future__ import annotations

import pytest
from django.db import DatabaseError, connection

from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Batch, Move
from kfs_credentials.conf import key_ring
from kfs_credentials.crypto import fingerprint
from kfs_credentials.models import (
    RefState,
    RunState,
    SecretObject,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from tests.factories import SourceFactory
from tests.management.rows import table_contents

pytestmark = pytest.mark.django_db(transaction=True)


def put_and_changed(steps: Backfill) -> Batch:
    """Put the credentials of one source, which are others by now, at a later version."""
    source = SourceFactory.create(credentials={"token": "old"}, version=3)
    batch = steps.discover(1)
    assert batch is not None
    steps.start_put(batch)
    steps.finish_put(batch)
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sources SET metadata = %s, version = 8 WHERE id = %s",
            ['{"credentials": {"token": "new"}}', source.pk],
        )
    return batch


def test_the_job_is_queued_with_the_version_and_fingerprint_of_now(steps: Backfill) -> None:
    batch = put_and_changed(steps)
    item = batch.items[0]
    assert steps.settle(batch) == {Move.REFRESH: 1}
    job = SourceCredentialBackfill.objects.get()
    assert (job.pk, job.run_state, job.source_version, job.lease_token) == (item.job_id, RunState.QUEUED, 8, None)
    assert job.secret_fingerprint == fingerprint(key_ring(), item.scope, {"token": "new"}) != item.fingerprint
    old = SourceSecretLifecycleRef.objects.get(credential_ref=item.ref)
    fresh = SourceSecretLifecycleRef.objects.exclude(credential_ref=item.ref).get()
    assert (old.state, old.source_version, old.row_version) == (RefState.RETIRED, 3, 1)
    assert old.next_delete_at is not None
    assert (fresh.state, fresh.credential_ref) == (RefState.CANDIDATE, job.candidate_credential_ref)
    assert (fresh.source_version, fresh.operation_id, fresh.next_delete_at) == (8, str(job.pk), None)
    assert SecretObject.objects.filter(credential_ref=fresh.credential_ref).exists()


@pytest.mark.parametrize("table", ["source_secret_lifecycle_refs", "kfs_credentials_secret_object"])
def test_where_one_of_its_rows_is_refused_none_is_written(steps: Backfill, table: str) -> None:
    batch = put_and_changed(steps)
    before = table_contents()
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} ADD CONSTRAINT host_ck CHECK (FALSE) NOT VALID")
    try:
        with pytest.raises(DatabaseError, match="host_ck"):
            steps.settle(batch)
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table} DROP CONSTRAINT host_ck")
    assert table_contents() == before
    assert steps.settle(batch) == {Move.REFRESH: 1}

"""A space or source that is being deleted gets no new secret: it is not leased, and the store is not called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillSummary
from kfs_credentials.models import RunState, Source, SourceCredentialBackfill, SourceSecretLifecycleRef
from tests.backfill.conftest import Files
from tests.factories import SourceFactory

pytestmark = pytest.mark.django_db(transaction=True)


def execute(sql: str, *parameters: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)


@pytest.fixture
def deletions(transactional_db: None) -> Iterator[None]:
    """The table in which later versions of knowledge-fs note their deletions."""
    execute("CREATE TABLE deletion_jobs (target_id uuid, active_slot int)")
    yield
    execute("DROP TABLE deletion_jobs")


def begin_deletion(source: Source, how: str) -> None:
    if how == "status":
        Source.objects.filter(pk=source.pk).update(status="deleting")
    else:
        target = source.pk if how == "source" else source.knowledge_space_id
        execute("INSERT INTO deletion_jobs VALUES (%s, 1)", target)


def give_up_deletions() -> None:
    Source.objects.update(status="active")
    execute("UPDATE deletion_jobs SET active_slot = NULL")


@pytest.mark.parametrize("how", ["space", "source", "status"])
def test_a_source_without_a_job_gets_none_before_the_deletion_is_given_up(
    steps: Backfill, run: Callable[..., BackfillSummary], files: Files, deletions: None, how: str
) -> None:
    begin_deletion(SourceFactory.create(), how)
    assert steps.discover(10) is None
    assert (SourceCredentialBackfill.objects.count(), SourceSecretLifecycleRef.objects.count()) == (0, 0)
    assert files() == []
    give_up_deletions()
    run()
    assert Source.objects.referenced().count() == len(files()) == 1


@pytest.mark.parametrize("how", ["space", "source", "status"])
@pytest.mark.parametrize("lease", ["handed back", "run out"])
def test_a_job_that_waits_is_not_claimed_before_the_deletion_is_given_up(
    steps: Backfill, run: Callable[..., BackfillSummary], files: Files, deletions: None, how: str, lease: str
) -> None:
    source = SourceFactory.create()
    batch = steps.discover(1)
    assert batch is not None
    if lease == "handed back":
        steps.release(batch)
    else:
        execute("UPDATE source_credential_backfills SET lease_expires_at = now() - interval '1 s'")
    before = SourceCredentialBackfill.objects.values().get()
    begin_deletion(source, how)
    assert steps.claim(10) is None
    assert SourceCredentialBackfill.objects.values().get() == before
    assert files() == []
    give_up_deletions()
    run()
    assert SourceCredentialBackfill.objects.get().run_state == RunState.SUCCEEDED
    assert Source.objects.referenced().count() == len(files()) == 1

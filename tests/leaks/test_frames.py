"""No error that leaves a step takes a value along, at whatever line it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from django.utils.connection import ConnectionDoesNotExist

from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillWorker
from kfs_credentials.batch import Batch
from kfs_credentials.models import SourceCredentialBackfill
from kfs_credentials.operations import retry_failed_jobs
from kfs_credentials.status import read_left
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory
from tests.leaks.canary import CANARY, CREDENTIALS, OTHER_CANARY, hits
from tests.leaks.frames import everything_shown, leaks_at_each_line

pytestmark = pytest.mark.django_db(transaction=True)

TABLES = ("source_credential_backfills", "source_secret_lifecycle_refs", "kfs_credentials_secret_object")
Prepare = Callable[[Backfill], Callable[[], object]]


def discover(steps: Backfill) -> Callable[[], object]:
    return lambda: steps.discover(10)


def claim_what_changed(steps: Backfill) -> Callable[[], object]:
    steps.release(discovered(steps))
    change()
    return lambda: steps.claim(10)


def put(steps: Backfill) -> Callable[[], object]:
    batch = discovered(steps)

    def run() -> None:
        steps.start_put(batch)
        steps.finish_put(batch)

    return run


def settle(steps: Backfill) -> Callable[[], object]:
    batch = was_put(steps)
    return lambda: steps.settle(batch)


def settle_what_changed(steps: Backfill) -> Callable[[], object]:
    batch = was_put(steps)
    change()
    return lambda: steps.settle(batch)


def run_worker(steps: Backfill) -> Callable[[], object]:
    worker = BackfillWorker(steps, remaining=lambda: read_left("default"), batch_size=2)
    return worker.run


def retry_by_an_operator(steps: Backfill) -> Callable[[], object]:
    BackfillWorker(steps, remaining=lambda: read_left("default"), batch_size=10).run()
    failed = list(SourceCredentialBackfill.objects.failed().values_list("pk", "row_version"))
    assert failed
    return lambda: retry_failed_jobs("default", failed)


def discovered(steps: Backfill) -> Batch:
    batch = steps.discover(10)
    assert batch is not None
    return batch


def was_put(steps: Backfill) -> Batch:
    batch = discovered(steps)
    steps.start_put(batch)
    steps.finish_put(batch)
    return batch


def change() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sources SET metadata = jsonb_set(metadata, '{credentials}', %s)", [f'{{"token":"{OTHER_CANARY}"}}']
        )


# Where errors are thrown. What is below these files has tests of its own, of crypto and of the stores.
STEPS: dict[Prepare, list[str]] = {
    discover: ["backfill.py", "batch.py", "sql/__init__.py"],
    claim_what_changed: ["backfill.py", "batch.py"],
    put: ["backfill.py", "batch.py"],
    settle: ["backfill.py", "batch.py"],
    settle_what_changed: ["backfill.py", "batch.py"],
    run_worker: ["worker.py", "backfill_worker.py", "receivers.py"],
    retry_by_an_operator: ["operations.py"],
}


@pytest.fixture
def anew(store: EncryptedStore, kfs_settings: Any) -> Iterator[Callable[[], Backfill]]:
    """Return a function that makes everything as before, and the steps of a worker."""
    kfs_settings(MAX_SECRET_BYTES=64)
    SourceFactory.create_batch(2, credentials=CREDENTIALS)
    SourceFactory.create(credentials={"access_token": CANARY * 4})  # too large
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE kfs_tests_before AS TABLE sources")

    def make() -> Backfill:
        assert not connection.in_atomic_block
        with connection.cursor() as cursor:
            for table in TABLES:
                cursor.execute(f"DELETE FROM {table}")
            cursor.execute(
                "UPDATE sources SET metadata = before.metadata, credential_ref = NULL "
                "FROM kfs_tests_before before WHERE before.id = sources.id"
            )
        return Backfill(using="default", store=store, worker="tests", lease=60.0)

    yield make
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE kfs_tests_before")


@pytest.mark.parametrize("prepare", STEPS, ids=lambda prepare: prepare.__name__)
def test_whatever_happens_at_whatever_line(
    prepare: Prepare, anew: Callable[[], Backfill], caplog: pytest.LogCaptureFixture
) -> None:
    leaks_at_each_line(lambda: prepare(anew()), STEPS[prepare], caplog)


def test_the_walk_sees_what_it_has_to() -> None:
    """So that the test above means something: credentials that nobody hides are found."""

    def work(credentials: dict[str, Any]) -> None:
        steps = Backfill(using=CANARY, store=None, worker="tests", lease=60.0)  # type: ignore[arg-type]
        steps.claim(10)

    with pytest.raises(ConnectionDoesNotExist) as caught:
        work(CREDENTIALS)
    found = [text for text in everything_shown(caught.value) for _ in hits(text)]
    assert any(text.startswith("Backfill.claim, self: ") for text in found)

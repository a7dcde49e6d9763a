"""Steps in a row, as a worker makes them, and what happens behind its back."""

from __future__ import annotations

from typing import Any

from django.db import connection

from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Batch, Item
from kfs_credentials.models import SourceCredentialBackfill
from tests.factories import SourceFactory

VALUE = {"token": "made-up"}


def execute(sql: str, *parameters: Any) -> None:
    """Run a statement as somebody else would, past the package."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)


def waiting(steps: Backfill) -> Item:
    """Make a source whose job waits; return the job as it was reserved."""
    SourceFactory.create(credentials=VALUE)
    batch = steps.discover(1)
    assert batch is not None
    steps.release(batch)
    return batch.items[0]


def claim_and_put(steps: Backfill) -> Batch:
    """Claim what waits, and put it."""
    batch = steps.claim(10)
    assert batch is not None
    steps.start_put(batch)
    steps.finish_put(batch)
    return batch


def only_job() -> SourceCredentialBackfill:
    """Return the job: there is one."""
    return SourceCredentialBackfill.objects.get()

"""Asking a worker to stop: once is enough, and more often is no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillSummary, BackfillWorker
from kfs_credentials.models import Source
from kfs_credentials.status import read_left
from kfs_credentials.worker import End, Stop
from tests.factories import SourceFactory

pytestmark = pytest.mark.django_db(transaction=True)


def test_asking_again_gives_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("kfs_credentials.worker.time.monotonic", lambda: now)
    stop = Stop()
    assert (bool(stop), stop.overdue) == (False, False)
    stop.ask()
    now += 5
    stop.ask()
    assert (bool(stop), stop.overdue) == (True, False)
    now += 2
    assert stop.overdue


def test_a_worker_that_was_stopped_before_it_began_takes_nothing(
    steps: Backfill, run: Callable[..., BackfillSummary]
) -> None:
    """Neither a job that waits nor a source that has none yet."""
    SourceFactory.create_batch(2)
    waiting = steps.discover(1)
    assert waiting is not None
    steps.release(waiting)
    worker = BackfillWorker(steps, remaining=lambda: read_left("default"), batch_size=10)
    for _ in range(2):
        worker.stop.ask()
    assert (worker.run().end, worker.summary.moves) == (End.INTERRUPTED, {})
    assert Source.objects.referenced().count() == 0
    assert run().end is End.DRAINED
    assert run().end is End.DRAINED
    assert Source.objects.referenced().count() == 2

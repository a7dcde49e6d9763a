"""No error that leaves a step takes a value along, at whatever line it happens.

An error is thrown at each line of ours that a step runs, the last time that it gets there. Then the test does what an
error tracker does: it goes through the variables of our frames, and writes down their repr.
"""

from __future__ import annotations

import linecache
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from django.db import DatabaseError, connection
from django.db.transaction import TransactionManagementError
from django.utils.connection import ConnectionDoesNotExist

import kfs_credentials
from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillWorker
from kfs_credentials.batch import Batch
from kfs_credentials.models import SourceCredentialBackfill
from kfs_credentials.operations import retry_failed_jobs
from kfs_credentials.status import read_left
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.crypto.test_leaks import frames, shown
from tests.factories import SourceFactory
from tests.leaks.canary import CANARY, CREDENTIALS, OTHER_CANARY, hits

pytestmark = pytest.mark.django_db(transaction=True)

TABLES = ("source_credential_backfills", "source_secret_lifecycle_refs", "kfs_credentials_secret_object")
PACKAGE = str(Path(kfs_credentials.__file__).parent)
Place = tuple[CodeType, int]
Prepare = Callable[[Backfill], Callable[[], object]]


class ThrownError(Exception):
    """What is thrown. It stands for whatever nobody foresaw: no memory, a key pressed, a mistake in a library."""


class Tracer:
    """Notes each line of some files that is run, on all threads; or throws at one of them, the nth time."""

    def __init__(self, files: Collection[str], place: Place | None = None, turn: int = 0) -> None:
        self.files = {f"{PACKAGE}/{file}" for file in files}
        self.place = place
        self.turn = turn
        self.times: dict[Place, int] = {}
        self.blocks: set[tuple[FrameType, int]] = set()

    def __enter__(self) -> None:
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            place = frame.f_code, frame.f_lineno
            if linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
                # The line comes again at the end of the block. An error there would be one in the interpreter.
                if (frame, frame.f_lineno) in self.blocks:
                    return self.trace
                self.blocks.add((frame, frame.f_lineno))
            self.times[place] = self.times.get(place, 0) + 1
            if place == self.place and self.times[place] == self.turn:
                raise ThrownError
        return self.trace


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
    run_worker: ["worker.py"],
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
    caplog.set_level(logging.DEBUG)
    files = STEPS[prepare]
    run = prepare(anew())
    tracer = Tracer(files)
    with tracer:
        run()
    leaks: list[str] = []
    thrown = 0
    for (code, line), times in tracer.times.items():
        run = prepare(anew())
        caplog.clear()
        texts: list[str] = []
        try:
            with Tracer(files, (code, line), times):
                run()  # to its end, if it gets there fewer times than before: some lines depend on the clock
        except ThrownError as error:
            thrown += 1
            texts = list(everything_shown(error))
        found = hits("\n".join([caplog.text, *texts]))
        leaks += [f"{code.co_filename}:{line}, in {code.co_qualname}: {hit}" for hit in found]
    assert leaks == []
    assert thrown > len(tracer.times) / 2


def test_the_walk_sees_what_it_has_to() -> None:
    """So that the test above means something: credentials that nobody hides are found."""

    def work(credentials: dict[str, Any]) -> None:
        steps = Backfill(using=CANARY, store=None, worker="tests", lease=60.0)  # type: ignore[arg-type]
        steps.claim(10)

    with pytest.raises(ConnectionDoesNotExist) as caught:
        work(CREDENTIALS)
    found = [text for text in everything_shown(caught.value) for _ in hits(text)]
    assert any(text.startswith("Backfill.claim, self: ") for text in found)


def reached(value: object) -> Iterator[str]:
    """Yield what the repr of a value shows, and of what can be reached from it; some reprs fail, as trackers know."""
    texts = shown(value)
    while True:
        try:
            yield next(texts)
        except (StopIteration, DatabaseError, TransactionManagementError):
            return


def everything_shown(error: BaseException | None) -> Iterator[str]:
    """Yield what an error tracker writes down about an error, and about those that led to it."""
    while error is not None:
        yield from (str(error), repr(error), *map(repr, error.args), *reached(vars(error)))
        for frame in frames(error.__traceback__):
            if frame.f_code.co_filename.startswith(PACKAGE):
                for name, value in frame.f_locals.items():
                    for text in reached(value):
                        yield f"{frame.f_code.co_qualname}, {name}: {text}"
        error = error.__cause__ or error.__context__

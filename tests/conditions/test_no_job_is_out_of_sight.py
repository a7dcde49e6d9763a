"""Every job that can be is over, or can be claimed now or at a known time; the database refuses the others.

The same for refs: tests/cleanup/test_every_state.py.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
from django.db import IntegrityError, connection, transaction

from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillSummary, BackfillWorker
from kfs_credentials.models import JobError, RefState, RunState, SourceCredentialBackfill
from kfs_credentials.status import read_left, read_status
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory, SpaceFactory
from tests.invariants import check_invariants
from tests.management.rows import JobFactory, ledger_row

pytestmark = pytest.mark.django_db(transaction=True)

LONG_AGO, SOON = "now() - interval '100 days'", "now() + interval '10 minutes'"
COLUMNS: dict[str, tuple[str, ...]] = {
    "run_state": tuple(f"'{state}'" for state in RunState),
    "worker_id": ("NULL", "'gone#1'", "'gone#40'", "'node'"),
    "lease_token": ("NULL", "gen_random_uuid()"),
    "lease_expires_at": ("NULL", LONG_AGO, SOON),
    "heartbeat_at": ("NULL", LONG_AGO),
    "retry_count": ("0", "1", "1000"),
    "completed_at": ("NULL", LONG_AGO),
    "updated_at": (LONG_AGO, "now()"),
}
OVER = (RunState.SUCCEEDED, RunState.FAILED)
WERE_OVER = [f"'{state}'" for state in OVER]
MAX_ATTEMPTS = 5


@dataclass
class Case:
    """What is in the columns of a job, and the state of its candidate; None: the ledger does not have it."""

    columns: dict[str, str]
    candidate: RefState | None
    job: uuid.UUID


def accepted(job: uuid.UUID, columns: dict[str, str]) -> bool:
    """Write these columns of a job; return whether the database took them."""
    changes = ", ".join(f"{column} = {value}" for column, value in columns.items())
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"UPDATE source_credential_backfills SET {changes} WHERE id = %s", [job])
    except IntegrityError:
        return False
    return True


@cache
def possible() -> list[dict[str, str]]:
    """Return all combinations that the database takes."""
    job = JobFactory.create().pk
    every = [dict(zip(COLUMNS, values, strict=True)) for values in product(*COLUMNS.values())]
    taken = [columns for columns in every if accepted(job, columns)]
    SourceCredentialBackfill.objects.all().delete()
    # Those that are queued have no lease, those that are running have a whole one, and those that are over have an end.
    assert len(every) == 2304
    assert Counter(columns["run_state"] for columns in taken) == {
        "'queued'": 3 * 2,
        "'running'": 3 * 2 * 3 * 2,
        "'succeeded'": 3 * 2,
        "'failed'": 3 * 2,
    }
    return taken


def build() -> Iterator[Case]:
    """Insert a job for each, with a candidate in each state that it may have been left in."""
    space = SpaceFactory.create()
    for columns, candidate in product(possible(), (RefState.CANDIDATE, RefState.RETIRED, None)):
        job = JobFactory.create(source=SourceFactory.create(knowledge_space=space), queued=True)
        if candidate is not None:
            ledger_row(job.source, job.candidate_credential_ref, state=candidate.value, purpose="backfill")
        assert accepted(job.pk, columns)
        yield Case(columns, candidate, job.pk)


def drain(store: EncryptedStore) -> BackfillSummary:
    """Let a worker do what can be done."""
    steps = Backfill(using="default", store=store, worker="tests", lease=60.0)
    return BackfillWorker(steps, remaining=lambda: read_left("default"), batch_size=500).run()


def time_passes() -> None:
    """Let everything that waits for a moment have waited for it."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE source_credential_backfills SET lease_expires_at = {LONG_AGO} WHERE run_state = 'running'"
        )
        cursor.execute(f"UPDATE source_credential_backfills SET updated_at = {LONG_AGO} WHERE run_state = 'queued'")


def test_every_job_is_over_or_can_be_claimed_now_or_at_a_known_time() -> None:
    cases = list(build())
    jobs = SourceCredentialBackfill.objects.all()
    now = {*jobs.due().values_list("pk", flat=True), *jobs.expired().values_list("pk", flat=True)}
    time_passes()
    later = {*jobs.due().values_list("pk", flat=True), *jobs.expired().values_list("pk", flat=True)}
    assert now < later
    for case in cases:
        is_over = case.columns["run_state"] in WERE_OVER
        assert is_over != (case.job in later), case
        waits = SOON in case.columns.values() or (
            case.columns["run_state"] == "'queued'"
            and case.columns["updated_at"] == "now()"
            and case.columns["retry_count"] != "0"
        )
        assert (case.job in now) == (not is_over and not waits), case


def test_each_that_is_not_over_is_in_the_status_with_its_age() -> None:
    cases = list(build())
    status = read_status("default")
    states = Counter(case.columns["run_state"].strip("'") for case in cases)
    assert {state: status.backfills[state] for state in states} == states
    assert sum(status.failures.values()) == states["failed"]
    hundred_days = pytest.approx(100 * 86400, abs=300)
    assert status.ages["backfills"] == {"queued": hundred_days, "running": hundred_days, "failed": hundred_days}
    expired = [case for case in cases if case.columns["lease_expires_at"] == LONG_AGO]
    assert status.backfills["expired_leases"] == len(expired)


def test_every_job_comes_to_its_end(store: EncryptedStore, kfs_settings: Callable[..., None]) -> None:
    """It is moved, or has failed with a reason: it was tried too often, or the ledger does not have its candidate."""
    kfs_settings(MAX_ATTEMPTS=MAX_ATTEMPTS, RETRY_BASE=0)
    cases, jobs = list(build()), SourceCredentialBackfill.objects.all()
    time_passes()
    drain(store)
    ends = {pk: (state, code) for pk, *(state, code) in jobs.values_list("pk", "run_state", "last_error_code")}
    assert {state for state, _ in ends.values()} <= set(OVER)
    for case in cases:
        state, code = ends[case.job]
        if case.columns["run_state"] not in WERE_OVER and state == RunState.FAILED:
            lacks_its_candidate = case.candidate is None and code == JobError.LEDGER_MISSING
            assert lacks_its_candidate or int(case.columns["retry_count"]) + 1 >= MAX_ATTEMPTS, (case, code)
            assert code in JobError.values
    assert jobs.filter(run_state=RunState.SUCCEEDED).count() > len(cases) / 3
    assert read_left("default") == (0, 0, 0)
    assert [finding for finding in check_invariants("default", store) if not finding.startswith(MAY_BE)] == []


MAY_BE = (
    "a job is over",  # one that was over before, with a candidate that the ledger does not have
    "a ledger row is not final",  # retired by hand here, without a time
    "a ledger row has nothing",  # as the Node service leaves it
)

"""`retry_credential_backfill`: which jobs, what it says, and its exit codes. What becomes of them: test_operations."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from kfs_credentials.models import JobError, Source, SourceCredentialBackfill
from kfs_credentials.operations import RetryResult, retry_failed_jobs
from tests.factories import SourceFactory, SpaceFactory
from tests.management.commands import Admin, Run
from tests.management.rows import JobFactory, directory_contents, table_contents

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

COMMAND = "kfs_credentials.management.commands.retry_credential_backfill"
NEXT = "Next: `manage.py run_credential_backfill`."
LIST = "`manage.py retry_credential_backfill --all --dry-run`"


def states() -> list[str]:
    return sorted(SourceCredentialBackfill.objects.values_list("run_state", flat=True))


def failed(count: int = 1, **values: object) -> list[SourceCredentialBackfill]:
    return [JobFactory.create(**values) for _ in range(count)]


@pytest.mark.parametrize("arguments", [[], ["--all", uuid.UUID(int=1)], ["--code", "X"]])
def test_which_jobs_has_to_be_said(run: Run, arguments: list[object]) -> None:
    outcome = run("retry_credential_backfill", *arguments)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == "CommandError: Say which jobs: either give their ids, or --all.\n"


def test_all(run: Run) -> None:
    failed(3)
    JobFactory.create(running=True)
    outcome = run("retry_credential_backfill", "--all")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"3 jobs queued again. {NEXT}\n", "")
    assert states() == ["queued", "queued", "queued", "running"]
    assert run("run_credential_backfill", "--limit", 3).code == 4  # the one that runs elsewhere is left
    assert Source.objects.referenced().count() == 3


def test_all_where_there_are_none(run: Run) -> None:
    outcome = run("retry_credential_backfill", "--all")
    assert (outcome.code, outcome.out) == (0, "0 jobs queued again.\n")


@pytest.mark.parametrize("name", ["pk", "source_id"])
def test_one_by_its_id_or_its_sources(run: Run, name: str) -> None:
    one, _ = failed(2)
    outcome = run("retry_credential_backfill", getattr(one, name))
    assert (outcome.code, outcome.out) == (0, f"1 job queued again. {NEXT}\n")
    one.refresh_from_db()
    assert one.run_state == "queued"
    assert states() == ["failed", "queued"]


def test_some_by_their_ids(run: Run) -> None:
    one, two, _ = failed(3)
    # The same job by both of its ids counts once.
    outcome = run("retry_credential_backfill", one.pk, two.source_id, one.source_id)
    assert outcome.out == f"2 jobs queued again. {NEXT}\n"


def test_an_id_that_is_no_failed_jobs(run: Run) -> None:
    (one,) = failed()
    queued = JobFactory.create(queued=True)
    nobody = uuid.uuid4()
    outcome = run("retry_credential_backfill", one.pk, queued.pk, nobody)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        f"CommandError: Neither a failed job nor the source of one: {queued.pk}, {nobody}. Nothing was touched; "
        f"{LIST} counts what there is.\n"
    )
    assert states() == ["failed", "queued"]


def test_another_tenants_job_is_none(run: Run) -> None:
    (one,) = failed()
    SpaceFactory.create(tenant_id="tenant-b")
    outcome = run("retry_credential_backfill", "--tenant", "tenant-b", one.pk)
    assert outcome.code == 1
    assert f"Neither a failed job nor the source of one: {one.pk}." in outcome.err
    assert states() == ["failed"]


def test_tenant_and_space(run: Run) -> None:
    here = SpaceFactory.create(tenant_id="tenant-b")
    failed(2)
    JobFactory.create(source=SourceFactory.create(knowledge_space=here))
    JobFactory.create(source=SourceFactory.create(knowledge_space=SpaceFactory.create(tenant_id="tenant-b")))
    assert run("retry_credential_backfill", "--all", "--space", here.pk).out.startswith("1 job queued again.")
    outcome = run("retry_credential_backfill", "--all", "--tenant", "tenant-b")
    assert outcome.out == "1 job queued again. Next: `manage.py run_credential_backfill --tenant tenant-b`.\n"
    assert states() == ["failed", "failed", "queued", "queued"]


def test_a_code(run: Run) -> None:
    failed(2, last_error_code=JobError.TOO_LARGE)
    failed(1, last_error_code="THEIRS")  # of the Node service
    assert run("retry_credential_backfill", "--all", "--code", "THEIRS").out.startswith("1 job queued again.")
    assert states() == ["failed", "failed", "queued"]


def test_a_code_that_no_job_has(run: Run) -> None:
    outcome = run("retry_credential_backfill", "--all", "--code", "X")
    assert outcome.code == 1
    assert outcome.err == "CommandError: None of these jobs failed with the code X. No job has failed.\n"
    failed(2, last_error_code=JobError.TOO_LARGE)
    failed(1, last_error_code=JobError.CONFLICT)
    outcome = run("retry_credential_backfill", "--all", "--code", "X\n")
    assert outcome.err == (
        "CommandError: None of these jobs failed with the code X\\n. The codes that there are: "
        "SOURCE_SECRET_REF_CONFLICT, SOURCE_SECRET_TOO_LARGE.\n"
    )
    assert set(states()) == {"failed"}


def test_the_dry_run(run: Run, secrets_directory: Path) -> None:
    failed(2, last_error_code=JobError.TOO_LARGE)
    failed(1, last_error_code=JobError.CONFLICT)
    before = table_contents(), directory_contents(secrets_directory)
    outcome = run("retry_credential_backfill", "--all", "--dry-run")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        "1  SOURCE_SECRET_REF_CONFLICT",
        "2  SOURCE_SECRET_TOO_LARGE",
        "3 failed jobs would be queued again. Nothing was changed.",
    ]
    outcome = run("retry_credential_backfill", "--all", "--dry-run", "--format", "json")
    assert outcome.json == {
        "would_retry": 3,
        "failures": {"SOURCE_SECRET_REF_CONFLICT": 1, "SOURCE_SECRET_TOO_LARGE": 2},
    }
    assert outcome.err == "3 failed jobs would be queued again. Nothing was changed.\n"
    assert (table_contents(), directory_contents(secrets_directory)) == before


def test_jobs_that_end_and_jobs_that_are_locked(run: Run, admin: Admin) -> None:
    failed()
    JobFactory.create(source=SourceFactory.create(bare=True))
    locked = JobFactory.create()
    with admin.transaction():
        admin.execute("SELECT FROM source_credential_backfills WHERE id = %s FOR UPDATE", [locked.pk])
        outcome = run("retry_credential_backfill", "--all")
    assert outcome.code == 3
    assert outcome.out == (
        "1 job queued again, 1 ended, since nothing is left to move, 1 left alone, since they are locked or have "
        f"changed meanwhile. Run this again to retry those that still are failed. {NEXT}\n"
    )
    outcome = run("retry_credential_backfill", "--all", "--format", "json")
    assert (outcome.code, outcome.err) == (0, f"1 job queued again. {NEXT}\n")
    assert outcome.json == {"queued": 1, "ended": 0, "changed": 0, "missing": 0}


def test_the_database_goes_away_in_the_middle(
    run: Run, kfs_settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is done by then is said."""
    failed(3)
    kfs_settings(BATCH_SIZE=2)
    connection = connections["default"]
    here = connection.settings_dict["HOST"]

    def retry_then_unplug(*arguments: Any) -> RetryResult:
        result = retry_failed_jobs(*arguments)
        connection.close()
        connection.settings_dict["HOST"] = str(tmp_path)
        return result

    monkeypatch.setattr(f"{COMMAND}.retry_failed_jobs", retry_then_unplug)
    monkeypatch.setattr("kfs_credentials.operations.TRIES", 1)
    try:
        outcome = run("retry_credential_backfill", "--all")
    finally:
        connection.settings_dict["HOST"] = here
    assert (outcome.code, outcome.out) == (5, "")
    assert outcome.err == (
        "Up to here: 2 jobs queued again.\n"
        "CommandError: The database 'default' went out of reach, or was too busy to answer (OperationalError, no "
        "connection). What was done by then is done; it is safe to run this again.\n"
    )
    assert states() == ["failed", "queued", "queued"]

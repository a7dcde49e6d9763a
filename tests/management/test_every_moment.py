"""The commands on mixed tables, at each moment of the migration."""

from __future__ import annotations

import pytest

from kfs_credentials.models import JobError
from tests.factories import SourceFactory
from tests.management.commands import Run
from tests.management.rows import JobFactory, give_ref

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]


def test_from_the_first_source_to_the_last(run: Run) -> None:
    """Plaintext, moved, half moved, without credentials: each command works, and no count goes the wrong way."""
    SourceFactory.create_batch(4)
    SourceFactory.create(bare=True)
    SourceFactory.create(credentials="token")
    give_ref(SourceFactory.create())
    assert run("retry_credential_backfill", JobFactory.create().pk).code == 0
    JobFactory.create(last_error_code=JobError.CONFLICT)
    for moved in range(6):
        status = run("credential_status", "--check", "--format", "json")
        left = 5 - moved
        assert status.code == (4 if left else 3)
        assert status.json["sources"] == {
            "total": 9,
            "legacy": left + 1,
            "movable": left,
            "unsupported": 1,
            "too_large": 0,
            "referenced": 1 + moved,
            "both": 1,
            "dangling": 0,
        }
        plan = run("run_credential_backfill", "--dry-run", "--format", "json")
        assert sum(row["movable"] for row in plan.json["plan"]) == left
        assert run("retry_credential_backfill", "--all", "--dry-run", "--format", "json").json["would_retry"] == 1
        assert len(run("settle_unsupported_credentials", "--all", "--dry-run", "--format", "json").json["found"]) == 1
        assert run("run_credential_backfill", "--limit", 1).code == (4 if left > 1 else 3)


def test_many_without_credentials_and_few_with(run: Run) -> None:
    """What has nothing to move is not taken for what is not moved yet."""
    SourceFactory.create_batch(200, bare=True)
    SourceFactory.create_batch(10)
    outcome = run("run_credential_backfill")
    assert outcome.code == 0
    assert outcome.out.startswith("10 moved in ")
    outcome = run("run_credential_backfill", "--format", "json")
    assert (outcome.code, outcome.json["result"]["moved"]) == (0, 0)

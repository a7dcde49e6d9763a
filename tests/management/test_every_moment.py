"""The commands on mixed tables, at each moment of the migration."""

from __future__ import annotations

import re

import pytest
from django.apps import apps
from django.test import Client

from kfs_credentials import services
from kfs_credentials.backfill import Backfill
from kfs_credentials.errors import NoCredentials
from kfs_credentials.models import JobError, SourceCredentialBackfill
from kfs_credentials.status import read_left
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.admin.conftest import list_page, page_of
from tests.cleanup.rows import PAST, SECRET, in_database, make_source
from tests.factories import SourceFactory, add_bare_sources
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


BACK_IN_CLEAR = """UPDATE sources SET metadata = metadata || '{"credentials": {"token": "made-up"}}' WHERE id = %s"""
COMMANDS: list[list[str]] = [
    ["credential_status"],
    ["credential_status", "--format", "prometheus"],
    ["run_credential_backfill", "--dry-run"],
    ["run_secret_cleanup", "--dry-run"],
    ["run_secret_cleanup", "--due"],
    ["verify_credentials"],
    ["verify_credentials", "--deep", "--restart"],
    ["verify_credentials", "--scrub-same", "--yes"],
    ["reencrypt_secrets"],
    ["settle_unsupported_credentials", "--all", "--dry-run"],
    ["settle_unsupported_credentials", "--all", "--wrap", "token", "--dry-run"],
    ["retry_credential_backfill", "--all", "--dry-run"],
    ["bind_secret_store", "--yes"],
    ["pause_credential_workers", "--reason", "tests"],
    ["resume_credential_workers"],
]


def test_every_command_and_every_page_at_each_moment(run: Run, admin_client: Client, store: EncryptedStore) -> None:
    """A source of each kind and stage of the migration, and no moment at which one of them stands in the way."""
    plain = SourceFactory.create_batch(2, credentials=SECRET)
    empty, unsupported = SourceFactory.create(bare=True), SourceFactory.create(credentials="token")
    moved, back = make_source(), make_source()
    Backfill(using="default", store=store, worker="tests", lease=600).discover(1)
    failed = JobFactory.create(source=SourceFactory.create(credentials=SECRET)).source
    readable, unreadable = [*plain, moved, back, failed], [empty, unsupported]
    pages = [list_page(model) for model in apps.get_app_config("kfs_credentials").get_models()]
    pages += map(page_of, readable + unreadable)
    for movable, running in ((2, 1), (1, 1), (0, 0)):
        assert read_left("default") == (movable, 0, running)
        in_database(BACK_IN_CLEAR, back.pk)
        for command in COMMANDS:
            outcome = run(*command)
            assert outcome.code in (0, 3), (command, outcome)
        for page in pages:
            assert admin_client.get(page).status_code == 200, page
        for source in readable:
            assert services.resolve_credentials(tenant="tenant-a", source_id=source.pk) == SECRET
        for source in unreadable:
            with pytest.raises(NoCredentials):
                services.resolve_credentials(tenant="tenant-a", source_id=source.pk)
        if movable == running:
            # What is left is at work; its worker dies.
            SourceCredentialBackfill.objects.leased().update(lease_expires_at=PAST)
        if movable:
            assert run("run_credential_backfill", "--limit", 1).code in (3, 4)


def test_many_without_credentials_and_few_with(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has nothing to move is not taken for what is not moved yet: 10 of 10 is all, beside 100,000 others."""
    monkeypatch.setattr("kfs_credentials.management.progress.LINE_EVERY", 0.0)
    add_bare_sources(100_000)
    SourceFactory.create_batch(10)
    outcome = run("run_credential_backfill", "--batch-size", 2)
    assert (outcome.code, outcome.out.startswith("10 moved in ")) == (0, True)
    assert re.findall(r"^(\d+) of (\d+) ", outcome.err, re.MULTILINE) == [(f"{n}", "10") for n in (2, 4, 6, 8, 10)]
    outcome = run("run_credential_backfill", "--format", "json")
    assert (outcome.code, outcome.json["result"]["moved"]) == (0, 0)
    status = run("credential_status", "--check", "--format", "json")
    assert (status.code, status.json["sources"]["total"], status.json["sources"]["movable"]) == (0, 100_010, 0)

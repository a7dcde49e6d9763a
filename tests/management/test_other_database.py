"""The commands with `--database`, on a database of a later version: what is being deleted there waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from kfs_credentials.models import Source, SourceCredentialBackfill
from tests.management.commands import Run
from tests.management.rows import JobFactory
from tests.migrations.hosts import BASE, LATER, SEED, Host, throw_away

pytestmark = pytest.mark.usefixtures("secrets_directory")


@pytest.fixture
def host(django_db_blocker: DjangoDbBlocker) -> Iterator[Host]:
    """The database of a later version of knowledge-fs, by another alias than `default`."""
    with django_db_blocker.unblock(), throw_away("host") as host:
        host.run(BASE, SEED, LATER)
        host.migrate()
        yield host


def sources_of(host: Host, tenant: str, count: int) -> list[Any]:
    """Make sources in one space."""
    host.run(
        f"INSERT INTO knowledge_spaces (id, tenant_id, slug, name, created_at, updated_at) "
        f"VALUES (gen_random_uuid(), '{tenant}', '{tenant}', 'Space', now(), now())",
        f"INSERT INTO sources SELECT gen_random_uuid(), id, 'drive', 'active', 'Source', 'https://files.example/', "
        f"""'{{"credentials": {{"token": "made-up"}}}}', '[]', 1, now(), now() """
        f"FROM knowledge_spaces, generate_series(1, {count}) WHERE tenant_id = '{tenant}'",
    )
    query = "SELECT id FROM sources WHERE knowledge_space_id = (SELECT id FROM knowledge_spaces WHERE tenant_id = %s)"
    return [source for (source,) in host.rows(query, [tenant])]


def job_of(host: Host, source: Any, **values: Any) -> SourceCredentialBackfill:
    """Make a job of a source."""
    found = Source.objects.using(host.alias).select_related("knowledge_space").get(pk=source)
    job = JobFactory.build(source=found, **values)
    job.save(using=host.alias, force_insert=True)
    return job


def test_what_is_being_deleted_waits_and_is_nobodys_finding(run: Run, host: Host) -> None:
    alias = ["--database", host.alias]
    leaving = sources_of(host, "leaving", 3)
    staying = sources_of(host, "staying", 2)
    unsupported, queued, _ = leaving
    job_of(host, queued, queued=True)
    host.run(
        f"""UPDATE sources SET metadata = '{{"credentials": "token"}}' WHERE id = '{unsupported}'""",
        "UPDATE knowledge_spaces SET lifecycle_state = 'deleting', deletion_job_id = id, deleting_at = now() "
        "WHERE tenant_id = 'leaving'",
    )
    outcome = run("credential_status", *alias, "--check")
    assert outcome.code == 4
    assert outcome.last_line == (
        "Not finished: 2 to move, 0 jobs queued, 0 running. Run `manage.py run_credential_backfill --database host`."
    )
    outcome = run("run_credential_backfill", *alias)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("2 moved in ")
    assert run("credential_status", *alias, "--check").code == 0
    assert host.rows("SELECT run_state FROM source_credential_backfills WHERE source_id = %s", [queued]) == [
        ("queued",)
    ]
    moved = {row for (row,) in host.rows("SELECT id FROM sources WHERE credential_ref IS NOT NULL")}
    assert moved == set(staying)
    # Given up: all of it is taken up again.
    host.run("UPDATE knowledge_spaces SET lifecycle_state = 'active', deletion_job_id = NULL, deleting_at = NULL")
    assert run("credential_status", *alias, "--check").code == 4
    outcome = run("run_credential_backfill", *alias)
    assert (outcome.code, SourceCredentialBackfill.objects.using(host.alias).count()) == (3, 4)


def test_failed_jobs_and_unsupported_ones_of_what_is_being_deleted(run: Run, host: Host) -> None:
    alias = ["--database", host.alias]
    failed, unsupported = sources_of(host, "leaving", 2)
    job = job_of(host, failed)
    host.run(
        f"""UPDATE sources SET metadata = '{{"credentials": []}}' WHERE id = '{unsupported}'""",
        "INSERT INTO deletion_jobs SELECT gen_random_uuid(), tenant_id, id, 'knowledge-space', id, 1, now() "
        "FROM knowledge_spaces",
    )
    assert run("credential_status", *alias, "--check").code == 0
    assert run("retry_credential_backfill", *alias, "--all").out == "0 jobs queued again.\n"
    outcome = run("retry_credential_backfill", *alias, job.pk)
    assert outcome.code == 1
    assert "`manage.py retry_credential_backfill --all --dry-run --database host`" in outcome.err
    assert run("settle_unsupported_credentials", *alias, "--all").out == "0 acknowledged.\n"
    assert run("settle_unsupported_credentials", *alias, unsupported).code == 1

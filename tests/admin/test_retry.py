"""The action that retries failed jobs."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core import signing
from django.db import connection
from django.test import Client
from django.urls import reverse

from kfs_credentials.admin import confirm as confirming
from kfs_credentials.models import RefState, RunState, Source, SourceCredentialBackfill, SourceSecretLifecycleRef
from tests.admin.conftest import MakeClient, list_page, page_of
from tests.admin.rows import JobFactory, RefFactory
from tests.factories import SourceFactory, SpaceFactory

# The retry opens transactions of its own.
pytestmark = pytest.mark.django_db(transaction=True)

JOBS = SourceCredentialBackfill
RETRY = "kfs_credentials.admin.retry"
ROW_CHANGED = "1 job was left alone: row changed since you looked at it."


def failed_job(**values: Any) -> SourceCredentialBackfill:
    job: SourceCredentialBackfill = JobFactory.create(**values)
    RefFactory.create(
        source=job.source, credential_ref=job.candidate_credential_ref, state=RefState.RETIRED, operation_id=str(job.pk)
    )
    return job


def select(client: Client, *jobs: SourceCredentialBackfill, across: bool = False) -> Any:
    """Choose jobs in the list and press "Go"; return the confirmation."""
    data = {"action": "retry", "index": "0", "select_across": str(int(across))}
    return client.post(list_page(JOBS), {**data, "_selected_action": [str(job.pk) for job in jobs]})


def confirm(client: Client, confirmation: Any) -> Any:
    """Press the confirmation's button."""
    rows = re.search(r'name="rows" value="([^"]*)"', confirmation.text)
    address = re.search(r'<form action="([^"]*)" [^>]*class="kfs-confirmation"', confirmation.text)
    assert rows
    assert address
    return client.post(address[1], {"rows": html.unescape(rows[1])})


def told(client: Client) -> list[str]:
    """Return the messages on the next page, which are then gone."""
    return [str(message) for message in client.get(list_page(JOBS)).context["messages"]]


def state_of(job: SourceCredentialBackfill) -> str:
    return JOBS.objects.get(pk=job.pk).run_state


@pytest.fixture
def client(client_with: MakeClient) -> Client:
    return client_with("retry_sourcecredentialbackfill")


def test_failed_jobs_are_queued_again_after_a_confirmation(client: Client) -> None:
    jobs = [failed_job(source=SourceFactory.create(name=f"<Source> {n}")) for n in range(3)]
    confirmation = select(client, jobs[0], jobs[1])
    assert "These 2 jobs will be queued again" in confirmation.text
    assert "&lt;Source&gt; 0" in confirmation.text
    assert "&lt;Source&gt; 2" not in confirmation.text
    assert {state_of(job) for job in jobs} == {RunState.FAILED}, "nothing happens before"
    done = confirm(client, confirmation)
    assert done["Location"] == list_page(JOBS)
    assert [state_of(job) for job in jobs] == [RunState.QUEUED, RunState.QUEUED, RunState.FAILED]
    assert told(client) == ["2 jobs are queued again. If no worker is running: manage.py run_credential_backfill."]
    fresh = JOBS.objects.get(pk=jobs[0].pk).candidate_credential_ref
    assert fresh != jobs[0].candidate_credential_ref
    assert SourceSecretLifecycleRef.objects.get(credential_ref=fresh).state == RefState.CANDIDATE


def test_who_asked_is_in_the_history(client: Client) -> None:
    job = failed_job()
    confirm(client, select(client, job))
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.get_change_message()) == (str(job.pk), "Asked for a retry.")
    assert "Asked for a retry." in client.get(page_of(job, "history")).text


def test_a_confirmation_that_is_sent_twice_works_once(client: Client) -> None:
    job = failed_job()
    confirmation = select(client, job)
    confirm(client, confirmation)
    assert len(told(client)) == 1
    after = JOBS.objects.get(pk=job.pk)
    confirm(client, confirmation)
    assert told(client) == [ROW_CHANGED]
    assert JOBS.objects.get(pk=job.pk).row_version == after.row_version


def test_two_tabs(client: Client) -> None:
    """Both showed the failed job; it was retried in the first and failed again before the second was used."""
    job = failed_job()
    first, second = select(client, job), select(client, job)
    confirm(client, first)
    told(client)
    JOBS.objects.update(run_state=RunState.FAILED, completed_at=job.completed_at)
    confirm(client, second)
    assert told(client) == [ROW_CHANGED]
    assert state_of(job) == RunState.FAILED


def test_every_outcome_is_reported(client: Client) -> None:
    queued, ended, changed, gone = (failed_job() for _ in range(4))
    confirmation = select(client, queued, ended, changed, gone)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE sources SET metadata = '{}' WHERE id = %s", [ended.source_id])
        cursor.execute("UPDATE source_credential_backfills SET row_version = 99 WHERE id = %s", [changed.pk])
        cursor.execute("DELETE FROM sources WHERE id = %s", [gone.source_id])
    confirm(client, confirmation)
    assert told(client) == [
        "1 job is queued again. If no worker is running: manage.py run_credential_backfill.",
        "1 job ended as succeeded: its source has nothing left to move.",
        ROW_CHANGED,
        "1 job is gone.",
    ]
    assert [state_of(job) for job in (queued, ended, changed)] == ["queued", "succeeded", "failed"]


def test_a_job_that_somebody_holds_is_left_alone(client: Client) -> None:
    job = failed_job()
    confirmation = select(client, job)
    other = connection.copy()
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute("SELECT FROM source_credential_backfills WHERE id = %s FOR UPDATE", [job.pk])
        confirm(client, confirmation)
    finally:
        other.close()
    assert told(client) == [ROW_CHANGED]
    assert state_of(job) == RunState.FAILED


def test_jobs_that_have_not_failed(client: Client) -> None:
    queued, failed = JobFactory.create(queued=True), failed_job()
    select(client, queued)
    assert told(client) == ["None of the selected jobs has failed. Only failed jobs can be retried."]
    assert "This job will be queued again" in select(client, queued, failed).text


def test_more_jobs_than_can_be_shown(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirming, "MOST_ROWS", 2)
    jobs = [failed_job() for _ in range(3)]
    select(client, jobs[0], across=True)
    assert told(client) == [
        "At most 2 jobs can be retried at once here. Filter the list, or run manage.py retry_credential_backfill --all."
    ]
    monkeypatch.setattr(confirming, "MOST_ROWS", 3)
    confirm(client, select(client, jobs[0], across=True))
    assert {state_of(job) for job in jobs} == {RunState.QUEUED}


def test_a_thousand_jobs_at_once(client: Client) -> None:
    """More than DATA_UPLOAD_MAX_NUMBER_FIELDS: the confirmation is one field."""
    space = SpaceFactory.create()
    sources = Source.objects.bulk_create(SourceFactory.build_batch(1000, knowledge_space=space))
    jobs = JOBS.objects.bulk_create([JobFactory.build(source=source) for source in sources])
    confirm(client, select(client, jobs[0], across=True))
    assert told(client) == ["1000 jobs are queued again. If no worker is running: manage.py run_credential_backfill."]


def test_the_button_on_the_page_of_a_failed_job(client: Client, client_with: MakeClient) -> None:
    job = failed_job()
    text = client.get(page_of(job)).text
    form = text.partition('class="kfs-tool"')[2].partition("</form>")[0]
    fields = dict(re.findall(r'name="([^"]*)" value="([^"]*)"', form))
    fields.pop("csrfmiddlewaretoken", None)
    confirm(client, client.post(list_page(JOBS), fields))
    assert state_of(job) == RunState.QUEUED
    assert "kfs-tool" not in client.get(page_of(job)).text
    assert "kfs-tool" not in client_with().get(page_of(failed_job())).text


def test_without_the_permission(client: Client, client_with: MakeClient) -> None:
    job = failed_job()
    others = client_with()
    assert 'value="retry"' in client.get(list_page(JOBS)).text
    assert 'value="retry"' not in others.get(list_page(JOBS)).text
    assert "will be queued again" not in select(others, job).text
    confirmation = select(client, job)
    assert confirm(others, confirmation).status_code == 403
    assert state_of(job) == RunState.FAILED


@pytest.mark.parametrize("rows", [None, "", "nonsense", "WwpdCg:1abcde:x"])
def test_a_confirmation_that_is_not_ours(client: Client, rows: str | None) -> None:
    address = reverse("admin:kfs_credentials_sourcecredentialbackfill_retry")
    response = client.post(address, {} if rows is None else {"rows": rows})
    assert response["Location"] == list_page(JOBS)
    assert told(client) == ["This confirmation cannot be read. Select the rows again."]


def test_following_a_link_to_the_confirmation_does_nothing(client: Client) -> None:
    job = failed_job()
    rows = signing.dumps([[str(job.pk), job.row_version]], salt=RETRY)
    address = reverse("admin:kfs_credentials_sourcecredentialbackfill_retry")
    assert client.get(address, {"rows": rows})["Location"] == list_page(JOBS)
    assert told(client) == []
    assert state_of(job) == RunState.FAILED


def test_other_sites_cannot_send_the_confirmation(client: Client) -> None:
    job = failed_job()
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = client.cookies
    rows = signing.dumps([[str(job.pk), job.row_version]], salt=RETRY)
    address = reverse("admin:kfs_credentials_sourcecredentialbackfill_retry")
    assert strict.post(address, {"rows": rows}).status_code == 403
    assert state_of(job) == RunState.FAILED


def test_requests_in_transactions(client: Client) -> None:
    """With ATOMIC_REQUESTS everything else of a request is one transaction; the retry needs its own."""
    job = failed_job()
    connection.settings_dict["ATOMIC_REQUESTS"] = True
    try:
        confirm(client, select(client, job))
    finally:
        connection.settings_dict["ATOMIC_REQUESTS"] = False
    assert state_of(job) == RunState.QUEUED


def test_a_retry_that_cannot_be_made_says_why(client: Client, kfs_settings: Any) -> None:
    job = failed_job()
    confirmation = select(client, job)
    kfs_settings(KEYS=[])
    confirm(client, confirmation)
    (message,) = told(client)
    assert message.startswith("The retry stopped: KFS_CREDENTIALS['KEYS'] is empty")
    assert message.endswith("Select the jobs that still show as failed again.")
    assert state_of(job) == RunState.FAILED


def test_a_retry_that_the_database_refuses_says_why(client: Client) -> None:
    job = failed_job()
    confirmation = select(client, job)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE source_secret_lifecycle_refs ADD CONSTRAINT no CHECK (state <> 'candidate')")
    try:
        confirm(client, confirmation)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE source_secret_lifecycle_refs DROP CONSTRAINT no")
    assert told(client) == [
        "The retry stopped: CheckViolation, SQLSTATE 23514. Select the jobs that still show as failed again."
    ]
    assert state_of(job) == RunState.FAILED

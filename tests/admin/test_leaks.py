"""Every page of ours, followed link by link, with a secret wherever one can be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from pytest_django import Settings

from kfs_credentials import sql
from kfs_credentials.admin import display
from kfs_credentials.admin.source import MOST_BYTES
from kfs_credentials.crypto import new_ref
from kfs_credentials.models import (
    Attention,
    Binding,
    Checkpoint,
    ClosedKey,
    Event,
    Pause,
    RefState,
    SecretObject,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from tests.admin.conftest import MakeClient, list_page, page_of
from tests.admin.crawl import MODELS, Crawl
from tests.admin.rows import (
    OPERATIONS,
    AcknowledgementFactory,
    EventFactory,
    JobFactory,
    ObjectFactory,
    RefFactory,
    RoundFactory,
    set_ref,
)
from tests.factories import SourceFactory, SpaceFactory
from tests.leaks.canary import CANARY, hits

SECRETS = {
    "auth": {"api_key": CANARY, "items": [{"tokens": [CANARY]}]},
    "nextPageToken": CANARY,
    "endpoint": f"https://user:{CANARY}@host/path",
    f"https://{CANARY}@host": 1,
    "link": f"https://host/?sig={CANARY}",
    "document": json.dumps({"credentials": {"a": CANARY}}),
    "key_file": f"-----BEGIN PRIVATE KEY-----\n{CANARY}\n-----END PRIVATE KEY-----",
    "headers": [{"name": "Authorization", "value": CANARY}, f"Bearer {CANARY}"],
    "id": f"eyJhbGciOiJub25lIn0.{CANARY}.x",
}
METADATA: list[Any] = [
    {"credentials": {"access_token": CANARY, "more": [CANARY]}, **SECRETS},
    {"credentials": CANARY},
    {"credentials": [CANARY, {"a": CANARY}]},
    json.dumps({"credentials": {"a": CANARY}}),
    [{"credentials": CANARY}],
    SECRETS,
]


@pytest.fixture
def rows(db: None) -> list[str]:
    """Make rows in every table, with secrets in them; return the full refs."""
    refs = [new_ref() for _ in range(5)]
    space = SpaceFactory.create(description=f"see https://user:{CANARY}@wiki")
    sources = [
        SourceFactory.create(
            knowledge_space=space,
            metadata=metadata,
            uri=f"https://user:{CANARY}@files.example/x?access_token={CANARY}",
            permission_scope={"password": CANARY},
        )
        for metadata in METADATA
    ]
    for source in (sources[0], sources[-1]):  # one with credentials back in clear, and one that is moved
        set_ref(source, refs[0] if source is sources[0] else new_ref())
    RefFactory.create(source=sources[0], credential_ref=refs[0])
    RefFactory.create(leased=True, credential_ref=refs[1], last_error_code=CANARY, last_error_message=CANARY)
    ObjectFactory.create(credential_ref=refs[0], abandoned_by="me", abandoned_reason=f"https://user:{CANARY}@host")
    RefFactory.create(credential_ref=refs[4], state=RefState.RETIRED)
    ObjectFactory.create(credential_ref=refs[4], attention=Attention.DISPLACED)
    for attention, owner in {Attention.DISPLACED: sources[0], Attention.ERASURE_FAILS: None}.items():
        attempts = 20 if owner is None else 0
        row = RefFactory.create(source=owner, state=RefState.RETIRED, next_delete_at=None, delete_attempts=attempts)
        ObjectFactory.create(credential_ref=row.credential_ref, attention=attention, first_claimed_at=None)
    RoundFactory.create()
    for maker in OPERATIONS:
        maker.create()
    for ref in refs:
        EventFactory.create(credential_ref=ref, actor=f"https://user:{CANARY}@host")
    Binding.objects.update(bound_by=f"https://user:{CANARY}@host")
    ClosedKey.objects.update(closed_by=f"https://user:{CANARY}@host")
    Pause.objects.update(paused_by=f"https://user:{CANARY}@host", reason=f"https://user:{CANARY}@host")
    Checkpoint.objects.update(position=refs[0], data={"note": CANARY})
    SourceFactory.create(knowledge_space=space, metadata=METADATA[0], status=Source.DELETING)
    JobFactory.create(source=sources[3], run_state="succeeded", last_error_code=None)
    JobFactory.create(source=sources[1], candidate_credential_ref=refs[2], last_error_message=CANARY)
    JobFactory.create(source=sources[2], leased=True, candidate_credential_ref=refs[3], last_error_code=CANARY)
    AcknowledgementFactory.create(source_id=sources[1].pk)
    AcknowledgementFactory.create()
    return refs


def crawl(client: Client) -> dict[str, str]:
    """Return every page of ours that links lead to, by address; all of them can be drawn."""
    found = Crawl(client)
    found.follow_links()
    return found.pages


def test_no_page_shows_a_secret_to_a_superuser(
    rows: list[str], admin_client: Client, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DEBUG = True
    caplog.set_level("INFO")
    everything = [row for model in MODELS for row in model._default_manager.all()]
    crawl = Crawl(admin_client)
    crawl.follow_links()
    for row in everything:
        assert page_of(row) in crawl.pages, "the crawl comes to every row"
        assert page_of(row, "history") in crawl.pages
    filters = {"?state=failed", "?tenant=tenant-a", "?credentials=legacy", "?shape=string", "?attention=any"}
    assert all(any(address.endswith(one) for address in crawl.pages) for one in filters), "and through the filters"
    for model in MODELS:
        crawl.try_addresses(model._default_manager.first())
    assert crawl.submit_forms() == 5
    assert crawl.unseen() == set(), "every address of ours has been asked for"
    assert [address for address, text in crawl.pages.items() if list(hits(text))] == []
    assert list(hits(caplog.text)) == []
    assert any(rows[0] in text for text in crawl.pages.values())


def test_no_page_of_an_error_shows_a_secret(
    rows: list[str], admin_client: Client, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """As users have it: without DEBUG."""
    settings.DEBUG = False
    caplog.set_level("INFO")
    crawl = Crawl(admin_client)
    for model in MODELS:
        crawl.get(list_page(model))
    crawl.try_addresses(Source._default_manager.first())
    assert crawl.submit_forms() == 5
    assert [address for address, text in crawl.pages.items() if list(hits(text))] == []
    assert list(hits(caplog.text)) == []


def test_the_search_finds_what_a_page_shows(rows: list[str], admin_client: Client) -> None:
    """So that the test above means something: a name is shown as it is."""
    source = Source.objects.filter(credential_ref__isnull=False)[0]
    Source.objects.filter(pk=source.pk).update(name=CANARY)
    crawl = Crawl(admin_client)
    for address in (list_page(Source), page_of(source)):
        assert list(hits(crawl.get(address)))
    assert crawl.unseen(), "and so does what tells of addresses that were not asked for"


def test_no_page_shows_a_secret_or_a_full_ref_to_others(rows: list[str], client_with: MakeClient) -> None:
    pages = crawl(client_with())
    shown = [address for address, text in pages.items() if CANARY in text or any(ref in text for ref in rows)]
    assert shown == []
    assert not [address for address in pages if any(ref in address for ref in rows)]
    assert any(rows[0][:25] in text for text in pages.values()), "but its start"


def test_full_refs_are_shown_to_who_may_see_them(rows: list[str], client_with: MakeClient) -> None:
    client = client_with("view_full_ref")
    pages = {row.pk: client.get(page_of(row)) for row in SecretObject.objects.all()}
    assert {page.status_code for page in pages.values()} == {200}
    assert all(ref in page.text for ref, page in pages.items())
    events = client.get(list_page(Event)).text
    assert all(ref in events for ref in rows)


def test_the_page_of_an_object_is_closed_to_others(rows: list[str], client_with: MakeClient) -> None:
    assert client_with().get(page_of(SecretObject.objects.get(pk=rows[0]))).status_code == 403


LOOKUPS = (
    "metadata__credentials__access_token__startswith=canary",
    "metadata__contains=canary",
    "source__metadata__credentials__startswith=c",
    "secret_fingerprint__startswith=f",
    "lease_token__isnull=True",
    "last_error_message__contains=canary",
    "credential_ref__startswith=source-secret%3Av1%3A1",
    "credential_ref=x",
    "backfills__candidate_credential_ref__startswith=source",
)


@pytest.mark.parametrize("model", MODELS)
def test_lists_cannot_be_asked_about_what_they_do_not_show(model: Any, admin_client: Client) -> None:
    answers = {lookup: admin_client.get(list_page(model, f"?{lookup}")).status_code for lookup in LOOKUPS}
    assert answers == dict.fromkeys(LOOKUPS, 400)


@pytest.mark.parametrize("part", ["pretty", "json_block", "state_badge"])
def test_error_pages_show_no_secret(
    rows: list[str], part: str, client_with: MakeClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise LookupError("broken")

    settings.DEBUG = True
    client = client_with()
    client.raise_request_exception = False
    pages = [page_of(row) for row in Source.objects.all()]
    pages += [list_page(SourceCredentialBackfill), list_page(SourceSecretLifecycleRef)]
    monkeypatch.setattr(display, part, broken)
    answers = [client.get(page) for page in pages]
    errors = [answer.text for answer in answers if answer.status_code == 500]
    assert errors
    assert all("LookupError" in text and CANARY not in text for text in errors)


@pytest.mark.parametrize("credentials", [{"a": CANARY}, CANARY, [CANARY]])
def test_the_credentials_do_not_leave_the_database(credentials: Any, db: None) -> None:
    """Whatever a page shows of a source, it is made without them: this is what PostgreSQL sends."""
    source = SourceFactory.create(credentials=credentials)
    with connection.cursor() as cursor:
        cursor.execute(sql.read("admin/source"), {"id": source.pk, "most": MOST_BYTES})
        _shape, metadata, _permission_scope = cursor.fetchone()
    assert metadata == '{"title": "Handbook"}'

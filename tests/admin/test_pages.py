"""The pages of single rows, the odd ones above all."""

from __future__ import annotations

import datetime as dt
import html
import json
import re
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.urls import reverse

from kfs_credentials.admin import display
from kfs_credentials.admin.event import MOST_EVENTS
from kfs_credentials.admin.source import MOST_BYTES, as_shown
from kfs_credentials.crypto import new_ref
from kfs_credentials.models import (
    Event,
    JobError,
    KnowledgeSpace,
    Purpose,
    RefError,
    RefState,
    Round,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from tests.admin.conftest import MakeClient, list_page, page_of
from tests.admin.rows import EventFactory, JobFactory, ObjectFactory, RefFactory, RefusalFactory, RoundFactory, set_ref
from tests.factories import SourceFactory, SpaceFactory


def test_the_page_of_a_ref_shows_its_newest_events(client_with: MakeClient) -> None:
    ref = RefFactory.create(source=SourceFactory.create())
    EventFactory.create(credential_ref=ref.credential_ref, kind="reserved", actor="command:ada <b>")
    for _ in range(MOST_EVENTS):
        EventFactory.create(credential_ref=ref.credential_ref, kind="parked", detail=RefError.NEEDS_ATTENTION)
    EventFactory.create(actor="of another ref")
    text = client_with().get(page_of(ref)).text
    assert text.count("<td>erasure parked</td>") == MOST_EVENTS
    assert str(RefError.NEEDS_ATTENTION.label) in text
    assert f"Only the newest {MOST_EVENTS} are shown." in text
    assert "<td>reserved</td>" not in text
    assert "of another ref" not in text
    assert f'href="{list_page(Event)}?q={ref.source_id}"' in text
    Event.objects.filter(kind="parked")._raw_delete("default")
    text = client_with().get(page_of(ref)).text
    assert "<td>reserved</td><td>command:ada &lt;b&gt;</td><td>-</td>" in text
    assert "Only the newest" not in text


def test_the_page_of_a_ref_that_nothing_has_happened_to(admin_client: Client) -> None:
    assert admin_client.get(page_of(RefFactory.create())).status_code == 200


def test_kinds_and_reasons_that_are_in_no_list(admin_client: Client) -> None:
    """A newer version of this package wrote them, or another program."""
    event = EventFactory.create(kind="invented")
    assert "invented" in admin_client.get(page_of(event)).text
    refusal = RefusalFactory.create(reason="invented")
    assert admin_client.get(page_of(refusal)).status_code == 200


def source_with(metadata: str) -> Source:
    """Make a source whose metadata is this JSON text, to the letter."""
    source = SourceFactory.create(bare=True)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE sources SET metadata = %s::jsonb WHERE id = %s", [metadata, source.pk])
    return source


def blocks(client: Client, source: Source) -> list[str]:
    text = client.get(page_of(source)).text
    return [html.unescape(block) for block in re.findall(r'<pre class="kfs-json">(.*?)</pre>', text, re.DOTALL)]


@pytest.mark.parametrize(
    ("metadata", "shown"),
    [
        ("null", "null"),
        ("[]", "[]"),
        ("{}", "{}"),
        ("17", "17"),
        ("true", "true"),
        ('"text"', '"text"'),
        ('[{"token": "x"}, 1]', '[\n  {\n    "token": "[hidden]"\n  },\n  1\n]'),
        ('{"credentials": null}', '{\n  "credentials": "[hidden]"\n}'),
        ('{"credentials": {"a": 1}, "b": []}', '{\n  "credentials": "[hidden]",\n  "b": []\n}'),
        ('{"n": 9007199254740993}', '{\n  "n": 9007199254740993\n}'),
        ('{"n": 1e400}', f'{{\n  "n": 1{"0" * 400}\n}}'),
        ('{"title": "<script>alert(1)</script> \\u202e \U0001f511"}', None),
    ],
)
def test_metadata_of_any_shape(metadata: str, shown: str | None, admin_client: Client) -> None:
    source = source_with(metadata)
    assert admin_client.get(list_page(Source)).status_code == 200
    block = blocks(admin_client, source)[0]
    if shown is None:
        assert json.loads(block) == json.loads(metadata)
        assert "<script>alert" not in admin_client.get(page_of(source)).text
    else:
        assert block == shown


def test_metadata_that_is_long_or_deep(admin_client: Client) -> None:
    long = source_with(json.dumps({"credentials": "x", "text": "y" * MOST_BYTES}))
    assert blocks(admin_client, long) == ["More than 256 KiB: too long to show here.", "{}"]
    nearly = source_with(json.dumps({"credentials": "x" * MOST_BYTES, "text": "y" * (MOST_BYTES - 20)}))
    assert json.loads(blocks(admin_client, nearly)[0])["text"] == "y" * (MOST_BYTES - 20)
    deep = source_with("[" * 400 + "]" * 400)
    assert "[hidden]" in blocks(admin_client, deep)[0]
    deepest = source_with("[" * 3000 + "]" * 3000)
    assert admin_client.get(page_of(deepest)).status_code == 200
    assert as_shown("[" * 100_000 + "]" * 100_000, {}) == "Nested too deep to show here."


@pytest.mark.parametrize(
    ("credentials", "ref", "shown"),
    [
        ({"a": 1}, False, "in clear"),
        ({"a": 1}, True, "in the secret store, and again in clear"),
        (None, True, "in the secret store"),
        (None, False, "none"),
        ("text", False, "in clear, and unsupported: string"),
        ([1], True, "in clear, and unsupported: array"),
    ],
)
def test_where_the_credentials_are(credentials: Any, ref: bool, shown: str, admin_client: Client) -> None:
    source = SourceFactory.create(credentials=credentials)
    if ref:
        set_ref(source, new_ref())
    text = admin_client.get(page_of(source)).text
    field = re.search(r'field-credentials_now.*?<div class="readonly">(.*?)</div>', text, re.DOTALL)
    assert field
    assert re.sub(r"<[^>]*>", "", field[1]) == shown


def test_the_uri_and_other_texts_are_shown_without_secrets(admin_client: Client) -> None:
    scope = {"pwd": "x", "who": "all"}
    source = SourceFactory.create(uri="https://user:pass@host/?token=abc&page=2", permission_scope=scope)
    text = admin_client.get(page_of(source)).text
    assert "https://[hidden]@host/?token=[hidden]&amp;page=2" in text
    assert blocks(admin_client, source)[1] == '{\n  "pwd": "[hidden]",\n  "who": "all"\n}'
    space = SpaceFactory.create(description="Bearer abc")
    assert "Bearer [hidden]" in admin_client.get(page_of(space)).text


def test_names_of_any_length(admin_client: Client) -> None:
    for name in ("", " ", "n" * 10_000, "<b>bold</b>"):
        JobFactory.create(source=SourceFactory.create(name=name, knowledge_space=SpaceFactory.create(name=name)))
    for model in (KnowledgeSpace, Source, SourceCredentialBackfill):
        text = admin_client.get(list_page(model)).text
        assert "n" * 79 + "…" in text
        assert "n" * 80 not in text
        assert "<b>bold" not in text
    for source in Source.objects.all():
        assert admin_client.get(page_of(source)).status_code == 200


def test_a_source_its_job_and_its_refs_lead_to_each_other(admin_client: Client) -> None:
    source = SourceFactory.create()
    job = JobFactory.create(source=source)
    refs = [RefFactory.create(source=source, operation_id=str(job.pk), state=RefState.RETIRED) for _ in range(22)]
    text = admin_client.get(page_of(source)).text
    assert page_of(job) in text
    assert sum(page_of(ref) in text for ref in refs) == 20
    assert f"{list_page(SourceSecretLifecycleRef)}?q={source.pk}" in text
    text = admin_client.get(page_of(job)).text
    assert page_of(source) in text
    assert f"{list_page(SourceSecretLifecycleRef)}?q={job.pk}" in text
    found = admin_client.get(list_page(SourceSecretLifecycleRef, f"?q={job.pk}")).context["cl"]
    assert {row.pk for row in found.result_list} == {row.pk for row in refs}
    text = admin_client.get(page_of(refs[0])).text
    assert page_of(source) in text
    assert f"{list_page(SourceCredentialBackfill)}?q={job.pk}" in text


def test_a_ref_that_no_job_reserved_leads_to_none(admin_client: Client) -> None:
    row = RefFactory.create(purpose=Purpose.ROTATE, operation_id="<b>of a caller")
    text = admin_client.get(page_of(row)).text
    assert "&lt;b&gt;of a caller" in text
    assert f"{list_page(SourceCredentialBackfill)}?q=" not in text


def test_a_ref_outlives_its_source(admin_client: Client) -> None:
    row = RefFactory.create()
    text = admin_client.get(page_of(row)).text
    assert f"{row.source_id} (gone)" in text
    assert f"{list_page(KnowledgeSpace)}?q={row.knowledge_space_id}" in text


def test_where_the_object_of_a_ref_lies(admin_client: Client) -> None:
    row = RefFactory.create()
    assert "store default" not in admin_client.get(page_of(row)).text
    stored = ObjectFactory.create(credential_ref=row.credential_ref, size=2048)
    text = admin_client.get(page_of(row)).text.replace("\xa0", " ")
    assert "store default, key 0123456789abcdef, 2.0 KB" in text
    type(stored).objects.update(size=None, key_id=None)
    assert "store default, key -, -" in admin_client.get(page_of(row)).text


def test_errors_are_shown_by_their_code_and_never_by_their_text(admin_client: Client) -> None:
    for code in (JobError.INTEGRITY, "SOMETHING_OF_THE_NODE_SERVICE", "text from outside", None):
        job = JobFactory.create(last_error_code=code, last_error_message="text from outside")
        for page in (page_of(job), list_page(SourceCredentialBackfill)):
            assert "text from outside" not in admin_client.get(page).text
    assert display.error(JobError.INTEGRITY) == (
        "The object at the candidate ref is damaged or another's. (SOURCE_SECRET_INTEGRITY_FAILED)"
    )
    assert display.error(JobError.INTEGRITY, code=False) == "The object at the candidate ref is damaged or another's."
    assert display.error(RefError.RETAINED) == (
        "The secret store may not erase the object yet. (SOURCE_SECRET_RETAINED)"
    )
    assert display.error(RefError.RETAINED, code=False) == "The secret store may not erase the object yet."
    assert display.error("SOMETHING_OF_THE_NODE_SERVICE") == "SOMETHING_OF_THE_NODE_SERVICE"
    assert display.error("text from outside") == "unknown"
    assert display.error(None) == display.error("") == "-"


@pytest.mark.parametrize(
    "object_id",
    ["0f9dd52a-6d25-4f70-8a1c-4f1f7a2b9c11", "nonsense", "a_00b", "%00", "%2500", "source-secret_3Av1_3A1"],
)
@pytest.mark.parametrize("model", ["source", "secretobject", "sourcecredentialbackfill"])
def test_pages_of_rows_that_there_are_not(model: str, object_id: str, admin_client: Client) -> None:
    page = reverse(f"admin:kfs_credentials_{model}_changelist") + f"{object_id}/change/"
    response = admin_client.get(page)
    assert response.status_code == 302
    assert response["Location"] == reverse("admin:index")


def test_pages_take_few_queries(admin_client: Client, django_assert_max_num_queries: Any) -> None:
    source = SourceFactory.create()
    rows = [
        source,
        JobFactory.create(source=source),
        source.knowledge_space,
        ObjectFactory.create(),
        RoundFactory.create(),
        EventFactory.create(),
    ]
    rows += [RefFactory.create(source=source) for _ in range(5)]
    for row in rows:
        admin_client.get(page_of(row))  # Django remembers the ids of content types
        # Session, user, pause, the row. Of a source: JSON, job, refs; of a ref: object, source, events, decisions.
        with django_assert_max_num_queries(8):
            admin_client.get(page_of(row))


def test_who_is_at_a_round_and_what_it_covers(admin_client: Client) -> None:
    sweep = RoundFactory.create(covers_until="2025-03-04T15:06:07Z")
    patrol = RoundFactory.create(name=Round.patrol("default"), worker_id=None, lease_token=None, lease_expires_at=None)
    text = admin_client.get(page_of(sweep)).text
    assert "worker#1" in text
    assert "lease ends" in text
    assert "March 4, 2025" in text
    text = admin_client.get(page_of(patrol)).text
    assert "patrol:default" in text
    assert "lease ends" not in text
    assert 'id="searchbar"' not in admin_client.get(list_page(Round)).text
    answer = admin_client.get(list_page(Round, "?q=sweep"))
    told = [str(message) for message in answer.context["messages"]]
    assert told == ["That is neither an id nor a ref. Rounds have names, and there are few of them."]


def test_refs_in_full_and_shortened(admin_client: Client, client_with: MakeClient) -> None:
    row = RefFactory.create()
    short = f"{row.credential_ref[:25]}…"
    everybody = client_with()
    for page in (page_of(row), list_page(SourceSecretLifecycleRef)):
        assert row.credential_ref in admin_client.get(page).text
        text = everybody.get(page).text
        assert short in text
        assert row.credential_ref not in text


@pytest.mark.parametrize(
    ("distance", "words"),
    [
        (dt.timedelta(0), "0 seconds"),
        (dt.timedelta(seconds=1), "1 second"),
        (dt.timedelta(seconds=-59), "59 seconds"),
        (dt.timedelta(seconds=60), "1 minute"),
        (dt.timedelta(hours=-50), "2 days"),
        (dt.timedelta(days=400), "1 year"),
    ],
)
def test_lengths_of_time(distance: dt.timedelta, words: str) -> None:
    assert display.in_words(distance).replace("\xa0", " ") == words

"""Searching by id and ref."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.test import Client

from kfs_credentials.admin.search import PREFIX, Refs, Term
from kfs_credentials.crypto import new_ref
from kfs_credentials.models import (
    Acknowledgement,
    Event,
    KnowledgeSpace,
    SecretObject,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from tests.admin.conftest import MakeClient, list_page
from tests.admin.rows import AcknowledgementFactory, EventFactory, JobFactory, ObjectFactory, RefFactory, set_ref
from tests.factories import SourceFactory

REF = f"{PREFIX}1234abcd-5678-4def-9abc-0123456789ab"
ID = uuid.UUID("1234abcd-5678-4def-9abc-0123456789ab")


def found(client: Client, model: Any, term: object) -> set[Any]:
    response = client.get(list_page(model), {"q": str(term)})
    return {row.pk for row in response.context["cl"].result_list}


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        (REF, REF, REF),
        (f"  {REF.upper()} ", REF, REF),
        (REF[:25], f"{REF[:25]}-0000-4000-8000-000000000000", f"{REF[:25]}-ffff-4fff-bfff-ffffffffffff"),
        (f"{REF[:25]}…", f"{REF[:25]}-0000-4000-8000-000000000000", f"{REF[:25]}-ffff-4fff-bfff-ffffffffffff"),
        (
            f"{PREFIX}1",
            f"{PREFIX}10000000-0000-4000-8000-000000000000",
            f"{PREFIX}1fffffff-ffff-4fff-bfff-ffffffffffff",
        ),
        (REF[:-1], f"{REF[:-1]}0", f"{REF[:-1]}f"),
    ],
)
def test_a_ref_or_its_start(text: str, first: str, last: str) -> None:
    assert Term.read(text, full_refs=True) == Term(None, Refs(first, last))


@pytest.mark.parametrize("text", [str(ID), str(ID).upper(), ID.hex, f" {ID} "])
def test_an_id_is_also_that_of_a_ref(text: str) -> None:
    assert Term.read(text, full_refs=True) == Term(ID, Refs(REF, REF))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "words",
        "1234abcd",
        "source-secret:v2:1234",
        f"{PREFIX}g",
        f"{REF}0",
        f"{PREFIX}1234abcd5",
        f"{REF[:31]}5",
        "%",
    ],
)
def test_anything_else_is_not_understood(text: str) -> None:
    assert Term.read(text, full_refs=True) is None


def test_who_sees_the_start_of_refs_cannot_find_out_the_rest() -> None:
    shown = Refs.starting_with(REF[:25])
    assert Term.read(REF[:24], full_refs=False) == Term(None, Refs.starting_with(REF[:24]))  # type: ignore[arg-type]
    for length in range(25, len(REF)):
        assert Term.read(REF[:length], full_refs=False) == Term(None, shown)  # type: ignore[arg-type]
        assert Term.read(f"{REF[:25]}-ffff"[:length], full_refs=False) == Term(None, shown)  # type: ignore[arg-type]
    assert Term.read(REF, full_refs=False) == Term(None, Refs(REF, REF)), "a whole one is known already"


def test_the_start_of_a_ref_finds_what_starts_so(admin_client: Client) -> None:
    digits = "0123456789abcdef"
    rows = [
        ObjectFactory.create(credential_ref=f"{PREFIX}{a}{b}000000-0000-4000-8000-00000000000{b}")
        for a in "09af"
        for b in digits
    ]
    for start in [f"{PREFIX}{a}" for a in "0189af"] + [f"{PREFIX}{a}{b}" for a in "09f" for b in digits]:
        expected = {row.pk for row in rows if row.pk.startswith(start)}
        assert found(admin_client, SecretObject, start) == expected


def test_sources(admin_client: Client) -> None:
    one, other = SourceFactory.create(), SourceFactory.create()
    set_ref(one, REF)
    assert found(admin_client, Source, one.pk) == {one.pk}
    assert found(admin_client, Source, other.knowledge_space_id) == {other.pk}
    for term in (REF, REF[:25], ID):
        assert found(admin_client, Source, term) == {one.pk}
    assert found(admin_client, Source, uuid.uuid4()) == set()


def test_jobs(admin_client: Client) -> None:
    one, elsewhere = JobFactory.create(candidate_credential_ref=REF), JobFactory.create()
    beside = JobFactory.create(source=SourceFactory.create(knowledge_space=one.knowledge_space))
    for term in (one.pk, one.source_id, REF, REF[:20], ID):
        assert found(admin_client, SourceCredentialBackfill, term) == {one.pk}
    assert found(admin_client, SourceCredentialBackfill, one.knowledge_space_id) == {one.pk, beside.pk}
    assert found(admin_client, SourceCredentialBackfill, elsewhere.source_id) == {elsewhere.pk}
    assert found(admin_client, SourceCredentialBackfill, new_ref()) == set()


def test_refs_of_a_source(admin_client: Client) -> None:
    source = SourceFactory.create()
    rows = [RefFactory.create(source=source, credential_ref=REF), RefFactory.create(source=source)]
    beside = RefFactory.create(source=SourceFactory.create(knowledge_space=source.knowledge_space))
    RefFactory.create()
    both = {row.pk for row in rows}
    assert found(admin_client, SourceSecretLifecycleRef, source.pk) == both
    assert found(admin_client, SourceSecretLifecycleRef, source.knowledge_space_id) == {*both, beside.pk}
    for term in (rows[0].pk, rows[0].operation_id, REF, REF[:22], ID):
        assert found(admin_client, SourceSecretLifecycleRef, term) == {rows[0].pk}


def test_refs_of_what_is_gone(admin_client: Client) -> None:
    rows = [RefFactory.create(tenant_id=f"tenant-{n % 3}") for n in range(12)]
    twin = RefFactory.create(tenant_id="tenant-9", source_id=rows[5].source_id)
    assert found(admin_client, SourceSecretLifecycleRef, rows[5].source_id) == {rows[5].pk, twin.pk}
    for row in rows:
        assert found(admin_client, SourceSecretLifecycleRef, row.knowledge_space_id) == {row.pk}
    assert found(admin_client, SourceSecretLifecycleRef, uuid.uuid4()) == set()


def test_events_of_a_ref_and_of_a_source(admin_client: Client) -> None:
    row = RefFactory.create(source=SourceFactory.create(), credential_ref=REF)
    gone = RefFactory.create()
    of_one = {EventFactory.create(credential_ref=REF).pk for _ in range(2)}
    of_gone = EventFactory.create(credential_ref=gone.credential_ref)
    seen = EventFactory.create(credential_ref=None, kind="acknowledged", source_id=row.source_id)
    EventFactory.create()
    for term in (REF, REF[:25], ID):
        assert found(admin_client, Event, term) == of_one
    assert found(admin_client, Event, row.source_id) == {*of_one, seen.pk}
    assert found(admin_client, Event, gone.source_id) == {of_gone.pk}
    assert found(admin_client, Event, uuid.uuid4()) == set()


def test_spaces_objects_and_acknowledgements(admin_client: Client) -> None:
    source = SourceFactory.create()
    assert found(admin_client, KnowledgeSpace, source.knowledge_space_id) == {source.knowledge_space_id}
    assert found(admin_client, KnowledgeSpace, REF) == set()
    one, _other = ObjectFactory.create(credential_ref=REF), ObjectFactory.create()
    for term in (REF, REF[:30], ID):
        assert found(admin_client, SecretObject, term) == {one.pk}
    seen = AcknowledgementFactory.create()
    assert found(admin_client, Acknowledgement, seen.source_id) == {seen.pk}
    assert found(admin_client, Acknowledgement, REF) == set()


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Source, "Enter the id of a source or of a knowledge space, a ref, or the start of one."),
        (SecretObject, "Enter a ref, or the start of one."),
    ],
)
def test_words_find_nothing_and_the_page_says_what_does(model: Any, what: str, client_with: MakeClient) -> None:
    SourceFactory.create(name="words")
    ObjectFactory.create(store="words")
    response = client_with().get(list_page(model), {"q": "words"})
    assert not response.context["cl"].result_list
    assert [str(message) for message in response.context["messages"]] == [f"That is neither an id nor a ref. {what}"]


def test_a_search_that_is_understood_says_nothing(admin_client: Client) -> None:
    assert not list(admin_client.get(list_page(Source), {"q": REF[:25]}).context["messages"])

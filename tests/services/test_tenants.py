"""Another tenant's id is answered like one that nobody has: the same type, the same text, and nothing is changed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from kfs_credentials import services
from kfs_credentials.errors import KfsCredentialsError, SourceExists
from kfs_credentials.models import KnowledgeSpace, Source
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory
from tests.management.rows import directory_contents, table_contents
from tests.services.conftest import NEW, OLD, Files, create

pytestmark = pytest.mark.django_db(transaction=True)

Act = Callable[[Any, str], object]

ON_SOURCES: dict[str, Act] = {
    "resolve": lambda source, tenant: services.resolve_credentials(tenant=tenant, source_id=source),
    "rotate": lambda source, tenant: services.rotate_credentials(tenant=tenant, source_id=source, credentials=NEW),
    "rotate, a version": lambda source, tenant: services.rotate_credentials(
        tenant=tenant, source_id=source, credentials=NEW, expected_version=1, operation_id="x"
    ),
    "revoke": lambda source, tenant: services.revoke_credentials(tenant=tenant, source_id=source),
    "revoke, a version": lambda source, tenant: services.revoke_credentials(
        tenant=tenant, source_id=source, expected_version=9
    ),
    "delete": lambda source, tenant: services.delete_source(tenant=tenant, source_id=source),
}
ON_SPACES: dict[str, Act] = {
    "create": lambda space, tenant: services.create_source(
        tenant=tenant, space_id=space, type="drive", name="A", uri="https://files.example", credentials=NEW
    ),
    "create without credentials": lambda space, tenant: services.create_source(
        tenant=tenant, space_id=space, type="drive", name="A", uri="https://files.example"
    ),
    "delete": lambda space, tenant: services.delete_knowledge_space(tenant=tenant, space_id=space),
}
TENANTS = ["tenant-b", "Tenant-A", "tenant-a ", "%", "tenant-a\x00", "\ud800", None, 5]


def answer(act: Act, target: Any, tenant: Any) -> tuple[type, str, str]:
    with pytest.raises(KfsCredentialsError) as caught:
        act(target, tenant)
    assert caught.value.__cause__ is caught.value.__context__ is None
    return type(caught.value), str(caught.value), caught.value.code


@pytest.fixture
def untouched(source: Source, files: Files) -> Iterator[None]:
    """At the end, everything is as it was at the beginning."""
    SourceFactory.create(knowledge_space=source.knowledge_space, credentials=OLD)
    before = table_contents(), directory_contents(files()[0].parent)
    yield
    assert (table_contents(), directory_contents(files()[0].parent)) == before


@pytest.mark.parametrize("act", ON_SOURCES.values(), ids=ON_SOURCES)
def test_a_source_of_another_tenant(untouched: None, source: Source, act: Act) -> None:
    expected = answer(act, uuid.uuid4(), "tenant-a")
    assert expected[1:] == ("this tenant has no such source", "SOURCE_NOT_FOUND")
    in_clear = Source.objects.get(credential_ref=None)
    for tenant, target in product([*TENANTS, ""], (source.pk, str(source.pk), in_clear.pk, "no-uuid")):
        assert answer(act, target, tenant) == expected


@pytest.mark.parametrize("act", ON_SPACES.values(), ids=ON_SPACES)
def test_a_space_of_another_tenant(untouched: None, space: KnowledgeSpace, act: Act) -> None:
    expected = answer(act, uuid.uuid4(), "tenant-a")
    assert expected[1:] == ("this tenant has no such knowledge space", "KNOWLEDGE_SPACE_NOT_FOUND")
    for tenant, target in product(TENANTS, (space.pk, str(space.pk), "no-uuid")):
        assert answer(act, target, tenant) == expected


@pytest.mark.parametrize("act", [*ON_SOURCES.values(), *ON_SPACES.values()], ids=[*ON_SOURCES, *ON_SPACES])
def test_the_same_statements_are_sent(untouched: None, source: Source, act: Act) -> None:
    """Neither takes longer, waits for a lock of the other tenant's, nor asks a validator."""
    target = source.pk if act in ON_SOURCES.values() else source.knowledge_space_id
    sent = []
    for asked in (uuid.uuid4(), target):
        with CaptureQueriesContext(connection) as queries:
            answer(act, asked, "tenant-b")
        sent.append([query["sql"].replace(asked.hex, "asked") for query in queries.captured_queries])
    assert sent[0] == sent[1]
    assert sent[0]


def test_another_tenants_rows_are_not_waited_for(source: Source, other: Any, store: EncryptedStore) -> None:
    other.execute("SELECT FROM sources FOR UPDATE")
    other.execute("SELECT FROM knowledge_spaces FOR UPDATE")
    for act in ON_SOURCES.values():
        answer(act, source.pk, "tenant-b")
    for act in ON_SPACES.values():
        answer(act, source.knowledge_space_id, "tenant-b")


def test_the_id_of_another_tenants_source_cannot_be_taken(source: Source, store: EncryptedStore) -> None:
    """An id is taken for all tenants; whose it is, nobody is told."""
    space = KnowledgeSpace.objects.create(
        tenant_id="tenant-b", slug="b", name="B", created_at=source.created_at, updated_at=source.created_at
    )
    for credentials in (NEW, None):
        with pytest.raises(SourceExists) as caught:
            create(space, credentials, tenant="tenant-b", source_id=source.pk)
        assert "tenant-a" not in str(caught.value)
    assert services.resolve_credentials(tenant="tenant-a", source_id=source.pk) == OLD

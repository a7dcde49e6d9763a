"""Rows for the tests, as a host application writes them."""

from __future__ import annotations

from typing import Any

import factory
from django.db import connection
from django.utils import timezone

from kfs_credentials.models import KnowledgeSpace, Source

MANY_BARE = """
INSERT INTO sources (
  id, knowledge_space_id, type, status, name, uri, metadata, permission_scope, version, created_at, updated_at
)
SELECT gen_random_uuid(), %s, 'web', 'active', 'Source ' || n, '', '{"title": "Handbook"}', '{}', 1, now(), now()
FROM generate_series(1, %s) AS n
"""


class SpaceFactory(factory.django.DjangoModelFactory[KnowledgeSpace]):
    """A space of tenant `tenant-a`."""

    class Meta:
        model = KnowledgeSpace

    tenant_id = "tenant-a"
    slug = factory.Sequence(lambda n: f"space-{n}")
    name = factory.Sequence(lambda n: f"Space {n}")
    created_at = factory.LazyFunction(timezone.now)
    updated_at = factory.LazyFunction(timezone.now)


class SourceFactory(factory.django.DjangoModelFactory[Source]):
    """A source with legacy credentials: `credentials=` whatever they should be, `metadata=` all of it."""

    class Meta:
        model = Source
        exclude = ("credentials", "other")

    class Params:
        bare = factory.Trait(metadata=factory.LazyAttribute(lambda source: dict(source.other)))

    knowledge_space = factory.SubFactory(SpaceFactory)
    type = "online_drive"
    status = "active"
    name = factory.Sequence(lambda n: f"Source {n}")
    uri = factory.Sequence(lambda n: f"https://files.example/{n}")
    credentials: Any = factory.Sequence(lambda n: {"access_token": f"made-up-{n}"})
    other: Any = {"title": "Handbook"}
    metadata = factory.LazyAttribute(lambda source: {**source.other, "credentials": source.credentials})
    permission_scope: Any = factory.LazyFunction(dict)
    version = 1
    created_at = factory.LazyFunction(timezone.now)
    updated_at = factory.LazyFunction(timezone.now)


def add_bare_sources(number: int) -> None:
    """Insert as many sources without credentials, in one statement."""
    with connection.cursor() as cursor:
        cursor.execute(MANY_BARE, [SpaceFactory.create().pk, number])

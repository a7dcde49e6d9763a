"""Rows for the tests, as a host application writes them."""

from __future__ import annotations

from typing import Any

import factory
from django.utils import timezone

from kfs_credentials.models import KnowledgeSpace, Source


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

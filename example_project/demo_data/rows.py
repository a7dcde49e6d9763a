"""The rows of the demo: spaces and sources, in the order in which they are loaded."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, count, islice
from typing import NamedTuple
from uuid import UUID

from example_project.demo_data.awkward import awkward
from example_project.demo_data.content import Content, Kind, ordinary, to_json
from example_project.demo_data.draw import END, PERIOD, Draw

DEFAULT_NUMBER = 2_000
DEFAULT_SEED = 2026
# A smaller demo has no room for the awkward sources.
AWKWARD_FROM = 200

# Tenant ids are text: a UUID, as in Dify, and two others that are as legal.
TENANTS = ("5f0c2a7e-3d1b-4c68-9e47-de3000000001", "Demo-Tenant/EU:2", "Brücke & Söhne 東京 🗼 demo")
TOPICS = (
    "Product handbook",
    "Customer contracts",
    "Support knowledge",
    "Engineering notes",
    "Sales material",
    "Human resources",
    "Legal archive",
    "Market research",
    "Public website",
    "Field service",
    "Finance reports",
    "Translations",
)
# Never 'deleting': later schemas of knowledge-fs require a deletion job for it.
STATUSES = ("active", "active", "active", "active", "active", "syncing", "error", "disabled")
PERMISSION_SCOPES: tuple[list[str], ...] = (
    [],
    ["workspace"],
    ["workspace", "team:demo-support"],
    ["user:demo-owner"],
)


@dataclass(frozen=True, slots=True)
class DemoSpace:
    """A row of `knowledge_spaces`."""

    id: UUID
    tenant_id: str
    slug: str
    name: str
    description: str
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class DemoSource:
    """A row of `sources`, with the tenant of its space and what becomes of its credentials (`kind`).

    `metadata_json` and `permission_scope` are JSON text: floats would lose digits.
    """

    id: UUID
    knowledge_space_id: UUID
    tenant_id: str
    type: str
    status: str
    name: str
    uri: str
    metadata_json: str
    permission_scope: str
    version: int
    created_at: datetime
    updated_at: datetime
    kind: Kind


class Expected(NamedTuple):
    """What must be true of one source before and after the backfill.

    `scope` is tenant id, space id and source id as text. `credentials_json` is the text of
    `metadata.credentials`, None if that key is missing: a movable one must read back from the store, any
    other must stay where it is. `other_metadata_json` is the rest of the metadata and must stay as it is.
    Compare values, with numbers read as Decimal: PostgreSQL spells some of them in its own way.
    """

    source_id: UUID
    scope: tuple[str, str, str]
    credentials_json: str | None
    other_metadata_json: str
    kind: Kind


def spaces(seed: int = DEFAULT_SEED, number: int = DEFAULT_NUMBER) -> list[DemoSpace]:
    """Return the twelve spaces, four for each tenant.

    Slugs and descriptions tell the number of sources, ids do not depend on it.
    Raises ValueError if the number is below 0.
    """
    if number < 0:
        raise ValueError(f"The number of demo sources must be 0 or more, not {number}.")
    result = []
    for position, topic in enumerate(TOPICS):
        draw = Draw(seed, f"space {position}")
        space_id = draw.uuid()
        created_at = END - PERIOD
        result.append(
            DemoSpace(
                id=space_id,
                tenant_id=TENANTS[position % len(TENANTS)],
                slug=f"demo-{seed}-{number}-{topic.lower().replace(' ', '-')}",
                name=topic,
                description=f"Made up: one of twelve spaces that share {number:,} sources.",
                created_at=created_at,
                updated_at=draw.moment(created_at),
            )
        )
    return result


def sources(number: int = DEFAULT_NUMBER, seed: int = DEFAULT_SEED) -> Iterator[DemoSource]:
    """Yield `number` sources, one at a time: the same ones for the same arguments, everywhere.

    From 200 on the first ones are the awkward ones; a larger number begins with the sources of a smaller one.
    """
    homes = spaces(seed, number)
    for draw, content in _contents(number, seed):
        yield _source(draw, content, homes)


def expected(number: int = DEFAULT_NUMBER, seed: int = DEFAULT_SEED) -> Iterator[Expected]:
    """Yield what to check about each source, in the order of `sources`."""
    homes = spaces(seed, number)
    for draw, content in _contents(number, seed):
        source = _source(draw, content, homes)
        scope = (source.tenant_id, str(source.knowledge_space_id), str(source.id))
        yield Expected(source.id, scope, content.credentials, content.other, content.kind)


def _contents(number: int, seed: int) -> Iterator[tuple[Draw, Content]]:
    if number < AWKWARD_FROM:
        return islice(_ordinary(seed), number)
    return islice(chain(_awkward(seed), _ordinary(seed)), number)


def _awkward(seed: int) -> Iterator[tuple[Draw, Content]]:
    for content in awkward(seed):
        yield Draw(seed, f"awkward: {content.name}"), content


def _ordinary(seed: int) -> Iterator[tuple[Draw, Content]]:
    for position in count():
        draw = Draw(seed, f"ordinary {position}")
        yield draw, ordinary(draw)


def _source(draw: Draw, content: Content, homes: list[DemoSpace]) -> DemoSource:
    # The smaller of two makes some spaces large and others small.
    home = homes[min(draw.below(len(homes)), draw.below(len(homes)))]
    created_at = draw.moment()
    return DemoSource(
        id=draw.uuid(),
        knowledge_space_id=home.id,
        tenant_id=home.tenant_id,
        type=content.provider.type,
        status=draw.pick(STATUSES),
        name=content.name,
        uri=content.uri,
        metadata_json=content.metadata,
        permission_scope=to_json(draw.pick(PERMISSION_SCOPES)),
        version=1 + draw.below(40) if content.version is None else content.version,
        created_at=created_at,
        updated_at=draw.moment(created_at),
        kind=content.kind,
    )

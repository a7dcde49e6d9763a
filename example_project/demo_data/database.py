"""Puts the demo's rows into a database, and tells them from others' rows."""

from collections import Counter
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from psycopg.pq import TransactionStatus

from example_project.demo_data.content import Kind
from example_project.demo_data.draw import CHECKSUM_BYTES, DRAWN_BYTES, NAMESPACE
from example_project.demo_data.rows import DEFAULT_NUMBER, DEFAULT_SEED, sources, spaces

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from psycopg import Connection

# The demo's ids carry a checksum: its rows are known whatever becomes of their metadata, versions and refs.
# `sha256` rather than `md5`, which servers in FIPS mode refuse.
IS_OURS = f"""
  substr(uuid_send(id), {DRAWN_BYTES + 1}) =
  substr(sha256(%s::bytea || substr(uuid_send(id), 1, {DRAWN_BYTES})), 1, {CHECKSUM_BYTES})
"""
FOREIGN_SOURCES = f"SELECT count(*) FROM sources WHERE NOT ({IS_OURS})"  # noqa: S608 (constants only)
SLUG = "^demo-(-?[0-9]+)-([0-9]+)-"
DEMOS = f"""
  SELECT DISTINCT regexp_match(slug, '{SLUG}') FROM knowledge_spaces WHERE slug ~ '{SLUG}' AND {IS_OURS}
"""  # noqa: S608 (constants only)
# Two demos that start at once must not both find an empty database. Readers and foreign keys are not held up.
LOCK = "LOCK TABLE knowledge_spaces IN SHARE ROW EXCLUSIVE MODE"
INSERT_SPACE = """
  INSERT INTO knowledge_spaces (id, tenant_id, slug, name, description, created_at, updated_at)
  VALUES (%s, %s, %s, %s, %s, %s, %s)
"""
COPY_SOURCES = """
  COPY sources (id, knowledge_space_id, type, status, name, uri, metadata, permission_scope, version,
    created_at, updated_at) FROM STDIN
"""


class DemoDataError(Exception):
    """The demo's rows cannot be put into this database; the message says why and what to do."""


def foreign_sources(connection: "BaseDatabaseWrapper | Connection[Any]") -> int:
    """Return how many sources in the database no demo has made.

    A source of the demo is known by its id, whatever its seed, and whatever has become of the rest of its
    row. All ids are read: half a second for a million, a few seconds before their first VACUUM.
    """
    with connection.cursor() as cursor:
        cursor.execute(FOREIGN_SOURCES, [NAMESPACE])
        (number,) = cursor.fetchone() or (0,)
    return int(number)


def load(
    connection: "BaseDatabaseWrapper | Connection[Any]",
    number: int = DEFAULT_NUMBER,
    seed: int = DEFAULT_SEED,
) -> Counter[Kind]:
    """Insert the demo's spaces and sources, and return how many sources of each kind were inserted.

    An empty counter means that the same demo is there already: it is left as it is, also where somebody has
    deleted some of it. Works inside the caller's transaction and streams by COPY, one source at a time.
    Raises DemoDataError if the database holds a demo with another seed or number, or if no transaction is
    open; ValueError if the number is below 0.
    """
    with connection.cursor() as cursor:
        driver = cursor.connection
        if driver.autocommit and driver.info.transaction_status == TransactionStatus.IDLE:
            raise DemoDataError("Demo data needs one transaction for both tables: call load() in transaction.atomic().")
        cursor.execute(LOCK)
        cursor.execute(DEMOS, [NAMESPACE])
        demos = {(int(made_seed), int(made_number)) for ((made_seed, made_number),) in cursor.fetchall()}
        if demos == {(seed, number)}:
            return Counter()
        if demos:
            raise DemoDataError(_other_demo(demos, number, seed))
        cursor.executemany(INSERT_SPACE, [astuple(space) for space in spaces(seed, number)])
        loaded: Counter[Kind] = Counter()
        with cursor.copy(COPY_SOURCES) as copy:
            for source in sources(number, seed):
                copy.write_row(
                    (
                        source.id,
                        source.knowledge_space_id,
                        source.type,
                        source.status,
                        source.name,
                        source.uri,
                        source.metadata_json,
                        source.permission_scope,
                        source.version,
                        source.created_at,
                        source.updated_at,
                    )
                )
                loaded[source.kind] += 1
    return loaded


def _other_demo(demos: set[tuple[int, int]], number: int, seed: int) -> str:
    found = " and ".join(f"{made_number:,} sources with seed {made_seed}" for made_seed, made_number in sorted(demos))
    return (
        f"This database holds another demo: {found}; asked for were {number:,} sources with seed {seed}. "
        "Ask for the same number and seed as before, or use another database."
    )

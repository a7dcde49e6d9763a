"""Compares the demo after a backfill with what it was made of: credentials and all other metadata, by value."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections

from example_project.demo_data import Expected, expected
from kfs_credentials.crypto import Credentials, Scope
from kfs_credentials.stores import Address, secret_stores

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

CHUNK = 500
SHOWN = 5
READ = """
SELECT id, credential_ref, (metadata -> 'credentials')::text,
  CASE WHEN jsonb_typeof(metadata) = 'object' THEN (metadata - 'credentials')::text ELSE metadata::text END
FROM sources WHERE id = ANY(%s)
"""


class Found(NamedTuple):
    """What a source is now; `credentials` and `other` are JSON text."""

    ref: str | None
    credentials: str | None
    other: str


class ReadBack(NamedTuple):
    """How many of the demo's sources are as they must be, how many are not, and the first few of those."""

    moved: int
    left_alone: int
    wrong: int
    wrong_ids: list[UUID]


def read_back(using: str, number: int, seed: int) -> ReadBack:
    """Compare the demo of that number and seed in alias `using`.

    A source that was moved must have its credentials in the store alone, digits included; any other must have
    them where they were. All other metadata must be as it was.
    """
    counts: Counter[str] = Counter()
    wrong: list[UUID] = []
    for chunk in _chunks(expected(number, seed)):
        for source_id, verdict in _compared(using, chunk):
            counts[verdict] += 1
            if verdict == "wrong" and len(wrong) < SHOWN:
                wrong.append(source_id)
    return ReadBack(counts["moved"], counts["left alone"], counts["wrong"], wrong)


def _chunks(expectations: Iterator[Expected]) -> Iterator[list[Expected]]:
    while chunk := list(islice(expectations, CHUNK)):
        yield chunk


def _compared(using: str, chunk: list[Expected]) -> Iterator[tuple[UUID, str]]:
    with connections[using].cursor() as cursor:
        cursor.execute(READ, [[one.source_id for one in chunk]])
        found = {source_id: Found(*facts) for source_id, *facts in cursor.fetchall()}
    with_ref = {source_id: now.ref for source_id, now in found.items() if now.ref is not None}
    scopes = {one.source_id: Scope(*one.scope) for one in chunk}
    addresses = [Address(scopes[source_id], ref) for source_id, ref in with_ref.items()]
    stored = dict(zip(with_ref, secret_stores["default"].get_many(addresses), strict=True))
    for one in chunk:
        now = found.get(one.source_id)
        yield one.source_id, "wrong" if now is None else _verdict(one, now, stored.get(one.source_id))


def _verdict(before: Expected, now: Found, secret: object) -> str:
    if _value(before.other_metadata_json) != _value(now.other):
        return "wrong"
    if now.ref is None:
        same = _value(before.credentials_json) == _value(now.credentials)
        return "left alone" if same and before.kind != "movable" else "wrong"
    moved = isinstance(secret, Credentials) and _comparable(secret.reveal()) == _value(before.credentials_json)
    return "moved" if moved and now.credentials is None and before.kind == "movable" else "wrong"


def _value(text: str | None) -> object:
    """Return what can be compared with `_comparable`; numbers are read with every digit."""
    return None if text is None else _comparable(json.loads(text, parse_float=Decimal, parse_int=Decimal))


def _comparable(value: Any) -> Any:
    """Return the value with its numbers as ("number", Decimal): 1 is not True then, and 0.1 is 0.1."""
    match value:
        case dict():
            return {key: _comparable(member) for key, member in value.items()}
        case list():
            return [_comparable(member) for member in value]
        case bool():
            return value
        case int() | float() | Decimal():
            return "number", Decimal(repr(value) if isinstance(value, float) else value)
        case None:
            return "null"  # unlike None, which is no text at all
        case _:
            return "text", value

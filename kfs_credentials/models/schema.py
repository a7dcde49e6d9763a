"""What the seed's schema has and Django's own fields, indexes and JSON reading lack."""

from __future__ import annotations

import json
from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

from kfs_credentials.crypto import canonical_json, parse_json


class SeedIndex(models.Index):
    """An index named by the seed: its names have up to 44 characters, and PostgreSQL takes 63."""

    max_name_length = 63


class FixedCharField(models.CharField):  # type: ignore[type-arg]  # not subscriptable at run time
    """`char(n)`, where Django's CharField is always `varchar(n)`.

    Compare with `=`, never through a cast to text: `char` pads with blanks, and a cast loses the index.
    """

    def db_type(self, connection: BaseDatabaseWrapper) -> str:
        """Return the column type."""
        return f"char({self.max_length})"


class ExactJSONDecoder(json.JSONDecoder):
    """Reads JSON without rounding a number: `jsonb` holds more digits than a float."""

    def __init__(self) -> None:
        super().__init__()

    def decode(self, s: str, *_: Any) -> Any:
        """Return the value, numbers as int, float or Decimal; see `crypto.parse_json`."""
        return parse_json(s)


class ExactJSONEncoder(json.JSONEncoder):
    """Writes every digit that `ExactJSONDecoder` read."""

    def encode(self, o: Any) -> str:
        """Return the JSON text; raises `InvalidCredentials` for what JSON cannot hold."""
        return canonical_json(o, exact=True).decode()


def exact_json_field(**options: Any) -> models.JSONField:
    """Return a `jsonb` field whose numbers survive a round trip through Python, digits included."""
    return models.JSONField(encoder=ExactJSONEncoder, decoder=ExactJSONDecoder, **options)

"""A JSON column keeps every digit that PostgreSQL holds, through Python and back."""

from decimal import Decimal
from typing import Any

import pytest
from django.core import serializers
from django.db import connection, transaction

from kfs_credentials.errors import InvalidCredentials
from kfs_credentials.models import Source
from tests.factories import SourceFactory

pytestmark = pytest.mark.django_db

# As jsonb prints them, which need not be as they were written.
NUMBERS = {
    "beyond 2^53": "9007199254740993",
    "beyond a float": "1" + "0" * 400,
    "beyond a float, below 0": "-1" + "0" * 399 + "1",
    "below a float": "0." + "0" * 399 + "1",
    "30 decimals": "0.123456789012345678901234567891",
    "30 digits around the point": "123456789012345.678901234567891",
    "5,001 digits": "1" + "234567890" * 555 + "12345",
    "5,001 decimals": "0." + "1" + "234567890" * 555 + "12345",
    "not a binary fraction": "0.1",
    "zeros at the end": "1.50000000000000000000",
    "an integer with a point": "1.0",
    "a plain integer": "42",
    "zero": "0",
}


def stored(source: Source, column: str = "metadata") -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {column}::text FROM sources WHERE id = %s", [source.pk])
        return str(cursor.fetchone()[0])


def store(source: Source, text: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE sources SET metadata = %s::jsonb, permission_scope = %s::jsonb", [text, text])


def same_value(source: Source, text: str) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT metadata = %s::jsonb FROM sources WHERE id = %s", [text, source.pk])
        return bool(cursor.fetchone()[0])


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("shape", ['{"credentials": {"n": %s}}', "[%s]", "%s"])
def test_a_number_survives_a_save(number: str, shape: str) -> None:
    source = SourceFactory.create()
    text = shape % number
    store(source, text)
    read = Source.objects.get(pk=source.pk)
    read.save()
    assert same_value(source, text)
    assert stored(source, "metadata") == stored(source, "permission_scope")
    Source.objects.bulk_update([read], ["metadata"])
    Source.objects.update(metadata=read.metadata)
    assert same_value(source, text)


def test_what_a_number_becomes_in_python() -> None:
    source = SourceFactory.create()
    store(source, '{"a": 9007199254740993, "b": 0.1, "c": 1e400, "d": 0.1000000000000000000001, "e": 1.0, "f": 1e2}')
    metadata: dict[str, Any] = Source.objects.get(pk=source.pk).metadata
    assert {name: (type(value), value) for name, value in metadata.items()} == {
        "a": (int, 9007199254740993),
        "b": (float, 0.1),
        "c": (int, 10**400),  # jsonb knows no exponents
        "d": (Decimal, Decimal("0.1000000000000000000001")),
        "e": (float, 1.0),
        "f": (int, 100),
    }


def test_everything_else_survives_too() -> None:
    text = r'{"": null, "a\u2028\"\\\n": [true, false, {}], "🔑": "\ud83d\udd11", "__proto__": {"1": ["", []]}}'
    source = SourceFactory.create()
    store(source, text)
    before = stored(source)
    Source.objects.get(pk=source.pk).save()
    assert stored(source) == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Decimal("NaN"), Decimal("-Infinity")])
def test_a_number_that_json_has_not_is_refused(value: Any) -> None:
    source = SourceFactory.create(bare=True)
    source.metadata = {"secret-name": value}
    before = stored(source)
    refused = pytest.raises(InvalidCredentials, match="NaN and infinities are not JSON")
    with refused as caught, transaction.atomic():
        source.save()
    assert "secret-name" in str(caught.value)
    assert stored(source) == before


def test_a_dump_writes_decimals_as_text() -> None:
    """Django's serializers have an encoder of their own. Numbers beyond a float are safe in pg_dump only."""
    source = SourceFactory.create()
    store(source, '{"big": 9007199254740993, "fine": 0.1000000000000000000001}')
    dumped = serializers.serialize("json", Source.objects.all())
    assert '"big": 9007199254740993' in dumped
    assert '"fine": "0.1000000000000000000001"' in dumped

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given

from kfs_credentials.crypto import parse_json
from kfs_credentials.errors import InvalidCredentials

from .strategies import plain_values, quick, type_name


@given(plain_values)
@quick
def test_reads_what_the_standard_library_writes(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-0", 0),
        ("9007199254740993", 9007199254740993),
        ("1" + "0" * 5000, 10**5000),
        ("-1" + "0" * 5000, -(10**5000)),
        ("1.5", 1.5),
        ("1.50", 1.5),
        ("1.0", 1.0),
        ("1e2", 100.0),
        ("0.1", 0.1),
        ("1e22", 1e22),
        ("1e23", 1e23),
        ("5e-324", 5e-324),
        ("0.30000000000000004", 0.30000000000000004),
        ("0.30000000000000005", Decimal("0.30000000000000005")),
        ("9007199254740993.0", Decimal("9007199254740993.0")),
        ("1e400", Decimal("1e400")),
        ("-1e-400", Decimal("-1e-400")),
        ('{"a":1,"b":2,"a":3}', {"a": 3, "b": 2}),
        ('"\\ud83d\\ude00\\ud800"', "😀\ud800"),
        (" [ true , null ]\n", [True, None]),
    ],
    ids=type_name,
)
def test_values(text: str, value: Any) -> None:
    parsed = parse_json(text)

    assert parsed == value
    assert type(parsed) is type(value)
    assert parse_json(text.encode()) == value


def test_minus_zero_keeps_its_sign() -> None:
    assert math.copysign(1, parse_json("-0.0")) == -1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is not JSON at character 0"),
        ('{"a":1}x', "it is not JSON at character 7"),
        ('{"a":01}', "it is not JSON at character 6"),
        ('["\x01"]', "it is not JSON at character 2"),
        ("\ufeff{}", "it is not JSON at character 0"),
        (b"\xef\xbb\xbf{}", "it is not JSON at character 0"),
        (b'["\xff"]', "it is not UTF-8 at byte 2"),
        ('"a"'.encode("utf-16"), "it is not UTF-8 at byte 0"),
        ("[NaN]", "NaN and infinities are not JSON"),
        ("-Infinity", "NaN and infinities are not JSON"),
        ("1" + "0" * 131072, "the number has more digits than PostgreSQL's numeric can hold"),
        ("1e1000000", "the number has more digits than PostgreSQL's numeric can hold"),
        ("1e99999999999999999999", "the number has more digits than PostgreSQL's numeric can hold"),
        ("1e-99999999999999999999", "the number has more digits than PostgreSQL's numeric can hold"),
        ("[" * 100_000, "it is nested too deep for the stack that is left"),
    ],
    ids=type_name,
)
def test_what_is_refused(text: str | bytes, problem: str) -> None:
    with pytest.raises(InvalidCredentials) as caught:
        parse_json(text)
    assert str(caught.value).startswith(f"The text cannot be read: {problem}")

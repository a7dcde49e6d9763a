from __future__ import annotations

import datetime as dt
import decimal
import enum
import functools
import math
import sys
from collections import OrderedDict
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest
import rfc8785
from hypothesis import given

from kfs_credentials.crypto import MAX_DEPTH, canonical_json, parse_json
from kfs_credentials.crypto.canonical import careful, plain
from kfs_credentials.errors import InvalidCredentials

from .strategies import plain_values, quick, same, type_name, values


class Port(enum.IntEnum):
    HTTPS = 443


class Kind(enum.StrEnum):
    TOKEN = "token"


def nested(levels: int, innermost: Any = 1) -> Any:
    value = innermost
    for level in range(levels):
        value = {"a": value} if level % 2 else [value]
    return value


@given(plain_values)
@quick
def test_the_fast_path_writes_what_the_careful_one_does(value: Any) -> None:
    fast = plain(value)

    assert fast is not None
    assert fast == careful(value, exact=True) == careful(value, exact=False) == rfc8785.dumps(value)


@given(values)
@quick
def test_whatever_path_is_taken_makes_no_difference(value: Any) -> None:
    for exact in (True, False):
        assert canonical_json(value, exact=exact) == careful(value, exact=exact)


@given(values)
@quick
def test_exact_bytes_keep_every_digit(value: Any) -> None:
    exact = canonical_json(value, exact=True)
    back = parse_json(exact)

    assert same(back, parse_json(canonical_json(back, exact=True)))
    assert canonical_json(back, exact=True) == exact
    assert same(_without_pairs(value), back)


def _without_pairs(value: Any) -> Any:
    """Two surrogates in a row come back as the character that they make."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    if isinstance(value, list):
        return [_without_pairs(item) for item in value]
    if isinstance(value, dict):
        return {_without_pairs(key): _without_pairs(member) for key, member in value.items()}
    return value


@given(values)
@quick
def test_rounded_bytes_do_not_depend_on_how_a_number_is_given(value: Any) -> None:
    assert canonical_json(parse_json(canonical_json(value, exact=True))) == canonical_json(value)


@pytest.mark.parametrize(
    ("value", "exact", "rounded"),
    [
        (1.0, "1", "1"),
        (-0.0, "0", "0"),
        (0.1, "0.1", "0.1"),
        (1e21, "1e+21", "1e+21"),
        (1e-7, "1e-7", "1e-7"),
        (10**21, "1000000000000000000000", "1e+21"),
        (2**60, "1152921504606846976", "1152921504606847000"),
        (2**53 + 1, "9007199254740993", "9007199254740992"),
        (-(2**53) - 1, "-9007199254740993", "-9007199254740992"),
        (10**400, "1" + "0" * 400, "1" + "0" * 400),
        (-(10**5000), "-1" + "0" * 5000, "-1" + "0" * 5000),
        (Decimal("1.10"), "1.1", "1.1"),
        (Decimal("-0.00"), "0", "0"),
        (Decimal("0E+99999999"), "0", "0"),
        (Decimal("1E+21"), "1e+21", "1e+21"),
        (Decimal("0.000001"), "0.000001", "0.000001"),
        (Decimal("1.5e-7"), "1.5e-7", "1.5e-7"),
        (Decimal("1.00000000000000000001"), "1.00000000000000000001", "1"),
        (
            Decimal(123456789012345678901234567890),
            "1.2345678901234567890123456789e+29",
            "1.2345678901234568e+29",
        ),
        (Decimal("123456789012345678901.50"), "123456789012345678901.5", "123456789012345680000"),
        (Decimal("1e400"), "1e+400", "1" + "0" * 400),
        (Decimal("-1.5e-400"), "-1.5e-400", "0"),
        (Port.HTTPS, "443", "443"),
        (Kind.TOKEN, '"token"', '"token"'),
        (True, "true", "true"),
        ((1, [2]), "[1,[2]]", "[1,[2]]"),
        (MappingProxyType({"b": 1, "a": None}), '{"a":null,"b":1}', '{"a":null,"b":1}'),
        (OrderedDict(b=1, a=2), '{"a":2,"b":1}', '{"a":2,"b":1}'),
        ("\ud800", '"\\ud800"', '"\\ud800"'),
        ("\ud83d\ude00", '"😀"', '"😀"'),
        (
            {"\uff01": 1, "😀": 2, "\ud83e": 3},
            '{"😀":2,"\\ud83e":3,"\uff01":1}',
            '{"😀":2,"\\ud83e":3,"\uff01":1}',
        ),
    ],
    ids=type_name,
)
def test_values(value: Any, exact: str, rounded: str) -> None:
    assert canonical_json(value, exact=True) == exact.encode()
    assert canonical_json(value) == rounded.encode()


@pytest.mark.parametrize(
    "number",
    [10**131072 - 1, -(10**131072) + 1, Decimal("1e131071"), Decimal("-1e-16383"), Decimal("1.00e-16383")],
    ids=type_name,
)
def test_the_longest_numbers_that_postgresql_holds(number: Any) -> None:
    assert parse_json(canonical_json(number, exact=True)) == number


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (10**131072, "$: the number has more digits than PostgreSQL's numeric can hold"),
        ([-(10**131072)], "$[0]: the number has more digits"),
        (Decimal("1e1000000"), "$: the number has more digits"),
        (Decimal("1e131072"), "$: the number has more digits"),
        (Decimal("1e-16384"), "$: the number has more digits"),
        (Decimal("10.1e-16383"), "$: the number has more digits"),
        ({"a": {"b": math.nan}}, "$.a.b: NaN and infinities are not JSON."),
        ({"a": 1.5, "b": [{}, 1.5, -math.inf]}, "$.b[2]: NaN and infinities are not JSON."),
        ({"a": Decimal("sNaN")}, "$.a: NaN and infinities are not JSON."),
        ({"a": Decimal("Infinity")}, "$.a: NaN and infinities are not JSON."),
        ({"odd key": b"x"}, '$["odd key"]: a value of type bytes is not JSON.'),
        ({"a": dt.date(2026, 1, 1)}, "$.a: a value of type date is not JSON."),
        ({"a": {1, 2}}, "$.a: a value of type set is not JSON."),
        ({"a": {1: 2}}, "$.a: a key of type int is not text."),
        ({"a": {"\ud83d\ude00": 1, "😀": 2}}, "$.a: two of its keys are the same in UTF-16."),
        ({"": {"\n": 1j}}, '$[""]["\\n"]: a value of type complex is not JSON.'),
    ],
    ids=type_name,
)  # fmt: skip
@pytest.mark.parametrize("exact", [True, False])
def test_what_json_cannot_hold_is_refused_with_its_path(value: Any, problem: str, exact: bool) -> None:
    with pytest.raises(InvalidCredentials) as caught:
        canonical_json(value, exact=exact)
    assert str(caught.value).startswith(f"JSON cannot hold the value at {problem}")


def test_a_path_in_a_message_is_cut() -> None:
    with pytest.raises(InvalidCredentials) as caught:
        canonical_json({"k" * 1000: {"l" * 1000: math.nan}})
    assert str(caught.value) == f"JSON cannot hold the value at $.{'k' * 95}...: NaN and infinities are not JSON."


def test_the_current_decimal_context_makes_no_difference() -> None:
    traps = [decimal.Inexact, decimal.Rounded, decimal.FloatOperation, decimal.Subnormal]
    with decimal.localcontext(decimal.Context(prec=2, Emax=9, Emin=-9, capitals=0, traps=traps)):
        assert canonical_json(Decimal("1.234567890123456789e100"), exact=True) == b"1.234567890123456789e+100"
        assert canonical_json(Decimal("1.234567890123456789e100")) == b"1.2345678901234569e+100"
        assert parse_json(b"[0.12345678901234567890123,1e400]") == [
            Decimal("0.12345678901234567890123"),
            Decimal("1E400"),
        ]


def test_nesting_up_to_the_limit() -> None:
    deepest = nested(MAX_DEPTH)

    assert canonical_json(deepest) == careful(deepest, exact=False)
    assert canonical_json(deepest, exact=True).count(b"[") == MAX_DEPTH / 2
    assert parse_json(canonical_json(deepest)) == deepest


@pytest.mark.parametrize("innermost", [1, 1.5])
@pytest.mark.parametrize("recursion_limit", [1000, 5000])
def test_nesting_beyond_the_limit_is_refused(
    innermost: float, recursion_limit: int, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(functools.partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(recursion_limit)
    with pytest.raises(InvalidCredentials, match="it is nested more than 500 levels deep"):
        canonical_json(nested(MAX_DEPTH + 1, innermost))


def test_what_contains_itself_is_refused() -> None:
    value: dict[str, Any] = {}
    value["itself"] = value
    with pytest.raises(InvalidCredentials, match="it is nested more than 500 levels deep"):
        canonical_json(value)


def _frames_down(frames: int, function: Any, *args: Any) -> Any:
    return _frames_down(frames - 1, function, *args) if frames else function(*args)


def _frames_in_use() -> int:
    frame, count = sys._getframe(), 0
    while frame := frame.f_back:  # type: ignore[assignment]
        count += 1
    return count


def test_nesting_up_to_the_limit_on_a_deep_stack() -> None:
    deepest = nested(MAX_DEPTH, 1.5)
    frames = 400 - _frames_in_use()

    text = _frames_down(frames, canonical_json, deepest)
    assert _frames_down(frames, parse_json, text) == deepest


def test_no_stack_left_is_refused() -> None:
    frames = sys.getrecursionlimit() - _frames_in_use() - 60
    with pytest.raises(InvalidCredentials, match="nested too deep for the stack that is left"):
        _frames_down(frames, canonical_json, nested(100))

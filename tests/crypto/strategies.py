"""Hypothesis strategies for what JSON, and jsonb, can hold."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

quick = settings(max_examples=150, deadline=None)

# Surrogates too, lone and in pairs, and many of the characters that UTF-16 and code points sort differently.
characters = st.one_of(
    st.characters(),
    st.characters(min_codepoint=0xD800, max_codepoint=0xFFFF),
    st.characters(min_codepoint=0x10000),
    st.sampled_from('"\\/\b\t\n\f\r\0\x1f\x7f\u2028\ufeff'),
    st.sampled_from(["\ud83d", "\ude00"]),
)
texts = st.text(characters, max_size=12)
integers = st.one_of(
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.builds(lambda exponent, offset: 10**exponent + offset, st.integers(0, 5001), st.integers(-1, 1)),
)
floats = st.floats(allow_nan=False, allow_infinity=False)
decimals = st.one_of(
    st.decimals(allow_nan=False, allow_infinity=False).filter(lambda number: number.adjusted() >= -16383),
    st.builds(Decimal, floats),
    st.builds(
        lambda digits, exponent: Decimal(digits).scaleb(exponent),
        st.integers(-(10**30), 10**30),
        st.integers(-400, 400),
    ),
)
plain_scalars = st.none() | st.booleans() | st.text(max_size=12) | st.integers(-(2**53) + 1, 2**53 - 1)
scalars = plain_scalars | texts | integers | floats | decimals


def _nested(leaves: st.SearchStrategy[Any], keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda children: st.lists(children, max_size=4) | st.dictionaries(keys, children, max_size=4),
        max_leaves=12,
    )


# Two surrogates that make a pair are the same key as the character that they make.
keys = texts.map(lambda text: text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass"))
values = _nested(scalars, keys)
objects = st.dictionaries(keys, values, max_size=5)
plain_values = _nested(plain_scalars, st.text(st.characters(max_codepoint=0xD7FF), max_size=8))
"""What the standard library's encoder can write as well."""


def type_name(value: object) -> str:
    """Name a test case: pytest's own way fails on an integer that is too long for `str`."""
    return type(value).__name__


def same(one: object, other: object) -> bool:
    """Tell whether two JSON values are the same; a float counts as the decimal number that it prints."""
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    if isinstance(one, int | float | Decimal) and isinstance(other, int | float | Decimal):
        return _number(one) == _number(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def _number(value: float | Decimal) -> Decimal:
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)

r"""Canonical JSON: one value, one sequence of bytes.

As RFC 8785 (JSON Canonicalization Scheme): no white space; members sorted by the UTF-16 code units of their
keys; strings with the shortest escapes; numbers as ECMAScript prints them. Beyond the RFC, as the original
does it: a number that is no double is rounded to one, and a lone surrogate is written as `\udxxx`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from kfs_credentials.errors import InvalidCredentials

from .numbers import MAX_SAFE_INTEGER, NotJSONError, exact_text, rounded_text
from .sensitive import sensitive

MAX_DEPTH = 500
"""How deep lists and objects may be nested; fixed, so that what is stored can be read on any stack."""

FIRST_SURROGATE = "\ud800"
LONGEST_PATH = 100

# What it may see has been looked through before, nesting included: `_is_plain`.
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
)

quote = _ENCODER.encode
"""Write one text as a JSON string, quotes included; still a `str`, to be encoded by `encode`."""


@sensitive
def canonical_json(value: object, *, exact: bool = False) -> bytes:
    """Return the canonical JSON of a value, as UTF-8.

    `value`: None, bool, int, float, Decimal, str, list, tuple, or a mapping with str keys; nested up to 500
    levels (`MAX_DEPTH`).

    `exact=False`, for fingerprints: RFC 8785 after rounding each number to a double. Equal numbers give equal
    bytes whatever their type, and the original computes the same. A number beyond a double's range, for which
    the original has no bytes, is written in full.

    `exact=True`, for what is stored: the same but for the numbers, none of which loses a digit. An int is
    written in full (2**60, 10**21); a float as before (`1.0` is `1`, `1e21` is `1e+21`); a Decimal in a
    float's layout, with all its digits (`Decimal("1.10")` is `1.1`).

    Raises `InvalidCredentials` with the path of what JSON cannot hold, never the value: other types, keys
    that are not str, two keys that are the same in UTF-16, NaN and infinities, nesting that is too deep,
    and numbers that PostgreSQL's numeric cannot hold (over 131,072 digits before the point or 16,383 after
    it).
    """
    return canonical(value, exact=exact)


def canonical(value: object, *, exact: bool) -> bytes:
    """Do what `canonical_json` says, for callers that are `sensitive` themselves."""
    return plain(value) or careful(value, exact=exact)


def plain(value: object) -> bytes | None:
    """Return the canonical JSON of a value that the standard library's encoder writes correctly; else None.

    Such a value needs no rounding. It is the usual case, and takes a few microseconds.
    """
    try:
        return encode(_ENCODER.encode(value)) if _is_plain(value, MAX_DEPTH) else None
    except RecursionError:
        return None


def careful(value: object, *, exact: bool) -> bytes:
    """Return the canonical JSON of any value, member by member; says where it cannot."""
    writer = _Writer(exact=exact)
    try:
        writer.write(value)
    except NotJSONError as error:
        problem = f"JSON cannot hold the value at {writer.where()}: {error}."
    except RecursionError:
        problem = "The value cannot be written as JSON: it is nested too deep for the stack that is left."
    else:
        return encode("".join(writer.parts))
    raise InvalidCredentials(problem)


def encode(text: str) -> bytes:
    """Return JSON text as UTF-8, which has no surrogates: pairs become their character, others an escape."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _joined(text).encode(errors="backslashreplace")


def _joined(text: str) -> str:
    """Return the text with each pair of surrogates as the one character that it stands for in UTF-16."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _is_plain(value: Any, levels: int) -> bool:
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return bool(-MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER)
    if levels == 0:
        return False
    if kind is dict:
        # Below the surrogates, code points and UTF-16 code units sort alike.
        return all(
            type(key) is str
            and (key.isascii() or max(key) < FIRST_SURROGATE)
            and (type(member) is str or _is_plain(member, levels - 1))
            for key, member in value.items()
        )
    if kind is list or kind is tuple:
        return all(type(item) is str or _is_plain(item, levels - 1) for item in value)
    return False


class _Writer:
    """Writes one value into `parts`; `path` leads to the member that is being written."""

    def __init__(self, *, exact: bool) -> None:
        self.number_text = exact_text if exact else rounded_text
        self.parts: list[str] = []
        self.path: list[str | int] = []

    def write(self, value: object) -> None:
        # One frame a level, and no comprehensions, which are frames too in Python 3.11: MAX_DEPTH has to fit.
        parts, path = self.parts, self.path
        if value is None:
            parts.append("null")
        elif isinstance(value, bool):
            parts.append("true" if value else "false")
        elif isinstance(value, str):
            parts.append(quote(value))
        elif isinstance(value, int | float | Decimal):
            parts.append(self.number_text(value))
        elif isinstance(value, Mapping):
            self._enter()
            parts.append("{")
            comma = ""
            for key, member in _sorted_members(value):
                parts.append(f"{comma}{quote(key)}:")
                path.append(key)
                self.write(member)
                path.pop()
                comma = ","
            parts.append("}")
        elif isinstance(value, list | tuple):
            self._enter()
            parts.append("[")
            for index, item in enumerate(value):
                if index:
                    parts.append(",")
                path.append(index)
                self.write(item)
                path.pop()
            parts.append("]")
        else:
            raise NotJSONError(f"a value of type {type(value).__name__} is not JSON")

    def where(self) -> str:
        """Return the path as text, `$` for the value itself, cut if it is long."""
        text = "$"
        for step in self.path:
            if isinstance(step, str) and step.isidentifier():
                text += f".{step}"
            else:
                text += f"[{json.dumps(step)}]"
            if len(text) > LONGEST_PATH:
                return text[: LONGEST_PATH - 3] + "..."
        return text

    def _enter(self) -> None:
        if len(self.path) >= MAX_DEPTH:
            raise NotJSONError(f"it is nested more than {MAX_DEPTH} levels deep")


def _sorted_members(value: Mapping[object, object]) -> list[tuple[str, object]]:
    """Return the members in the order of their keys' UTF-16 code units (RFC 8785, section 3.2.3)."""
    members: dict[bytes, tuple[str, object]] = {}
    for key, member in value.items():
        if not isinstance(key, str):
            raise NotJSONError(f"a key of type {type(key).__name__} is not text")
        members[key.encode("utf-16-be", "surrogatepass")] = (key, member)
    if len(members) < len(value):
        raise NotJSONError("two of its keys are the same in UTF-16")
    return [members[units] for units in sorted(members)]

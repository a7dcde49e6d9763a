from __future__ import annotations

import copy
import json
import pickle
import pprint
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given

from kfs_credentials.crypto import MAX_DEPTH, Credentials, Plaintext, canonical_json, parse_json
from kfs_credentials.errors import InvalidCredentials

from .strategies import objects, quick

VALUES = {
    "password": "s3cr3t-canary",
    "nested": {"list": [1, {"x": None}]},
    "limit": 2**60,
    "rate": Decimal("0.10000000000000000001"),
}


@given(objects)
@quick
def test_what_goes_in_comes_out(values: dict[str, Any]) -> None:
    credentials = Credentials(values)

    assert credentials.reveal() == parse_json(canonical_json(values, exact=True))
    assert credentials == Credentials(credentials) == credentials.reveal()
    assert Plaintext.of(credentials).exact == Plaintext.of(values).exact
    assert Plaintext.of(credentials).rounded == Plaintext.of(values).rounded


def test_it_is_a_mapping() -> None:
    credentials = Credentials(VALUES)

    assert isinstance(credentials, Mapping)
    assert dict(credentials) == credentials.reveal() == VALUES
    assert list(credentials) == ["limit", "nested", "password", "rate"]
    assert len(credentials) == 4
    assert credentials["password"] == credentials.get("password") == "s3cr3t-canary"
    assert credentials.get("missing", 7) == 7
    assert "password" in credentials
    assert "missing" not in credentials
    with pytest.raises(KeyError, match="missing"):
        credentials["missing"]


def test_what_is_taken_out_is_a_copy() -> None:
    given = {"nested": {"list": [1]}}
    credentials = Credentials(given)

    given["nested"]["list"].append(2)
    credentials["nested"]["list"].append(3)
    credentials.reveal()["nested"]["list"].append(4)
    next(iter(credentials.values()))["list"].append(5)

    assert credentials == {"nested": {"list": [1]}}


def test_it_cannot_be_changed() -> None:
    credentials = Credentials(VALUES)

    with pytest.raises(TypeError):
        credentials["password"] = "other"  # type: ignore[index]
    with pytest.raises(TypeError):
        del credentials["password"]  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        credentials.password = "other"  # type: ignore[attr-defined]


def test_equal_by_value() -> None:
    credentials = Credentials(VALUES)

    assert credentials == Credentials(dict(reversed(VALUES.items())))
    assert credentials == VALUES
    assert credentials != Credentials({})
    assert credentials != {**VALUES, "password": "other"}
    assert credentials != "s3cr3t-canary"
    with pytest.raises(TypeError, match="unhashable"):
        hash(credentials)


@pytest.mark.parametrize("secret", [Credentials(VALUES), Plaintext.of(VALUES)], ids=repr)
def test_it_shows_nothing(secret: Any) -> None:
    hidden = f"<{type(secret).__name__}: hidden>"

    assert repr(secret) == str(secret) == f"{secret}" == f"{secret!r}" == f"{secret!s:s}" == hidden
    assert pprint.pformat(secret) == secret.__sentry_repr__() == hidden
    assert repr([secret]) == f"[{hidden}]"
    assert not hasattr(secret, "__dict__")
    for slot in type(secret).__slots__:
        assert "canary" not in repr(getattr(secret, slot))


@pytest.mark.parametrize("secret", [Credentials(VALUES), Plaintext.of(VALUES)], ids=repr)
def test_it_is_neither_pickled_nor_dumped(secret: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(secret, protocol)
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps(secret)
    assert copy.copy(secret) is copy.deepcopy({"a": secret})["a"] is secret


def test_the_views_show_nothing() -> None:
    credentials = Credentials(VALUES)

    for view in (credentials.items(), credentials.values(), credentials.keys()):
        assert "canary" not in repr(view)


@pytest.mark.parametrize("value", [[], "x", None, 1, b"{}"])
def test_what_is_no_object_is_refused(value: Any) -> None:
    problem = f"^Credentials must be a JSON object, not a value of type {type(value).__name__}.$"
    with pytest.raises(InvalidCredentials, match=problem):
        Plaintext.of(value)
    with pytest.raises(InvalidCredentials, match=problem):
        Credentials(value)


def test_plaintext_is_one_object_where_nothing_is_rounded() -> None:
    for values in (
        {"a": "x", "b": [1, True, None]},
        {"n": 1.5},
        {"n": Decimal("0.1")},
        {"😀": 1, "\uff01": 2},
    ):
        plaintext = Plaintext.of(values)
        assert plaintext.exact is plaintext.rounded
        assert plaintext.size == len(plaintext.exact)


def test_plaintext_keeps_the_digits_beside_the_rounded_bytes() -> None:
    plaintext = Plaintext.of({"n": 9007199254740993})

    assert plaintext.exact == b'{"n":9007199254740993}'
    assert plaintext.rounded == b'{"n":9007199254740992}'
    assert Plaintext.of(plaintext) is plaintext


def test_the_deepest_nesting_can_be_copied() -> None:
    deepest: dict[str, Any] = {}
    for _ in range(MAX_DEPTH - 1):
        deepest = {"a": deepest}
    credentials = Credentials(deepest)

    assert canonical_json(credentials.reveal()) == canonical_json(credentials["a"]).join([b'{"a":', b"}"])

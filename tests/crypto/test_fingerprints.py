from __future__ import annotations

import os
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given

from kfs_credentials.crypto import Credentials, KeyRing, Plaintext, Scope, fingerprint, fingerprint_matches
from kfs_credentials.errors import InvalidCredentials

from .strategies import objects, quick

OLD, NEW = bytes(32), bytes(range(32))
RING = KeyRing([NEW])
SCOPE = Scope("tenant", "space", "source")


@given(objects)
@quick
def test_the_same_however_the_credentials_are_given(values: dict[str, Any]) -> None:
    expected = fingerprint(ring=RING, scope=SCOPE, credentials=values)

    assert len(expected) == 64
    assert fingerprint(RING, SCOPE, Credentials(values)) == expected
    assert fingerprint(RING, SCOPE, Plaintext.of(values)) == expected
    assert fingerprint_matches(RING, SCOPE, values, expected)


def test_differs_by_key_scope_and_value() -> None:
    values = {"a": 1}
    scopes = [
        SCOPE,
        Scope("tenant2", "space", "source"),
        Scope("tenant", "space2", "source"),
        Scope("tenant", "space", "source2"),
    ]
    made = [fingerprint(RING, scope, values) for scope in scopes]
    made += [fingerprint(KeyRing([OLD]), SCOPE, values), fingerprint(RING, SCOPE, {"a": 2})]

    assert len(set(made)) == len(made)


def test_an_odd_tenant_cannot_pass_for_another_scope() -> None:
    one = Scope('t","version":1}', "k", "s")

    assert fingerprint(RING, one, {}) != fingerprint(RING, Scope("t", "k", "s"), {})
    assert len(fingerprint(RING, Scope("\ud800", "k", "s"), {})) == 64


def test_numbers_that_round_to_the_same_share_one() -> None:
    one = fingerprint(RING, SCOPE, {"n": 9007199254740993})

    assert one == fingerprint(RING, SCOPE, {"n": 9007199254740992})
    assert one == fingerprint(RING, SCOPE, {"n": Decimal("9007199254740992.5")})
    assert fingerprint(RING, SCOPE, {"n": 10**400}) != fingerprint(RING, SCOPE, {"n": 10**400 + 1})
    assert fingerprint(RING, SCOPE, {"n": 10**400}) == fingerprint(RING, SCOPE, {"n": Decimal("1e400")})


def test_right_under_any_key_of_the_ring() -> None:
    ring, values = KeyRing([NEW, OLD]), {"a": 1}

    assert fingerprint(ring, SCOPE, values) == fingerprint(RING, SCOPE, values)
    for key in (NEW, OLD):
        assert fingerprint_matches(ring, SCOPE, values, fingerprint(KeyRing([key]), SCOPE, values))
    assert not fingerprint_matches(ring, SCOPE, values, fingerprint(KeyRing([os.urandom(32)]), SCOPE, values))


@pytest.mark.parametrize(
    "change",
    [
        str.upper,
        lambda made: made[:-1],
        lambda made: f"{made} ",
        lambda made: "é" * 64,
        lambda made: "\ud800",
    ],
)
def test_wrong_in_one_character_is_wrong(change: Any) -> None:
    made = fingerprint(RING, SCOPE, {"a": 1})

    assert fingerprint_matches(RING, SCOPE, {"a": 1}, made)
    assert not fingerprint_matches(RING, SCOPE, {"a": 1}, change(made))


def test_credentials_must_be_an_object() -> None:
    with pytest.raises(InvalidCredentials, match="must be a JSON object, not a value of type list"):
        fingerprint(RING, SCOPE, [1])  # type: ignore[arg-type]
    with pytest.raises(InvalidCredentials, match="must be a JSON object, not a value of type list"):
        fingerprint_matches(RING, SCOPE, [1], "0" * 64)  # type: ignore[arg-type]

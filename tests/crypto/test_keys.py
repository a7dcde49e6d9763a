from __future__ import annotations

import base64
import copy
import hashlib
import hmac
import pickle
import re
from typing import Any

import pytest

from kfs_credentials.crypto import KeyRing, key_id, parse_key
from kfs_credentials.errors import InvalidKey

KEY = bytes(range(32))
OTHER = bytes(range(32, 64))
HOW_TO_MAKE_ONE = "make one with `manage.py generate_secret_key`."


def test_key_id() -> None:
    expected = hmac.new(KEY, b"kfs-credentials/key-id/v1", hashlib.sha256).hexdigest()[:16]

    assert key_id(KEY) == expected


@pytest.mark.parametrize("written", [KEY.hex(), KEY.hex().upper(), f"\t{KEY.hex()}\r\n"])
def test_key_in_hex(written: str) -> None:
    assert parse_key(written) == KEY


@pytest.mark.parametrize("key", [KEY, b"\xff" * 32, b"\xfb\xef\xbe" * 10 + b"\xfb\xef"])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_key_in_base64(key: bytes, encode: Any) -> None:
    padded = encode(key).decode()

    assert parse_key(padded) == parse_key(padded.rstrip("=")) == parse_key(f" {padded}\n") == key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "change-me",
        KEY.hex()[1:],
        f"0x{KEY.hex()}",
        "g" * 64,
        base64.b64encode(KEY[1:]).decode(),
        base64.b64encode(KEY * 2).decode(),
    ],
)
def test_texts_that_are_no_key(text: str) -> None:
    with pytest.raises(InvalidKey) as caught:
        parse_key(text)
    assert str(caught.value) == (
        f"A key must be 64 hex digits or base64 of 32 bytes, and these {len(text)} characters are neither; "
        f"{HOW_TO_MAKE_ONE}"
    )


def test_a_key_that_is_not_set() -> None:
    with pytest.raises(InvalidKey) as caught:
        parse_key(None)  # type: ignore[arg-type]
    assert str(caught.value) == f"A key must be text, not a value of type NoneType; {HOW_TO_MAKE_ONE}"


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ([], f"A key ring needs one key at least; {HOW_TO_MAKE_ONE}"),
        ([KEY, KEY[1:]], f"Key 2 of the ring: A key must have 32 bytes; this one has 31; {HOW_TO_MAKE_ONE}"),
        ([KEY.hex()], "Key 1 of the ring: A key must be bytes, not a value of type str."),
        ([None], "Key 1 of the ring: A key must be bytes, not a value of type NoneType."),
        ([KEY, OTHER, KEY], "Keys 1 and 3 of the ring are the same."),
        (KEY, "A key ring needs a list of keys, even of one."),
        (KEY.hex(), "A key ring needs a list of keys, even of one."),
    ],
)
def test_rings_that_are_refused(keys: Any, problem: str) -> None:
    with pytest.raises(InvalidKey, match=f"^{re.escape(problem)}$"):
        KeyRing(keys)


def test_a_ring_knows_its_keys_by_id_and_in_order() -> None:
    ring = KeyRing(keys=[KEY, OTHER])

    assert ring.key_ids == (key_id(KEY), key_id(OTHER))
    assert ring.primary.id == key_id(KEY)
    assert [key.id for key in ring] == list(ring.key_ids)
    assert len(ring) == 2
    assert ring.get(key_id(OTHER)) is list(ring)[1]
    assert ring.get("0" * 16) is None
    assert key_id(OTHER) in ring
    assert "0" * 16 not in ring


def test_a_ring_shows_ids_only() -> None:
    ring = KeyRing([KEY, OTHER])

    assert repr(ring) == str(ring) == f"<KeyRing {key_id(KEY)}, {key_id(OTHER)}>"
    assert repr(ring.primary) == f"<RootKey {key_id(KEY)}>"


def test_a_ring_cannot_be_changed_or_pickled() -> None:
    ring = KeyRing([KEY])

    with pytest.raises(AttributeError):
        ring.primary = ring.primary  # type: ignore[misc]
    with pytest.raises(AttributeError):
        ring.primary.id = "0" * 16  # type: ignore[misc]
    assert copy.deepcopy(ring) is copy.copy(ring) is ring
    for secret in (ring, ring.primary):
        with pytest.raises(TypeError, match=r"cannot be pickled: the pickle would hold the secret in clear\.$"):
            pickle.dumps(secret)

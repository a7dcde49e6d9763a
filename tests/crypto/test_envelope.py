from __future__ import annotations

import base64
import json
import os
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given

from kfs_credentials.crypto import (
    Credentials,
    IntegrityReason,
    KeyRing,
    Plaintext,
    Scope,
    UnknownKeyError,
    canonical_json,
    envelope_key_id,
    fingerprint,
    new_ref,
    parse_json,
    seal,
    unseal,
)
from kfs_credentials.crypto.envelope import _associated_data, _to_base64url
from kfs_credentials.errors import CredentialsTooLarge, InvalidCredentials, InvalidRef, SecretIntegrityError

from .strategies import objects, quick

OLD, NEW = os.urandom(32), os.urandom(32)
RING = KeyRing([NEW])
BOTH = KeyRing([NEW, OLD])
SCOPE = Scope("tenant", "space", "source")
REF = new_ref()
VALUES = {"password": "s3cr3t", "username": "alice"}


def changed(blob: bytes, **members: Any) -> bytes:
    """Return the envelope with other members; one that is None is left out."""
    envelope = json.loads(blob) | members
    return json.dumps({name: value for name, value in envelope.items() if value is not None}).encode()


def sealed(plaintext: bytes, key: bytes = NEW, fingerprint: str = "0" * 64) -> bytes:
    """Return an authentic envelope of any plaintext."""
    iv = bytes(12)
    encrypted = AESGCM(key).encrypt(iv, plaintext, _associated_data(SCOPE, REF))
    return changed(
        seal(RING, SCOPE, REF, {}),
        ciphertext=_to_base64url(encrypted[:-16]),
        tag=_to_base64url(encrypted[-16:]),
        iv=_to_base64url(iv),
        fingerprint=fingerprint,
    )


def reason_of(blob: bytes, ring: KeyRing = RING, scope: Scope = SCOPE, ref: str = REF, **options: Any) -> str:
    with pytest.raises(SecretIntegrityError) as caught:
        unseal(ring, scope, ref, blob, **options)
    assert caught.value.reason in str(caught.value)
    return caught.value.reason


@given(objects)
@quick
def test_round_trip(values: dict[str, Any]) -> None:
    blob = seal(ring=RING, scope=SCOPE, ref=REF, credentials=values)
    credentials = unseal(ring=RING, scope=SCOPE, ref=REF, blob=blob)

    assert credentials.reveal() == parse_json(canonical_json(values, exact=True))
    assert Plaintext.of(credentials).exact == canonical_json(values, exact=True)
    assert fingerprint(RING, SCOPE, credentials) == json.loads(blob)["fingerprint"]


def test_seals_credentials_and_plaintext_alike() -> None:
    for credentials in (VALUES, Credentials(VALUES), Plaintext.of(VALUES)):
        assert unseal(RING, SCOPE, REF, seal(RING, SCOPE, REF, credentials)) == VALUES


def test_the_empty_object_is_allowed() -> None:
    assert unseal(RING, SCOPE, REF, seal(RING, SCOPE, REF, {})) == {}


def test_each_sealing_differs_and_shows_no_value() -> None:
    blobs = [seal(RING, SCOPE, REF, VALUES) for _ in range(20)]

    assert len({json.loads(blob)["iv"] for blob in blobs}) == len(set(blobs)) == 20
    assert not any(b"s3cr3t" in blob for blob in blobs)


def test_the_first_key_seals_and_each_opens() -> None:
    assert envelope_key_id(seal(BOTH, SCOPE, REF, VALUES)) == RING.primary.id
    assert unseal(BOTH, SCOPE, REF, seal(KeyRing([OLD]), SCOPE, REF, VALUES)) == VALUES


@pytest.mark.parametrize("kid", [None, "x", 7, "ABCDEF0123456789", "0" * 17, ["0" * 16]])
def test_without_a_key_id_every_key_is_tried(kid: Any) -> None:
    blob = changed(seal(KeyRing([OLD]), SCOPE, REF, VALUES), kid=kid)

    assert envelope_key_id(blob) is None
    assert unseal(BOTH, SCOPE, REF, blob) == VALUES
    assert reason_of(blob) == IntegrityReason.DECRYPTION_FAILED


def test_a_key_that_the_ring_lacks_is_named() -> None:
    blob = seal(KeyRing([OLD]), SCOPE, REF, VALUES)
    with pytest.raises(UnknownKeyError) as caught:
        unseal(RING, SCOPE, REF, blob)

    kid = BOTH.key_ids[1]
    assert (caught.value.reason, caught.value.key_id) == ("unknown key", kid)
    assert str(caught.value) == f"the stored secret cannot be trusted: unknown key {kid}, which is not in the key ring"


def test_opens_only_for_its_scope_and_ref() -> None:
    blob = seal(RING, SCOPE, REF, VALUES)

    for scope in (
        Scope("Tenant", "space", "source"),
        Scope("tenant", "other", "source"),
        Scope("tenant", "space", "x"),
    ):
        assert reason_of(blob, scope=scope) == IntegrityReason.DECRYPTION_FAILED
    assert reason_of(blob, ref=new_ref()) == IntegrityReason.DECRYPTION_FAILED


def test_a_change_in_any_byte_is_noticed() -> None:
    blob = seal(BOTH, SCOPE, REF, {"a": 1})
    key_id_at = blob.index(b'"kid"')

    for place, byte in enumerate(blob):
        for change in (1, 2, 0x20, 0x80):
            damaged = blob[:place] + bytes([byte ^ change]) + blob[place + 1 :]
            try:
                credentials = unseal(BOTH, SCOPE, REF, damaged)
            except SecretIntegrityError:
                continue
            # The key id is not authenticated. If it is none any more, every key is tried.
            assert place > key_id_at
            assert credentials == {"a": 1}


@pytest.mark.parametrize("tag", ["é" * 22, "A" * 21, "A" * 22 + "==", 7, None, ["A" * 22]])
def test_a_tag_that_is_no_base64url_is_noticed(tag: Any) -> None:
    assert reason_of(changed(seal(RING, SCOPE, REF, VALUES), tag=tag)) == IntegrityReason.NOT_AN_ENVELOPE


@pytest.mark.parametrize("missing", ["algorithm", "ciphertext", "fingerprint", "iv", "tag", "version"])
def test_a_missing_member_is_noticed(missing: str) -> None:
    blob = changed(seal(RING, SCOPE, REF, VALUES), **{missing: None})

    assert reason_of(blob) == IntegrityReason.NOT_AN_ENVELOPE
    with pytest.raises(SecretIntegrityError, match="not an envelope"):
        envelope_key_id(blob)


def test_a_tag_of_another_length_is_noticed_even_if_its_bytes_are_there() -> None:
    blob = seal(RING, SCOPE, REF, VALUES)
    ciphertext, tag = (base64.urlsafe_b64decode(json.loads(blob)[name] + "==") for name in ("ciphertext", "tag"))
    moved = changed(blob, ciphertext=_to_base64url(ciphertext[:-1]), tag=_to_base64url(ciphertext[-1:] + tag))

    assert reason_of(moved) == IntegrityReason.NOT_AN_ENVELOPE


@pytest.mark.parametrize("blob", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b"1" * 5000, b"plain"])
def test_other_bytes_are_no_envelope(blob: bytes) -> None:
    assert reason_of(blob) == IntegrityReason.NOT_AN_ENVELOPE
    with pytest.raises(SecretIntegrityError, match="not an envelope"):
        envelope_key_id(blob)


@pytest.mark.parametrize(
    "plaintext",
    [
        b"",
        b"x",
        b"[]",
        b"null",
        b'"text"',
        b'{"a":NaN}',
        b'{"a":"\xff"}',
        b'{"a":' + b"[" * 501 + b"]" * 501 + b"}",
    ],
)
def test_an_authentic_plaintext_that_is_no_object(plaintext: bytes) -> None:
    assert reason_of(sealed(plaintext)) == IntegrityReason.NOT_CREDENTIALS


def test_an_authentic_plaintext_under_another_fingerprint() -> None:
    assert reason_of(sealed(b'{"a":1}')) == IntegrityReason.FINGERPRINT
    assert unseal(RING, SCOPE, REF, sealed(b'{"a":1}', fingerprint=fingerprint(RING, SCOPE, {"a": 1}))) == {"a": 1}


def test_a_fingerprint_under_another_key_of_the_ring_is_right() -> None:
    blob = sealed(b'{"a":1}', fingerprint=fingerprint(KeyRing([OLD]), SCOPE, {"a": 1}))

    assert unseal(BOTH, SCOPE, REF, blob) == {"a": 1}
    assert reason_of(blob) == IntegrityReason.FINGERPRINT


def test_the_limit_is_inclusive_on_both_sides() -> None:
    size = Plaintext.of(VALUES).size
    blob = seal(RING, SCOPE, REF, VALUES, max_bytes=size)

    assert unseal(RING, SCOPE, REF, blob, max_bytes=size) == VALUES
    assert reason_of(blob, max_bytes=size - 1) == IntegrityReason.TOO_LARGE
    with pytest.raises(CredentialsTooLarge) as caught:
        seal(RING, SCOPE, REF, VALUES, max_bytes=size - 1)
    assert str(caught.value) == (
        f"The credentials have {size} bytes as canonical JSON; the limit is {size - 1} (setting MAX_SECRET_BYTES)."
    )


def test_the_limit_counts_exact_digits() -> None:
    with pytest.raises(CredentialsTooLarge, match="have 65,543 bytes as canonical JSON; the limit is 65,536"):
        seal(RING, SCOPE, REF, {"n": 10**65536})


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_a_limit_below_one_is_refused(max_bytes: int) -> None:
    blob = seal(RING, SCOPE, REF, VALUES)
    for call in (
        lambda: seal(RING, SCOPE, REF, VALUES, max_bytes=max_bytes),
        lambda: unseal(RING, SCOPE, REF, blob, max_bytes=max_bytes),
    ):
        with pytest.raises(ValueError, match=f"^max_bytes must be 1 or more, not {max_bytes}.$"):
            call()


def test_what_cannot_be_sealed() -> None:
    with pytest.raises(InvalidCredentials, match="must be a JSON object, not a value of type list"):
        seal(RING, SCOPE, REF, [])  # type: ignore[arg-type]
    with pytest.raises(InvalidCredentials, match=r"at \$\.n: NaN and infinities are not JSON"):
        seal(RING, SCOPE, REF, {"n": float("inf")})
    with pytest.raises(InvalidRef):
        seal(RING, SCOPE, REF.upper(), VALUES)
    with pytest.raises(InvalidRef):
        unseal(RING, SCOPE, REF[1:], b"")


def test_members_that_the_original_ignores_are_ignored() -> None:
    blob = changed(seal(RING, SCOPE, REF, VALUES), comment="x", number=1.5)

    assert unseal(RING, SCOPE, REF, blob) == VALUES

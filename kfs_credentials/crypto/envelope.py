"""The encrypted object as it lies in the store.

Compact JSON with the members algorithm, ciphertext, fingerprint, iv, tag, version and kid; the binary ones
in base64url without padding (RFC 4648, section 5). AES-256-GCM (NIST SP 800-38D) under the root key, with a
random IV of 12 bytes and a tag of 16; the standard allows 2**32 encryptions under one key that way.

The original makes and reads the same, but for `kid`, the id of the key, which it ignores.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

from cryptography.exceptions import InvalidTag

from kfs_credentials.errors import CredentialsTooLarge, InvalidCredentials, SecretIntegrityError

from .canonical import encode, quote
from .credentials import Credentials, CredentialsLike, Plaintext
from .fingerprints import compute, matches
from .keys import KEY_ID_LENGTH, KeyRing, RootKey
from .parsing import parse
from .scope import Scope, validate_ref
from .sensitive import sensitive

if TYPE_CHECKING:
    from collections.abc import Iterable

CONTENT_TYPE = "application/vnd.knowledge-fs.encrypted-source-secret+json"
ALGORITHM = "aes-256-gcm"
VERSION = 1
IV_BYTES = 12
TAG_BYTES = 16
DEFAULT_MAX_BYTES = 65536

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_KEY_ID = re.compile(rf"[0-9a-f]{{{KEY_ID_LENGTH}}}")


class IntegrityReason(StrEnum):
    """Why a stored object cannot be trusted: the `reason` of the `SecretIntegrityError`s raised here."""

    NOT_AN_ENVELOPE = "not an envelope"
    UNKNOWN_KEY = "unknown key"
    TOO_LARGE = "too large"
    DECRYPTION_FAILED = "decryption failed"
    NOT_CREDENTIALS = "not credentials"
    FINGERPRINT = "fingerprint"
    NOT_AS_PUT = "not what was put"


class UnknownKeyError(SecretIntegrityError):
    """The object was sealed under a key, `key_id`, that the ring does not have: add it to the ring."""

    def __init__(self, key_id: str) -> None:
        super().__init__(IntegrityReason.UNKNOWN_KEY)
        self.key_id = key_id

    def __str__(self) -> str:
        return f"{super().__str__()} {self.key_id}, which is not in the key ring"


@sensitive
def seal(
    ring: KeyRing, scope: Scope, ref: str, credentials: CredentialsLike, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> bytes:
    """Return the envelope of credentials, encrypted under the first key of the ring: what the store keeps.

    Scope and ref are authenticated, not contained: only who names the same ones can open it. The plaintext
    is the *exact* canonical JSON. Each call gives other bytes, since the IV is random.

    Raises `InvalidRef`; `InvalidCredentials` unless the credentials are a JSON object;
    `CredentialsTooLarge` if their plaintext has more than `max_bytes` bytes; `ValueError` if `max_bytes` is
    below 1.
    """
    validate_ref(ref)
    _check_limit(max_bytes)
    plaintext = Plaintext.of(credentials)
    if plaintext.size > max_bytes:
        raise CredentialsTooLarge(
            f"The credentials have {plaintext.size:,} bytes as canonical JSON; the limit is {max_bytes:,} "
            "(setting MAX_SECRET_BYTES)."
        )
    key = ring.primary
    iv = os.urandom(IV_BYTES)
    encrypted = key.aead.encrypt(iv, plaintext.exact, _associated_data(scope, ref))
    return (
        f'{{"algorithm":"{ALGORITHM}","ciphertext":"{_to_base64url(encrypted[:-TAG_BYTES])}"'
        f',"fingerprint":"{compute(key, scope, plaintext)}","iv":"{_to_base64url(iv)}"'
        f',"tag":"{_to_base64url(encrypted[-TAG_BYTES:])}","version":{VERSION},"kid":"{key.id}"}}'
    ).encode()


@sensitive
def unseal(ring: KeyRing, scope: Scope, ref: str, blob: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Credentials:
    """Return the credentials of an envelope, if it is whole and was sealed for this scope and ref.

    The key is the one that `kid` names; without a `kid`, or with one that is no key id, all keys are tried.
    The fingerprint inside has to be right too, under any key of the ring.

    Raises `InvalidRef`, and `ValueError` if `max_bytes` is below 1. Whatever is wrong with the blob raises
    `SecretIntegrityError` with a `reason` of `IntegrityReason`; if its key is not in the ring,
    `UnknownKeyError`.
    """
    credentials, _ = unseal_and_tell_key(ring, scope, ref, blob, max_bytes=max_bytes)
    return credentials


@sensitive
def unseal_and_tell_key(
    ring: KeyRing, scope: Scope, ref: str, blob: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> tuple[Credentials, str]:
    """Return the credentials of an envelope, and the id of the key that it was sealed under.

    An envelope of the Node service names no key: this is the one that opened it. Raises as `unseal` does.
    """
    validate_ref(ref)
    _check_limit(max_bytes)
    envelope = _Envelope.read(blob)
    if len(envelope.ciphertext) > max_bytes:
        raise SecretIntegrityError(IntegrityReason.TOO_LARGE)
    plaintext, key = _decrypt(_keys_for(ring, envelope.key_id), envelope, _associated_data(scope, ref))
    try:
        credentials = Credentials(cast("dict[str, Any]", parse(plaintext)))  # refuses what is no object
    except InvalidCredentials:
        raise SecretIntegrityError(IntegrityReason.NOT_CREDENTIALS) from None
    if not matches(ring, scope, Plaintext.of(credentials), envelope.fingerprint):
        raise SecretIntegrityError(IntegrityReason.FINGERPRINT)
    return credentials, key.id


@sensitive
def envelope_key_id(blob: bytes) -> str | None:
    """Return the id of the key that an envelope names, without decrypting it; None if it names none.

    Raises `SecretIntegrityError` (`IntegrityReason.NOT_AN_ENVELOPE`) if it is no envelope.
    """
    return _Envelope.read(blob).key_id


@dataclass(frozen=True, slots=True)
class _Envelope:
    """The members of an envelope: of the right shape, and not to be trusted before decryption."""

    ciphertext: bytes
    iv: bytes
    tag: bytes
    fingerprint: str
    key_id: str | None

    @classmethod
    def read(cls, blob: bytes) -> _Envelope:
        try:
            members = parse(blob)
        except InvalidCredentials:
            members = None
        if isinstance(members, dict):
            ciphertext, iv, tag = (_from_base64url(members.get(name)) for name in ("ciphertext", "iv", "tag"))
            version, key_id = members.get("version"), members.get("kid")
            if (
                (type(version), version, members.get("algorithm")) == (int, VERSION, ALGORITHM)
                and (ciphertext is not None and iv is not None and tag is not None)
                and (len(iv), len(tag)) == (IV_BYTES, TAG_BYTES)
                and _is_text(_FINGERPRINT, members.get("fingerprint"))
            ):
                key_id = key_id if _is_text(_KEY_ID, key_id) else None
                return cls(ciphertext, iv, tag, members["fingerprint"], key_id)
        raise SecretIntegrityError(IntegrityReason.NOT_AN_ENVELOPE)


def _keys_for(ring: KeyRing, key_id: str | None) -> Iterable[RootKey]:
    if key_id is None:
        return ring
    key = ring.get(key_id)
    if key is None:
        raise UnknownKeyError(key_id)
    return [key]


def _decrypt(keys: Iterable[RootKey], envelope: _Envelope, associated_data: bytes) -> tuple[bytes, RootKey]:
    for key in keys:
        with contextlib.suppress(InvalidTag):
            return key.aead.decrypt(envelope.iv, envelope.ciphertext + envelope.tag, associated_data), key
    raise SecretIntegrityError(IntegrityReason.DECRYPTION_FAILED)


def _associated_data(scope: Scope, ref: str) -> bytes:
    """Return the canonical JSON of what is authenticated beside the plaintext."""
    return encode(
        f'{{"knowledgeSpaceId":{quote(scope.knowledge_space_id)},"ref":{quote(ref)}'
        f',"sourceId":{quote(scope.source_id)},"tenantId":{quote(scope.tenant_id)},"version":1}}'
    )


def _check_limit(max_bytes: int) -> None:
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be 1 or more, not {max_bytes}.")


def _is_text(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _to_base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _from_base64url(value: object) -> bytes | None:
    """Return the bytes of base64url text; None unless it is exactly what `_to_base64url` makes of them."""
    if not isinstance(value, str):
        return None
    try:
        data = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
    except ValueError:
        return None
    # Decoding skips what is not in the alphabet, and the last bits: writing it again shows whether it did.
    return data if _to_base64url(data) == value else None

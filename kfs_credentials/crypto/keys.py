"""Root keys and the ring that holds them."""

from __future__ import annotations

import base64
import hmac
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kfs_credentials.errors import InvalidKey

from .sensitive import Secret, sensitive

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KEY_BYTES = 32
KEY_ID_MESSAGE = b"kfs-credentials/key-id/v1"
KEY_ID_LENGTH = 16
FINGERPRINT_KEY_MESSAGE = b"knowledge-fs/source-credential-fingerprint-key/v1"
FINGERPRINT_MESSAGE_START = b"knowledge-fs/source-credential-fingerprint/value/v1\0"
HOW_TO_MAKE_ONE = "make one with `manage.py generate_secret_key`"

_HEX_KEY = re.compile(r"[0-9A-Fa-f]{64}")
_BASE64_KEY = re.compile(r"[A-Za-z0-9+/_-]{43}=?")


@sensitive
def parse_key(text: str) -> bytes:
    """Return the 32 bytes of a root key given as text.

    64 hex digits of any case, else base64 or base64url (RFC 4648), with or without padding; white space
    around it is ignored.

    Raises `InvalidKey`, which gives the length found and never the key.
    """
    if not isinstance(text, str):
        raise InvalidKey(f"A key must be text, not a value of type {type(text).__name__}; {HOW_TO_MAKE_ONE}.")
    text = text.strip()
    if _HEX_KEY.fullmatch(text):
        return bytes.fromhex(text)
    if _BASE64_KEY.fullmatch(text):
        return base64.urlsafe_b64decode(f"{text[:43]}=")  # takes either alphabet
    raise InvalidKey(
        f"A key must be 64 hex digits or base64 of {KEY_BYTES} bytes, and these {len(text)} characters are "
        f"neither; {HOW_TO_MAKE_ONE}."
    )


@sensitive
def key_id(key: bytes) -> str:
    """Return the id of a root key: the first 16 hex digits of HMAC-SHA256(key, `kfs-credentials/key-id/v1`).

    It says nothing about the key, and may be shown. Raises `InvalidKey` unless the key is 32 bytes.
    """
    if not isinstance(key, bytes):
        raise InvalidKey(f"A key must be bytes, not a value of type {type(key).__name__}.")
    if len(key) != KEY_BYTES:
        raise InvalidKey(f"A key must have {KEY_BYTES} bytes; this one has {len(key)}; {HOW_TO_MAKE_ONE}.")
    return hmac.digest(key, KEY_ID_MESSAGE, "sha256").hex()[:KEY_ID_LENGTH]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class RootKey(Secret):
    """One key of a ring, ready for use. Its repr shows the id."""

    id: str
    aead: AESGCM
    """AES-256-GCM under the root key itself."""
    fingerprint_mac: hmac.HMAC
    """HMAC-SHA256 under the derived MAC key, fed with what all messages begin with. Copy it to use it."""

    @classmethod
    def of(cls, key: bytes) -> RootKey:
        """Return the key of these 32 bytes. Raises `InvalidKey`."""
        identity = key_id(key)
        mac_key = hmac.digest(key, FINGERPRINT_KEY_MESSAGE, "sha256")
        return cls(identity, AESGCM(key), hmac.new(mac_key, FINGERPRINT_MESSAGE_START, "sha256"))

    def __repr__(self) -> str:
        return f"<RootKey {self.id}>"


class KeyRing(Secret):
    """The root keys, in order: the first encrypts and makes fingerprints, all decrypt and check them.

    `keys`: one key or more, of 32 bytes each, none twice. Raises `InvalidKey`, which says which one by its
    place.

    A ring cannot be changed; threads may share it. Iterating gives its `RootKey`s, `len()` their number, and
    `key_id in ring` tells whether it has the key with that id. Its repr shows the ids.
    """

    __slots__ = ("_keys",)

    @sensitive
    def __init__(self, keys: Sequence[bytes]) -> None:
        if isinstance(keys, str | bytes):
            raise InvalidKey("A key ring needs a list of keys, even of one.")
        found: dict[str, RootKey] = {}
        for place, key in enumerate(keys, start=1):
            try:
                root_key = RootKey.of(key)
            except InvalidKey as error:
                raise InvalidKey(f"Key {place} of the ring: {error}") from None
            if root_key.id in found:
                first = list(found).index(root_key.id) + 1
                raise InvalidKey(f"Keys {first} and {place} of the ring are the same.")
            found[root_key.id] = root_key
        if not found:
            raise InvalidKey(f"A key ring needs one key at least; {HOW_TO_MAKE_ONE}.")
        self._keys = found

    @property
    def primary(self) -> RootKey:
        """The first key: the one that encrypts."""
        return next(iter(self._keys.values()))

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The ids of the keys, in order."""
        return tuple(self._keys)

    def get(self, key_id: str) -> RootKey | None:
        """Return the key with this id, or None."""
        return self._keys.get(key_id)

    def __contains__(self, key_id: object) -> bool:
        return key_id in self._keys

    def __iter__(self) -> Iterator[RootKey]:
        return iter(self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<KeyRing {', '.join(self._keys)}>"

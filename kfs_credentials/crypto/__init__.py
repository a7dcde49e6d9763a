"""Canonical JSON, key ring, fingerprint and envelope: pure functions, and objects that show no secret.

Nothing here touches a database, a store or a setting. The bytes are those of the original (Dify's
knowledge-fs): what it writes is read here, and what is written here it reads.

A fingerprint and an envelope of the same credentials, with the bytes made once:

    plaintext = Plaintext.of(credentials)
    fingerprint(ring, scope, plaintext)
    seal(ring, scope, ref, plaintext)
"""

from .canonical import MAX_DEPTH, canonical_json
from .credentials import Credentials, CredentialsLike, Plaintext
from .envelope import (
    ALGORITHM,
    CONTENT_TYPE,
    DEFAULT_MAX_BYTES,
    VERSION,
    IntegrityReason,
    UnknownKeyError,
    envelope_key_id,
    seal,
    unseal,
    unseal_and_tell_key,
)
from .fingerprints import fingerprint, fingerprint_matches
from .keys import KeyRing, RootKey, key_id, parse_key
from .parsing import parse_json
from .scope import DEFAULT_PREFIX, Scope, new_ref, object_name, validate_ref
from .sensitive import Secret, hide, sensitive

__all__ = [
    "ALGORITHM",
    "CONTENT_TYPE",
    "DEFAULT_MAX_BYTES",
    "DEFAULT_PREFIX",
    "MAX_DEPTH",
    "VERSION",
    "Credentials",
    "CredentialsLike",
    "IntegrityReason",
    "KeyRing",
    "Plaintext",
    "RootKey",
    "Scope",
    "Secret",
    "UnknownKeyError",
    "canonical_json",
    "envelope_key_id",
    "fingerprint",
    "fingerprint_matches",
    "hide",
    "key_id",
    "new_ref",
    "object_name",
    "parse_json",
    "parse_key",
    "seal",
    "sensitive",
    "unseal",
    "unseal_and_tell_key",
    "validate_ref",
]

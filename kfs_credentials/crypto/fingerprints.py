"""Fingerprints: whether two credentials are the same, without seeing either."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from .canonical import encode, quote
from .credentials import CredentialsLike, Plaintext
from .sensitive import sensitive

if TYPE_CHECKING:
    from .keys import KeyRing, RootKey
    from .scope import Scope


@sensitive
def fingerprint(ring: KeyRing, scope: Scope, credentials: CredentialsLike) -> str:
    """Return the fingerprint of credentials in their scope, under the first key: 64 lower hex digits.

    HMAC-SHA256 under a MAC key derived from the root key: without it nobody can test guesses. It covers the
    *rounded* canonical JSON (see `canonical_json`), as the original's does, so that credentials which
    differ only in digits beyond a double share one. There is no limit on their size.

    Raises `InvalidCredentials` unless the credentials are a JSON object.
    """
    return compute(ring.primary, scope, Plaintext.of(credentials))


@sensitive
def fingerprint_matches(ring: KeyRing, scope: Scope, credentials: CredentialsLike, fingerprint: str) -> bool:
    """Tell whether the fingerprint is that of these credentials in this scope, under any key of the ring.

    Compares in constant time. Raises `InvalidCredentials` unless the credentials are a JSON object.
    """
    return matches(ring, scope, Plaintext.of(credentials), fingerprint)


def compute(key: RootKey, scope: Scope, plaintext: Plaintext) -> str:
    """Return the fingerprint under one key, for callers that are `sensitive` themselves."""
    mac = key.fingerprint_mac.copy()
    # The canonical JSON of an object with these members; their order is fixed, so only the values are
    # written anew.
    mac.update(b'{"credentials":')
    mac.update(plaintext.rounded)
    mac.update(
        encode(
            f',"knowledgeSpaceId":{quote(scope.knowledge_space_id)},"sourceId":{quote(scope.source_id)}'
            f',"tenantId":{quote(scope.tenant_id)},"version":1}}'
        )
    )
    return mac.hexdigest()


def matches(ring: KeyRing, scope: Scope, plaintext: Plaintext, fingerprint: str) -> bool:
    """Do what `fingerprint_matches` says, for callers that are `sensitive` themselves."""
    given = fingerprint.encode(errors="backslashreplace")
    results = [hmac.compare_digest(compute(key, scope, plaintext).encode(), given) for key in ring]
    return any(results)

"""What lies in the store: ciphertext, a keyed fingerprint, and nothing that tells about the value."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials.conf import key_ring
from kfs_credentials.crypto import KeyRing, Plaintext, Scope, fingerprint, new_ref, object_name
from kfs_credentials.errors import InvalidRef, InvalidScope
from kfs_credentials.stores.encrypted import EncryptedStore

CANARY = "canary-51c2e9"
SCOPE = Scope("tenant-a", "0d9bdd4c-5e0a-4d2a-9d6d-9a3a4f8c3c10", "5b0c0f0e-6a55-4f4b-8f0e-0d6a3d1f9b77")
NESTED: dict[str, Any] = {
    f"{CANARY}-key": [{"deep": {f"{CANARY}-name": f"{CANARY}-value"}}, f"{CANARY}-item"],
    "oauth": {"token": CANARY},
}


def envelope(store: EncryptedStore, directory: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Put the values, and return the members of the object as they lie in the directory."""
    ref = new_ref()
    store.put(SCOPE, ref, values)
    members: dict[str, Any] = json.loads((directory / object_name(ref)).read_bytes())
    return members


def test_nested_names_and_values_are_ciphertext_too(store: EncryptedStore, secrets_directory: Path) -> None:
    members = envelope(store, secrets_directory, NESTED)
    assert set(members) == {"algorithm", "ciphertext", "fingerprint", "iv", "kid", "tag", "version"}
    decoded = [base64.urlsafe_b64decode(f"{members[name]}==") for name in ("ciphertext", "iv", "tag")]
    for content in (json.dumps(members).encode(), *decoded):
        assert CANARY.encode() not in content


def test_the_fingerprint_beside_it_needs_the_key(store: EncryptedStore, secrets_directory: Path) -> None:
    found = envelope(store, secrets_directory, NESTED)["fingerprint"]
    assert found == fingerprint(key_ring(), SCOPE, NESTED)
    assert found != fingerprint(KeyRing([bytes(range(32))]), SCOPE, NESTED)
    for text in (Plaintext.of(NESTED).exact, json.dumps(NESTED).encode()):
        assert found != hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize("part", ["tenant_id", "knowledge_space_id", "source_id", "ref"])
def test_a_delete_that_is_refused_leaves_the_object(store: EncryptedStore, secrets_directory: Path, part: str) -> None:
    ref = new_ref()
    store.put(SCOPE, ref, NESTED)
    asked = {
        "tenant_id": SCOPE.tenant_id,
        "knowledge_space_id": SCOPE.knowledge_space_id,
        "source_id": SCOPE.source_id,
        "ref": ref,
        part: " ",
    }
    with pytest.raises((InvalidScope, InvalidRef)):
        store.delete(Scope(asked["tenant_id"], asked["knowledge_space_id"], asked["source_id"]), asked["ref"])
    assert store.get(SCOPE, ref) == NESTED

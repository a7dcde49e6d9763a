"""What lies in the store: ciphertext, a keyed fingerprint, and nothing that tells about the value."""

from __future__ import annotations

import base64
import hashlib
import hmac
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


ALGORITHMS = ("md5", "sha1", "sha256", "sha512", "blake2b")


def guesses() -> list[dict[str, str]]:
    """Return ten thousand passwords, made up as common ones are."""
    words = ("password", "letmein", "dragon", "qwerty", "summer", "welcome", "admin", "monkey", "secret", "hunter")
    return [{"password": f"{word}{number}"} for word in words for number in range(1000)]


def hashed(guess: dict[str, str], told: dict[str, str]) -> set[bytes]:
    """Return what can be made of a guess by who has no key: hashes and MACs of it, under all that is not secret."""
    texts = [guess["password"].encode(), Plaintext.of(guess).exact, json.dumps(guess).encode()]
    made = {hashlib.new(algorithm, text).digest() for algorithm in ALGORITHMS for text in texts}
    made |= {hmac.digest(known.encode(), text, "sha256") for known in told.values() for text in texts}
    return made | {fingerprint(KeyRing([bytes(32)]), SCOPE, guess).encode()}


def test_ten_thousand_guesses_tell_nothing_without_the_key(store: EncryptedStore, secrets_directory: Path) -> None:
    secret = guesses()[7321]
    ref = new_ref()
    store.put(SCOPE, ref, secret)
    path = secrets_directory / object_name(ref)
    members: dict[str, Any] = json.loads(path.read_bytes())
    told = {"ref": ref, "kid": members["kid"], "iv": members["iv"], "scope": SCOPE.source_id, "nothing": ""}
    # All that lies there, in whatever way it may be written.
    texts = [path.name, *map(str, members.values())]
    decoded = [base64.urlsafe_b64decode(f"{members[name]}==") for name in ("ciphertext", "iv", "tag")]
    there = b"\n".join([*(text.encode() for text in texts), *decoded])

    def matches(guess: dict[str, str]) -> bool:
        made = hashed(guess, told)
        return any(one in there or one.hex().encode() in there for one in made)

    assert [guess for guess in guesses() if matches(guess)] == []
    # The same, with the key: so the guesses are the right ones.
    assert [guess for guess in guesses() if fingerprint(key_ring(), SCOPE, guess) == members["fingerprint"]] == [secret]
    # And a hash without a key would have been found.
    there += hashlib.sha256(Plaintext.of(secret).exact).hexdigest().encode()
    assert [guess for guess in guesses()[7000:7500] if matches(guess)] == [secret]


def test_objects_of_the_same_value_have_nothing_in_common(store: EncryptedStore, secrets_directory: Path) -> None:
    """Who sees the store cannot tell which sources share a password."""
    other = Scope(SCOPE.tenant_id, SCOPE.knowledge_space_id, "5b0c0f0e-6a55-4f4b-8f0e-0d6a3d1f9b78")
    members: list[dict[str, Any]] = []
    for scope in (SCOPE, other):
        ref = new_ref()
        store.put(scope, ref, {"password": "made-up"})
        members.append(json.loads((secrets_directory / object_name(ref)).read_bytes()))
    same = {name for name in members[0] if members[0][name] == members[1][name]}
    assert same == {"algorithm", "kid", "version"}


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

"""EncryptedStore over DurableFileStorage: the contract, and what the original's store does."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kfs_credentials.conf import settings
from kfs_credentials.crypto import KeyRing, Plaintext, key_id, new_ref, object_name, unseal
from kfs_credentials.errors import (
    CredentialsTooLarge,
    InvalidCredentials,
    InvalidKey,
    InvalidSetting,
    SecretConflict,
    SecretIntegrityError,
    SecretNotFound,
    StoreMisconfigured,
)
from kfs_credentials.stores import Address, Receipt, directory
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.stores.files import DurableFileStorage
from tests.stores import contract
from tests.stores.contract import OTHER, OTHERS, SCOPE, VALUE

if TYPE_CHECKING:
    from collections.abc import Callable


class FilesBackdoor:
    """The objects of an EncryptedStore in a directory."""

    def __init__(self, location: Path) -> None:
        self.location = location

    def name(self, ref: str) -> str:
        return object_name(ref)

    def path(self, ref: str) -> Path:
        return self.location / object_name(ref)

    def read(self, ref: str) -> bytes | None:
        return self.path(ref).read_bytes() if self.path(ref).exists() else None

    def write(self, ref: str, blob: bytes) -> None:
        self.path(ref).write_bytes(blob)

    def state(self, ref: str) -> object:
        status = self.path(ref).stat()
        return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink

    def visible(self) -> str:
        found = []
        for path in self.location.rglob("*"):
            found += [str(path), *os.listxattr(path)]
        return "\n".join(found)

    def add_foreign(self) -> None:
        objects = self.path(new_ref()).parent
        for name in ("README", f"{'0' * 64}.txt", f"{'0' * 63}.enc", f"{'A' * 64}.enc", f"x{'0' * 64}.enc"):
            (objects / name).write_bytes(b"x")
        (objects / f"{'1' * 64}.enc").mkdir()
        (objects / f"{'2' * 64}.enc").symlink_to(objects / "README")
        (self.location / f"{'3' * 64}.enc").write_bytes(b"x")

    def take_away(self) -> None:
        shutil.rmtree(self.location)


class TestContract(contract.SecretStoreContract):
    @pytest.fixture
    def backdoor(self, secrets_directory: Path) -> FilesBackdoor:
        return FilesBackdoor(secrets_directory)


class TestContractWithNamedTemporaryFiles(TestContract):
    """Where the file system has no unnamed files."""

    @pytest.fixture(autouse=True)
    def _named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # What open(2) answers then is EISDIR, as from a kernel that does not know O_TMPFILE.
        monkeypatch.setattr(directory, "UNNAMED", os.O_DIRECTORY)


# What the original answers (the list `put_behaviour` of the interoperability vectors), and what ours does there: the
# same, but that a missing secret is an error of its own, and that a store which cannot be made says so as it is made.


def put_twice(store: EncryptedStore, ref: str) -> object:
    return store.put(SCOPE, ref, VALUE) == store.put(SCOPE, ref, VALUE)


def put_different(store: EncryptedStore, ref: str) -> object:
    return store.put(SCOPE, ref, VALUE), store.put(SCOPE, ref, OTHER)


def put_in_another_scope(store: EncryptedStore, ref: str) -> object:
    return store.put(SCOPE, ref, VALUE), store.put(OTHERS[0], ref, VALUE)


def corrupt(store: EncryptedStore, ref: str) -> None:
    store.put(SCOPE, ref, VALUE)
    assert isinstance(store.storage, DurableFileStorage)
    Path(store.storage.path(object_name(ref))).write_bytes(b"{}")


def put_over_corrupt(store: EncryptedStore, ref: str) -> object:
    corrupt(store, ref)
    return store.put(SCOPE, ref, VALUE)


def delete_corrupt(store: EncryptedStore, ref: str) -> object:
    corrupt(store, ref)
    return store.delete(SCOPE, ref)


def delete_in_another_scope(store: EncryptedStore, ref: str) -> object:
    store.put(SCOPE, ref, VALUE)
    return store.delete(OTHERS[0], ref)


def with_setting(name: str, value: object) -> Callable[[EncryptedStore, str], object]:
    def put(store: EncryptedStore, ref: str) -> object:
        with settings.overridden({name: value}):
            return store.put(SCOPE, ref, VALUE)

    return put


def with_prefix(prefix: str) -> Callable[[EncryptedStore, str], object]:
    return lambda store, _: EncryptedStore(store.storage, prefix=prefix)  # type: ignore[arg-type]


PUT_BEHAVIOUR: dict[str, tuple[Callable[[EncryptedStore, str], object], object]] = {
    "put_new": (lambda store, ref: store.put(SCOPE, ref, VALUE).size, len(Plaintext.of(VALUE).exact)),
    "put_same_again_does_not_rewrite": (put_twice, True),
    "put_different_same_ref": (put_different, SecretConflict),
    "put_other_scope_same_ref": (put_in_another_scope, SecretIntegrityError),
    "put_over_corrupt_object": (put_over_corrupt, SecretIntegrityError),
    "delete_corrupt_object": (delete_corrupt, True),
    "delete_missing_object": (lambda store, ref: store.delete(SCOPE, ref), False),
    "delete_with_other_scope": (delete_in_another_scope, True),
    "get_missing": (lambda store, ref: store.get(SCOPE, ref), SecretNotFound),
    "put_array": (lambda store, ref: store.put(SCOPE, ref, [1]), InvalidCredentials),  # type: ignore[arg-type]
    "put_over_max": (lambda store, ref: store.put(SCOPE, ref, {"k": "x" * 65536}), CredentialsTooLarge),
    "put_infinity": (lambda store, ref: store.put(SCOPE, ref, {"n": float("inf")}), InvalidCredentials),
    "ctor_short_key": (with_setting("KEYS", [bytes(31)]), InvalidKey),
    "ctor_empty_prefix": (with_prefix(""), StoreMisconfigured),
    "ctor_prefix_513": (with_prefix("x" * 513), StoreMisconfigured),
    "ctor_max_zero": (with_setting("MAX_SECRET_BYTES", 0), InvalidSetting),
}


@pytest.mark.parametrize("name", PUT_BEHAVIOUR)
def test_a_put_does_what_the_originals_does(store: EncryptedStore, name: str) -> None:
    act, expected = PUT_BEHAVIOUR[name]
    if isinstance(expected, type):
        with pytest.raises(expected):
            act(store, new_ref())
    else:
        assert act(store, new_ref()) == expected


# Keys.


def test_the_first_key_encrypts_and_all_decrypt(
    store: EncryptedStore, secrets_directory: Path, kfs_settings: Callable[..., None]
) -> None:
    old, new = bytes(range(32)), bytes(range(1, 33))
    ref, later = new_ref(), new_ref()
    kfs_settings(KEYS=[old])
    assert store.put(SCOPE, ref, VALUE).key_id == key_id(old)

    kfs_settings(KEYS=[new, old])
    assert store.get(SCOPE, ref) == VALUE
    # The same again is the object that is there, under its old key.
    assert store.put(SCOPE, ref, VALUE).key_id == key_id(old)
    assert store.put(SCOPE, later, VALUE).key_id == key_id(new)
    blob = (secrets_directory / object_name(later)).read_bytes()
    assert unseal(KeyRing([new]), SCOPE, later, blob) == VALUE

    kfs_settings(KEYS=[new])
    with pytest.raises(SecretIntegrityError) as caught:
        store.get(SCOPE, ref)
    assert str(caught.value) == (
        f"the stored secret cannot be trusted: unknown key {key_id(old)}, which is not in the key ring"
    )
    with pytest.raises(SecretIntegrityError, match="unknown key"):
        store.put(SCOPE, ref, VALUE)


def test_an_object_of_the_original_is_read_and_its_receipt_names_the_key_that_opened_it(
    store: EncryptedStore, secrets_directory: Path, kfs_settings: Callable[..., None]
) -> None:
    """It names none itself, and a key that is closed has to be noticed."""
    old, new = bytes(range(32)), bytes(range(1, 33))
    kfs_settings(KEYS=[old])
    ref = new_ref()
    store.put(SCOPE, ref, VALUE)
    path = secrets_directory / object_name(ref)
    envelope = json.loads(path.read_bytes())
    del envelope["kid"]
    path.write_text(json.dumps(envelope))

    kfs_settings(KEYS=[new, old])
    assert store.get(SCOPE, ref) == VALUE
    assert store.put(SCOPE, ref, VALUE) == Receipt(key_id(old), len(Plaintext.of(VALUE).exact))


def test_a_list_of_several_pages_misses_nothing(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfs_credentials.stores.encrypted.PAGE", 7)
    refs = [new_ref() for _ in range(28)]
    store.put_many([contract.entry(ref) for ref in refs])
    names = sorted(object_name(ref) for ref in refs)

    assert list(store.list()) == names
    assert list(store.list(after=names[6])) == names[7:]
    # What is put or erased while the list is read disturbs nothing else.
    found = []
    for name in store.list():
        found.append(name)
        if len(found) == 5:
            (gone,) = (ref for ref in refs if object_name(ref) == names[20])
            store.delete(SCOPE, gone)
    assert found == [name for name in names if name != names[20]]


def test_what_a_writer_left_behind_is_listed_as_its_object_once_and_erased_with_it(
    store: EncryptedStore, secrets_directory: Path
) -> None:
    """Where files have names before they are complete: else nothing would ever find the leftover."""
    stored, unfinished = new_ref(), new_ref()
    store.put(SCOPE, stored, VALUE)
    for ref in (stored, unfinished):
        (secrets_directory / f"{object_name(ref)}.tmp").write_bytes(b"x")

    assert list(store.list()) == sorted([object_name(stored), object_name(unfinished)])
    assert store.delete_many([Address(SCOPE, stored), Address(SCOPE, unfinished)]) == [True, False]
    assert list(store.list()) == []
    assert [path for path in secrets_directory.rglob("*") if path.is_file()] == []


def test_the_check_says_what_is_wrong_with_the_keys(store: EncryptedStore, kfs_settings: Callable[..., None]) -> None:
    store.check()
    kfs_settings(KEYS=[])
    with pytest.raises(InvalidKey, match=r"^KFS_CREDENTIALS\['KEYS'\] is empty"):
        store.check()

"""What the cleanup asks of a store: to erase in batches that can be stopped, and to tell objects by their refs."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials.crypto import new_ref, object_name
from kfs_credentials.errors import InvalidRef, LeaseLost, StoreUnavailable
from kfs_credentials.stores import Address, SecretStore, secret_stores
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.stores.files import DurableFileStorage
from tests.stores.contract import SCOPE, VALUE
from tests.waiting import PATIENCE

Files = Callable[[], list[Path]]


def put(store: SecretStore, number: int = 1) -> list[Address]:
    """Put so many objects; return where they lie."""
    addresses = [Address(SCOPE, new_ref()) for _ in range(number)]
    for address in addresses:
        store.put(address.scope, address.ref, VALUE)
    return addresses


def test_a_batch_is_erased_and_says_what_was_there(store: EncryptedStore, files: Files) -> None:
    there, gone = put(store, 2), Address(SCOPE, new_ref())
    assert store.start_delete_many([there[0], gone, there[1]]).result() == [True, False, True]
    assert files() == []


def test_what_is_no_ref_is_refused_and_stops_none_of_the_others(store: EncryptedStore, files: Files) -> None:
    (there,) = put(store)
    refused, done = store.start_delete_many([Address(SCOPE, "../secret"), there]).result()
    assert isinstance(refused, InvalidRef)
    assert (done, files()) == (True, [])


def test_the_call_does_not_wait_for_the_store(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real, go_on = store._delete_many, threading.Event()

    def slow(addresses: Any, *, deadline: Any) -> Any:
        assert go_on.wait(PATIENCE)
        return real(addresses, deadline=deadline)

    monkeypatch.setattr(store, "_delete_many", slow)
    call = store.start_delete_many(put(store))
    assert not call.wait(0)
    go_on.set()
    assert call.result() == [True]


def test_the_guard_is_asked_before_objects_go(store: EncryptedStore, files: Files) -> None:
    addresses, seen = put(store, 2), []

    def guard() -> None:
        seen.append(len(files()))

    assert store.start_delete_many(addresses, guard=guard).result() == [True, True]
    assert seen
    assert seen[0] == 2


def test_what_the_guard_raises_stops_it_and_is_what_the_caller_gets(store: EncryptedStore, files: Files) -> None:
    addresses = put(store, 2)

    def guard() -> None:
        raise LeaseLost("the lease ran out")

    with pytest.raises(LeaseLost, match="the lease ran out"):
        store.start_delete_many(addresses, guard=guard).result()
    assert len(files()) == 2


def test_nothing_is_erased_after_the_deadline(
    store: EncryptedStore, files: Files, kfs_settings: Callable[..., None]
) -> None:
    addresses = put(store)
    kfs_settings(STORE_TIMEOUT=1e-9)
    call = store.start_delete_many(addresses)
    with pytest.raises(StoreUnavailable, match="did not answer within 1e-09 s"):
        call.result()
    call._done.wait(PATIENCE)
    assert len(files()) == 1


@pytest.mark.parametrize("prefix", ["__knowledge-secrets/source/v1/", "flat-", "a/b-", "x/"])
def test_the_digest_of_a_listed_name_is_that_of_its_ref(store: EncryptedStore, prefix: str) -> None:
    other = EncryptedStore(store.storage, prefix=prefix)  # type: ignore[arg-type]
    addresses = put(other, 3)
    digests = {hashlib.sha256(address.ref.encode()).digest() for address in addresses}
    assert {other.digest(name) for name in other.list()} == digests
    assert other.digest(object_name(addresses[0].ref, prefix=prefix)) in digests


def test_a_store_can_list_unless_it_says_otherwise(store: EncryptedStore) -> None:
    assert secret_stores["default"].can_list
    assert SecretStore.can_list


def test_what_is_erased_is_not_listed_any_more(store: EncryptedStore) -> None:
    gone, stays = put(store, 2)
    store.delete(gone.scope, gone.ref)
    assert list(store.list()) == [object_name(stays.ref)]


def test_what_a_writer_left_that_died_is_listed_and_erased_as_its_object(
    store: EncryptedStore, secrets_directory: Path, files: Files
) -> None:
    """Where the file system has no unnamed files: half an object under a temporary name."""
    stays, address = put(store)[0], Address(SCOPE, new_ref())
    leftover = secrets_directory / f"{object_name(address.ref)}.tmp"
    leftover.write_bytes(b"half an object")
    assert sorted(store.list()) == sorted([object_name(stays.ref), object_name(address.ref)])
    assert store.delete_many([address]) == [False]
    assert not leftover.exists()
    assert len(files()) == 1


def test_an_object_with_a_leftover_beside_it_is_listed_once(
    store: EncryptedStore, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = put(store, 4)
    for address in addresses:
        (secrets_directory / f"{object_name(address.ref)}.tmp").write_bytes(b"half an object")
    names = sorted(object_name(address.ref) for address in addresses)
    assert list(store.list()) == names
    monkeypatch.setattr("kfs_credentials.stores.encrypted.PAGE", 3)
    assert list(store.list()) == names


def test_a_file_by_which_a_bad_one_was_told_apart_is_a_leftover_of_its_object(
    store: EncryptedStore, secrets_directory: Path, files: Files
) -> None:
    """Whoever made it has died before it was gone."""
    (address,) = put(store)
    (secrets_directory / f"{object_name(address.ref)}.try").write_bytes(b"probe")
    assert set(store.list()) == {object_name(address.ref)}
    assert store.delete_many([address]) == [True]
    assert files() == []


def test_what_was_there_was_there_though_the_store_failed_after_it_was_erased(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a way that nobody foresaw: then all is asked for once more, and a late write must not count as none."""
    there, gone = put(store, 3), Address(SCOPE, new_ref())
    real, failures = DurableFileStorage.remove_many, [LookupError(), LookupError()]

    def remove_many(self: DurableFileStorage, *arguments: Any, **options: Any) -> Any:
        answers = real(self, *arguments, **options)
        if failures:
            raise failures.pop()
        return answers

    monkeypatch.setattr(DurableFileStorage, "remove_many", remove_many)
    assert store.delete_many([there[0], gone, *there[1:]]) == [True, False, True, True]
    assert store.delete_many(there) == [False] * 3

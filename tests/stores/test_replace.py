"""How files are replaced: in one step, durably, and only over what was read."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials.crypto import envelope_key_id, key_id, new_ref, object_name
from kfs_credentials.errors import SecretNotFound, SecretStoreError
from kfs_credentials.stores import Address, directory
from kfs_credentials.stores.directory import Directory, UnlinkedFile
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.stores.files import DurableFileStorage
from tests.stores.contract import SCOPE, VALUE

OLD, NEW = secrets.token_bytes(32), secrets.token_bytes(32)


@pytest.fixture(params=["unnamed", "named"])
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory, on a file system that has files without a name, or has none."""
    if request.param == "named":
        monkeypatch.setattr(directory, "UNNAMED", os.O_DIRECTORY)
    return tmp_path


@pytest.fixture
def storage(location: Path) -> DurableFileStorage:
    return DurableFileStorage(location)


def files(location: Path) -> dict[str, bytes]:
    """Return the names and the contents of all files."""
    return {str(path.relative_to(location)): path.read_bytes() for path in location.rglob("*") if path.is_file()}


def test_only_what_has_the_content_that_was_read_is_replaced(storage: DurableFileStorage, location: Path) -> None:
    """A file that is missing, or another one by now, is left alone, and no temporary file stays."""
    storage.create_many([("a/1", b"one"), ("a/2", b"two"), ("b/3", b"three")])
    asked = [
        ("a/1", b"one", b"ONE"),
        ("a/2", b"tw", b"x"),
        ("b/3", b"three!", b"x"),
        ("b/4", b"", b"x"),
        ("c/5", b"", b"x"),
    ]
    assert storage.replace_many(asked) == [True, False, False, False, False]
    assert files(location) == {"a/1": b"ONE", "a/2": b"two", "b/3": b"three"}
    assert (location / "a/1").stat().st_mode & 0o777 == 0o600


def test_more_files_than_a_group(storage: DurableFileStorage, location: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is as large as it likes."""
    monkeypatch.setattr("kfs_credentials.stores.files.GROUP", 3)
    names = [f"{number % 2}/{number}" for number in range(10)]
    storage.create_many([(name, b"old") for name in names])
    assert storage.replace_many([(name, b"old", name.encode()) for name in names]) == [True] * 10
    assert files(location) == {name: name.encode() for name in names}


def test_an_erasure_right_before_the_replacement_wins(storage: DurableFileStorage, location: Path) -> None:
    """Nothing of it comes back, not even as a temporary file."""
    storage.create_many([("a/1", b"old")])

    def erase() -> None:
        assert storage.remove_many(["a/1"]) == [True]

    assert storage.replace_many([("a/1", b"old", b"new")], check=erase) == [False]
    assert files(location) == {}


def test_a_leftover_temporary_file_is_taken_over(storage: DurableFileStorage, location: Path) -> None:
    """Whoever wrote it has died."""
    storage.create_many([("a/1", b"old")])
    (location / "a/1.new").write_bytes(b"left behind")
    assert storage.replace_many([("a/1", b"old", b"new")]) == [True]
    assert files(location) == {"a/1": b"new"}


def test_who_was_taken_over_is_told_so(location: Path) -> None:
    """Its file has no name any more, or the other one's was renamed: in both cases it has replaced nothing itself."""
    (location / "a").write_bytes(b"old")
    with (
        Directory(str(location)) as opened,
        opened.write("a", b"first") as first,
        opened.write("a", b"second") as second,
    ):
        real = Directory.holds

        def another_comes_between(self: Directory, name: str, content: bytes) -> bool:
            Directory.holds = real  # type: ignore[method-assign]
            assert second.replace(b"old", lambda: None)
            return True

        Directory.holds = another_comes_between  # type: ignore[method-assign]
        try:
            assert not first.replace(b"old", lambda: None)
        finally:
            Directory.holds = real  # type: ignore[method-assign]
        second.replace(b"old", lambda: None)  # where the first was told before it came so far
    assert files(location) == {"a": b"second"}


def test_the_content_is_durable_before_the_name_and_the_name_before_the_answer(
    storage: DurableFileStorage, location: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash of the machine could leave an empty file where the old secret was."""
    storage.create_many([("a/1", b"old")])
    seen: list[str] = []
    for kind, name in ((UnlinkedFile, "sync"), (UnlinkedFile, "replace"), (Directory, "sync")):
        real = getattr(kind, name)

        def noting(self: Any, *arguments: Any, real: Any = real, what: str = f"{kind.__name__}.{name}") -> Any:
            seen.append(what)
            return real(self, *arguments)

        monkeypatch.setattr(kind, name, noting)
    storage.replace_many([("a/1", b"old", b"new")])
    assert seen[-3:] == ["UnlinkedFile.sync", "UnlinkedFile.replace", "Directory.sync"]


# What an EncryptedStore makes of it.


@pytest.fixture
def ref(store: EncryptedStore, kfs_settings: Callable[..., None]) -> str:
    """A secret under the old key; by now the new one is the first."""
    ref = new_ref()
    kfs_settings(KEYS=[OLD])
    store.put(SCOPE, ref, VALUE)
    kfs_settings(KEYS=[NEW, OLD])
    return ref


def once(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something once, after the storage was read and before it replaces."""
    real = DurableFileStorage.replace_many

    def replace_many(self: DurableFileStorage, *arguments: Any, **keywords: Any) -> list[bool | SecretStoreError]:
        monkeypatch.setattr(DurableFileStorage, "replace_many", real)
        act()
        return real(self, *arguments, **keywords)

    monkeypatch.setattr(DurableFileStorage, "replace_many", replace_many)


def test_an_object_of_the_node_service_is_replaced(
    store: EncryptedStore, ref: str, secrets_directory: Path, kfs_settings: Callable[..., None]
) -> None:
    """It names no key; which one opened it is found out by trying."""
    path = secrets_directory / object_name(ref)
    envelope = json.loads(path.read_bytes())
    del envelope["kid"]
    path.write_text(json.dumps(envelope))
    assert store.replace(SCOPE, ref).rewritten
    assert envelope_key_id(path.read_bytes()) == key_id(NEW)

    del (envelope := json.loads(path.read_bytes()))["kid"]
    path.write_text(json.dumps(envelope))
    assert not store.replace(SCOPE, ref).rewritten


def test_what_is_erased_between_the_read_and_the_replacement_is_not_found(
    store: EncryptedStore, ref: str, files: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not brought back."""
    once(monkeypatch, lambda: store.delete(SCOPE, ref))
    with pytest.raises(SecretNotFound):
        store.replace(SCOPE, ref)
    assert files() == []


def test_what_another_run_has_replaced_meanwhile_is_right_too(
    store: EncryptedStore, ref: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the same key ring."""
    once(monkeypatch, lambda: store.replace(SCOPE, ref))
    assert not store.replace(SCOPE, ref).rewritten
    assert store.get(SCOPE, ref) == VALUE


def test_what_is_written_by_others_each_time_fails_alone(
    store: EncryptedStore, ref: str, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run looks at it again."""
    path = secrets_directory / object_name(ref)
    real = DurableFileStorage.replace_many

    def replace_many(self: DurableFileStorage, asked: Any, **keywords: Any) -> list[bool | SecretStoreError]:
        path.write_bytes(path.read_bytes() + b" ")
        return real(self, asked, **keywords)

    monkeypatch.setattr(DurableFileStorage, "replace_many", replace_many)
    with pytest.raises(SecretStoreError, match=r"^another process is writing this secret at the same time$"):
        store.replace(SCOPE, ref)
    assert store.get(SCOPE, ref) == VALUE


def test_a_leftover_of_a_replacement_is_listed_as_its_object_and_erased_with_it(
    store: EncryptedStore, ref: str, secrets_directory: Path, files: Callable[[], list[Path]]
) -> None:
    """What a process left behind that was killed in the middle is found by nobody else."""
    (secrets_directory / f"{object_name(ref)}.new").write_bytes(b"sealed")
    assert list(store.list()) == [object_name(ref)]
    assert store.delete_many([Address(SCOPE, ref)]) == [True]
    assert files() == []


def test_what_is_under_the_first_key_already_is_made_durable(
    store: EncryptedStore, ref: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever replaced it may have died before it was, and its key is about to be noted."""
    store.replace(SCOPE, ref)
    synced: list[str] = []
    real = DurableFileStorage.sync

    def sync(self: DurableFileStorage, names: Any) -> Any:
        synced.extend(names)
        return real(self, names)

    monkeypatch.setattr(DurableFileStorage, "sync", sync)
    assert not store.replace(SCOPE, ref).rewritten
    assert synced == [object_name(ref)]


def test_what_is_replaced_before_it_is_stopped_is_told(storage: DurableFileStorage, location: Path) -> None:
    """Each as soon as it is; not what is erased before that."""
    names = ["a/1", "a/2", "a/3", "a/4"]
    storage.create_many([(name, b"old") for name in names])
    asked: list[bool] = []
    done: list[str] = []

    def check() -> None:
        asked.append(True)
        if len(asked) == 2:
            assert storage.remove_many(["a/2"]) == [True]
        if len(asked) == 4:
            raise LookupError

    with pytest.raises(LookupError):
        storage.replace_many([(name, b"old", b"new") for name in names], check=check, done=done.append)
    assert done == ["a/1", "a/3"]
    assert files(location) == {"a/1": b"new", "a/3": b"new", "a/4": b"old"}

"""DurableFileStorage: modes, names, batches, temporary files."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.files.base import ContentFile

from kfs_credentials.crypto import new_ref, object_name
from kfs_credentials.errors import SecretNotFound, StoreUnavailable
from kfs_credentials.stores import directory
from kfs_credentials.stores.files import DurableFileStorage
from tests.stores.contract import SCOPE, VALUE
from tests.stores.processes import Said, put, run

if TYPE_CHECKING:
    from kfs_credentials.stores.encrypted import EncryptedStore

NAME = "a/b/secret.enc"


@pytest.fixture
def location(secrets_directory: Path) -> Path:
    return secrets_directory


@pytest.fixture
def storage(location: Path) -> DurableFileStorage:
    return DurableFileStorage(location)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that has no unnamed files: open(2) answers EISDIR."""
    monkeypatch.setattr(directory, "UNNAMED", os.O_DIRECTORY)


def files(location: Path) -> list[str]:
    return sorted(str(path.relative_to(location)) for path in location.rglob("*") if not path.is_dir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Modes.


def put_with_umask(umask: int, ref: str) -> Said:
    os.umask(umask)
    return put(SCOPE, ref, VALUE)


@pytest.mark.parametrize("unnamed", [directory.UNNAMED, os.O_DIRECTORY], ids=["unnamed", "named"])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277, 0o777], ids=oct)
def test_only_the_owner_may_read_whatever_the_umask(
    store: EncryptedStore, location: Path, monkeypatch: pytest.MonkeyPatch, umask: int, unnamed: int
) -> None:
    monkeypatch.setattr(directory, "UNNAMED", unnamed)
    ref = new_ref()
    assert run(put_with_umask, umask, ref) == ("", "")

    path = location / object_name(ref)
    assert mode(path) == 0o600
    made = [parent for parent in path.parents if parent.is_relative_to(location) and parent != location]
    assert [mode(parent) for parent in made] == [0o700] * 3


# What Django's callers use.


def test_a_django_storage_that_creates_and_never_replaces(storage: DurableFileStorage, location: Path) -> None:
    assert storage.save(NAME, ContentFile(b"first")) == NAME
    assert storage.read(NAME) == b"first"
    assert mode(location / NAME) == 0o600

    with pytest.raises(FileExistsError):
        storage.save(NAME, ContentFile(b"second"))

    assert storage.read(NAME) == b"first"
    storage.delete(NAME)
    storage.delete(NAME)
    assert not storage.exists(NAME)


def test_the_location_must_be_an_absolute_path() -> None:
    for location in (None, "", "secrets", Path("secrets")):
        with pytest.raises(ImproperlyConfigured) as caught:
            DurableFileStorage(location)  # type: ignore[arg-type]
        assert str(caught.value) == (
            "DurableFileStorage needs OPTIONS['location'], an absolute path: the directory for secrets."
        )


# Several at once.


def test_more_files_than_a_group_and_several_directories(
    storage: DurableFileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kfs_credentials.stores.files.GROUP", 3)
    batch = [(f"{number % 2}/{number}", str(number).encode()) for number in range(20)]
    storage.create_many(batch[5:7])

    assert storage.create_many(batch) == [number not in (5, 6) for number in range(20)]
    assert [storage.read(name) for name, _ in batch] == [content for _, content in batch]
    assert sorted(storage.names("0")) == sorted(str(number) for number in range(0, 20, 2))
    assert storage.remove_many([name for name, _ in batch[:3]] + ["0/x", "x/0"]) == [True] * 3 + [False] * 2
    assert list(storage.names("nowhere")) == []


def test_names_may_come_twice_in_a_batch(storage: DurableFileStorage) -> None:
    assert storage.create_many([("a", b"1"), ("b", b"2"), ("a", b"3")]) == [True, True, False]
    assert storage.read("a") == b"1"


def test_sync_of_a_missing_file_is_not_found(storage: DurableFileStorage) -> None:
    storage.create_many([("a/b", b"1")])
    assert storage.sync(["a/b"]) == [None]
    there, other, elsewhere = storage.sync(["a/b", "a/c", "b/a"])
    assert there is None
    assert isinstance(other, SecretNotFound)
    assert isinstance(elsewhere, SecretNotFound)


# Named temporary files, where there are no unnamed ones.


@pytest.mark.usefixtures("named")
def test_a_leftover_temporary_file_is_taken_over(storage: DurableFileStorage, location: Path) -> None:
    (location / "a").mkdir()
    (location / "a/secret.enc.tmp").write_bytes(b"what a writer left that died")

    assert storage.create_many([("a/secret.enc", b"whole")]) == [True]

    assert storage.read("a/secret.enc") == b"whole"
    assert files(location) == ["a/secret.enc"]


@pytest.mark.usefixtures("named")
def test_the_late_writer_of_a_temporary_file_that_was_taken_over_cannot_link_it(location: Path) -> None:
    with directory.Directory(str(location)) as opened:
        with opened.write("secret.enc", b"late") as late, opened.write("secret.enc", b"new") as new:
            with pytest.raises(StoreUnavailable) as caught:
                late.link()
            assert new.link()
            assert not late.link()
        assert (location / "secret.enc").read_bytes() == b"new"
    assert str(caught.value) == "another process took over the writing of this object, or erased it"
    assert files(location) == ["secret.enc"]


@pytest.mark.usefixtures("named")
def test_who_was_taken_over_leaves_the_others_temporary_file_alone(location: Path) -> None:
    with directory.Directory(str(location)) as opened:
        late = opened.write("secret.enc", b"late")
        with opened.write("secret.enc", b"new") as new:
            late.close()
            assert files(location) == ["secret.enc.tmp"]
            assert new.link()
    assert files(location) == ["secret.enc"]


@pytest.mark.usefixtures("named")
def test_an_erasure_takes_the_temporary_file_along_and_its_writer_cannot_link_it(
    storage: DurableFileStorage, location: Path
) -> None:
    def erase() -> None:
        assert files(location) == ["secret.enc.tmp"]
        assert storage.remove_many(["secret.enc"]) == [False]

    with pytest.raises(StoreUnavailable, match="took over the writing of this object, or erased it"):
        storage.create_many([("secret.enc", b"late")], check=erase)

    assert files(location) == []


@pytest.mark.usefixtures("named")
def test_a_temporary_file_that_a_dead_writer_had_linked_is_no_danger(
    storage: DurableFileStorage, location: Path
) -> None:
    storage.create_many([("secret.enc", b"whole")])
    os.link(location / "secret.enc", location / "secret.enc.tmp")  # it died before it could remove this name

    assert storage.create_many([("secret.enc", b"other")]) == [False]
    assert storage.read("secret.enc") == b"whole"
    assert storage.remove_many(["secret.enc"]) == [True]
    assert files(location) == []

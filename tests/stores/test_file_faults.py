"""What the file system may answer to an EncryptedStore, and what becomes of it: real limits, users and mounts."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfs_credentials.crypto import DEFAULT_PREFIX, Credentials, Scope, new_ref, object_name
from kfs_credentials.errors import NotAsSaid, SecretIntegrityError, SecretNotFound, StoreMisconfigured
from kfs_credentials.stores import Address, Receipt, secret_stores
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.stores.files import DurableFileStorage
from tests import needs
from tests.stores.contract import SCOPE, VALUE, entry
from tests.stores.processes import Said, as_nobody, mount, put, run, said

if TYPE_CHECKING:
    from collections.abc import Callable

AWAY = (
    "the directory for secrets does not exist: {0}. Mount the volume that holds it, or make it with "
    "`mkdir -m 700 {0}` if it is new."
)
REMOVED = (
    "the directory for secrets is not where it was (No such file or directory, ENOENT): see whether its volume is "
    "mounted"
)


@pytest.fixture
def location(secrets_directory: Path) -> Path:
    return secrets_directory


def everything(scope: Scope, ref: str) -> list[Said]:
    """Return what the default store says to a put, a get, a delete, a list and a check."""
    store = secret_stores["default"]
    calls: list[Callable[[], object]] = [
        lambda: store.put(scope, ref, VALUE),
        lambda: store.get(scope, ref),
        lambda: store.delete(scope, ref),
        lambda: list(store.list()),
        store.check,
    ]
    return [said(call) for call in calls]


# The directory is not there, or not what it should be.


def test_a_missing_directory_is_misconfigured_and_is_not_made(store: EncryptedStore, location: Path) -> None:
    location.rmdir()
    message = AWAY.format(location)

    assert everything(SCOPE, new_ref()) == [("StoreMisconfigured", message)] * 5
    assert not location.exists()


def test_a_file_in_place_of_the_directory_is_misconfigured(store: EncryptedStore, location: Path) -> None:
    location.rmdir()
    location.write_text("")
    wrong_place = (
        "StoreMisconfigured",
        "the directory for secrets is not where it was (Not a directory, ENOTDIR): see whether its volume is mounted",
    )
    no_directory = ("StoreMisconfigured", f"the place for secrets is not a directory: {location}.")

    assert everything(SCOPE, new_ref()) == [*[wrong_place] * 4, no_directory]


@pytest.mark.parametrize("prefix", ["../out/", "/etc/", "a/../../"])
def test_a_prefix_that_leads_out_is_misconfigured(location: Path, prefix: str) -> None:
    store = EncryptedStore(DurableFileStorage(location), prefix=prefix)
    message = "^the name of a secret leads out of the directory for secrets: correct the prefix of the store$"
    calls: list[Callable[[], object]] = [
        lambda: store.put(SCOPE, new_ref(), VALUE),
        lambda: store.get(SCOPE, new_ref()),
        lambda: store.delete(SCOPE, new_ref()),
        lambda: list(store.list()),
        store.check,
    ]
    for call in calls:
        with pytest.raises(StoreMisconfigured, match=message):
            call()


@pytest.mark.parametrize("prefix", ["x", "x-", "deep/er/x-", "deep/"])
def test_any_other_prefix_works_with_objects_of_two_in_one_directory(location: Path, prefix: str) -> None:
    store, other = (EncryptedStore(DurableFileStorage(location), prefix=name) for name in (prefix, f"{prefix}other-"))
    ref = new_ref()
    store.put(SCOPE, ref, VALUE)
    other.put(SCOPE, ref, VALUE)

    assert list(store.list()) == [object_name(ref, prefix=prefix)]
    assert list(other.list()) == [object_name(ref, prefix=f"{prefix}other-")]
    assert store.get(SCOPE, ref) == VALUE
    store.check()


def test_a_directory_that_is_removed_in_the_middle_is_no_success(store: EncryptedStore, location: Path) -> None:
    ref = new_ref()
    call = store.start_put_many([entry(ref)], guard=lambda: shutil.rmtree(location))
    with pytest.raises(StoreMisconfigured) as caught:
        call.result()
    assert str(caught.value) == REMOVED

    location.mkdir()
    with pytest.raises(SecretNotFound):
        store.get(SCOPE, ref)
    store.put(SCOPE, ref, VALUE)
    assert store.get(SCOPE, ref) == VALUE


def test_the_objects_directory_may_be_removed_and_is_made_again(store: EncryptedStore, location: Path) -> None:
    ref = new_ref()
    store.put(SCOPE, ref, VALUE)
    shutil.rmtree(location / "__knowledge-secrets")

    assert list(store.list()) == []
    assert store.delete(SCOPE, ref) is False
    store.put(SCOPE, ref, VALUE)
    assert store.get(SCOPE, ref) == VALUE


def test_an_object_that_is_erased_while_it_is_put_again_is_no_success_and_spoils_no_batch(
    store: EncryptedStore, location: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = new_ref()
    store.put(SCOPE, ref, VALUE)
    read = DurableFileStorage.read

    def read_and_erase(storage: DurableFileStorage, name: str, **keywords: Any) -> bytes:
        content = read(storage, name, **keywords)
        (location / name).unlink()
        return content

    monkeypatch.setattr(DurableFileStorage, "read", read_and_erase)
    with pytest.raises(NotAsSaid, match=r"^something had this secret's place .*: it was erased at this moment, or "):
        store.put(SCOPE, ref, VALUE)
    monkeypatch.undo()
    with pytest.raises(SecretNotFound):
        store.get(SCOPE, ref)
    store.put(SCOPE, ref, VALUE)


@pytest.mark.parametrize("kind", ["pipe", "directory", "link to nowhere", "link to itself", "link to an object"])
def test_what_is_no_file_in_an_objects_place_spoils_no_batch(store: EncryptedStore, location: Path, kind: str) -> None:
    whole, spoilt = new_ref(), new_ref()
    store.put(SCOPE, whole, VALUE)
    path = location / object_name(spoilt)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        target = {"nowhere": "nowhere", "itself": path.name, "object": f"{location / object_name(whole)}"}
        path.symlink_to(target[kind.rsplit(maxsplit=1)[-1]])

    put = store.put_many([entry(spoilt), entry(whole), entry(new_ref())])
    got = store.get_many([Address(SCOPE, spoilt), Address(SCOPE, whole)])

    assert [type(outcome) for outcome in put] == [SecretIntegrityError, Receipt, Receipt]
    assert [type(outcome) for outcome in got] == [SecretIntegrityError, Credentials]
    assert str(put[0]) == str(got[0]) == "the stored secret cannot be trusted: not an envelope"


# Limits.


def limit(what: int, number: int) -> int:
    """Set a limit of this process; return what it was."""
    before, highest = resource.getrlimit(what)
    resource.setrlimit(what, (number, highest))
    return before


def put_with_a_file_limit(ref: str) -> tuple[Said, Said, Said]:
    before = limit(resource.RLIMIT_FSIZE, 200)
    full = put(SCOPE, ref, VALUE)
    seen = said(secret_stores["default"].get, SCOPE, ref)
    limit(resource.RLIMIT_FSIZE, before)
    return full, seen, put(SCOPE, ref, VALUE)


def test_a_file_that_does_not_fit_is_unavailable_and_leaves_nothing(
    store: EncryptedStore, files: Callable[[], list[Path]]
) -> None:
    ref = new_ref()
    full, seen, again = run(put_with_a_file_limit, ref)

    assert full == (
        "StoreUnavailable",
        "the file system of the secrets does not work now (File too large, EFBIG)",
    )
    assert seen[0] == "SecretNotFound"
    assert again == ("", "")
    assert store.get(SCOPE, ref) == VALUE
    assert [path.suffix for path in files()] == [".enc"]


def put_on_a_full_disk(location: str, ref: str) -> list[Said] | str:
    """Mount a tiny file system that nobody else sees, fill it, and put; then make room, and put again."""
    if problem := mount("-t", "tmpfs", "-o", "size=64k,mode=700", "none", location):
        return problem
    answers = [put(SCOPE, ref, VALUE)]
    with Path(location, "junk").open("wb", buffering=0) as junk:
        for _ in range(20):
            said(junk.write, bytes(4096))
    other = new_ref()
    answers += [put(SCOPE, other, VALUE), said(secret_stores["default"].get, SCOPE, other)]
    answers.append(put(SCOPE, ref, VALUE))
    Path(location, "junk").unlink()
    answers += [put(SCOPE, other, VALUE), said(secret_stores["default"].get, SCOPE, other)]
    return answers


def test_a_full_disk_is_unavailable_until_there_is_room(store: EncryptedStore, location: Path) -> None:
    answers = run(put_on_a_full_disk, str(location), new_ref())
    if isinstance(answers, str):
        needs.missing(answers)
    full = "the file system of the secrets does not work now (No space left on device, ENOSPC)"

    assert answers == [
        ("", ""),
        ("StoreFull", full),
        ("SecretNotFound", "the secret store holds nothing under this ref"),
        ("", ""),  # the same again takes no room
        ("", ""),
        ("", ""),
    ]


def erase_on_a_full_disk(location: str, refs: list[str]) -> tuple[list[str], list[str]] | str:
    """Erase all these from a full disk, on which the first of them has no file that can be removed."""
    if problem := mount("-t", "tmpfs", "-o", "size=64k,mode=700", "none", location):
        return problem
    store, addresses = secret_stores["default"], [Address(SCOPE, ref) for ref in refs]
    store.put_many([entry(ref) for ref in refs])
    bad = Path(location, object_name(refs[0]))
    bad.unlink()
    bad.mkdir()
    with Path(location, "junk").open("wb", buffering=0) as junk:
        for _ in range(20):
            said(junk.write, bytes(4096))
    full = put(SCOPE, new_ref(), VALUE)
    first = store.delete_many(addresses[:1])
    return [full[0], *map(str, first)], list(map(str, store.delete_many(addresses)))


def test_one_file_that_cannot_be_removed_is_told_apart_on_a_full_disk_too(
    store: EncryptedStore, location: Path
) -> None:
    """Nothing can be written there to tell it, and nothing has to be."""
    answers = run(erase_on_a_full_disk, str(location), [new_ref() for _ in range(3)])
    if isinstance(answers, str):
        pytest.skip(answers)
    bad = "the file system does not remove this object (Is a directory, EISDIR)"
    assert answers == (["StoreFull", bad], [bad, "True", "True"])


def put_with_few_handles(refs: list[str]) -> tuple[Said, list[Any]]:
    store = secret_stores["default"]
    entries = [entry(ref) for ref in refs]
    before = limit(resource.RLIMIT_NOFILE, 32)
    few = said(store.put_many, entries)
    limit(resource.RLIMIT_NOFILE, before)
    return few, store.put_many(entries)


def test_too_many_open_files_are_unavailable(store: EncryptedStore) -> None:
    refs = [new_ref() for _ in range(50)]
    few, enough = run(put_with_few_handles, refs)

    assert few == (
        "StoreUnavailable",
        "the file system of the secrets does not work now (Too many open files, EMFILE)",
    )
    assert [type(outcome) for outcome in enough] == [Receipt] * 50
    assert store.get_many([Address(SCOPE, ref) for ref in refs]) == [VALUE] * 50


# Rights.


def modified_at(name: str) -> Said:
    return said(secret_stores["default"].modified_at, name)


def test_a_time_that_may_not_be_looked_at_is_denied(reachable: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can leave a directory that another user cannot look into")
    ref = new_ref()
    secret_stores["default"].put(SCOPE, ref, VALUE)
    assert run(as_nobody, modified_at, object_name(ref)) == DENIED


def refused(location: Path) -> Said:
    return (
        "StoreDenied",
        (
            f"this process may not read and write the directory for secrets: {location}. Give it, with all that is "
            "in it, to the user that runs this process, with mode 0700."
        ),
    )


DENIED: Said = (
    "StoreDenied",
    (
        "the file system refuses access to the directory for secrets (Permission denied, EACCES): give it, with all "
        "that is in it, to the user that runs this process, on a file system that is mounted for writing"
    ),
)


def test_a_directory_that_may_only_be_read_is_denied(reachable: Path) -> None:
    ref = new_ref()
    reachable.chmod(0o555)
    put, got, deleted, listed, checked = run(as_nobody, everything, SCOPE, ref)

    assert put == DENIED
    assert got[0] == "SecretNotFound"
    assert deleted == listed == ("", "")  # there is nothing in it: that can be seen
    assert checked == refused(reachable)


def test_objects_of_another_user_are_denied_and_not_taken_for_gone(reachable: Path) -> None:
    # As after a first run by root: the directories below are root's.
    needs.root()
    ref = new_ref()
    reachable.chmod(0o777)
    secret_stores["default"].put(SCOPE, ref, VALUE)

    answers = run(as_nobody, everything, SCOPE, ref)

    assert answers == [DENIED] * 5
    assert secret_stores["default"].get(SCOPE, ref) == VALUE


def test_the_check_looks_at_the_objects_directory_too(reachable: Path) -> None:
    objects = reachable / DEFAULT_PREFIX
    objects.mkdir(parents=True)
    for directory in (reachable, objects, objects.parent, objects.parent.parent):
        directory.chmod(0o755)
    reachable.chmod(0o777)
    objects.chmod(0o555)

    assert run(as_nobody, everything, SCOPE, new_ref())[-1] == refused(objects)

"""A file that cannot be read or replaced, among others that can: real bad blocks, users and rights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.conf import settings as django_settings

from kfs_credentials.crypto import new_ref, object_name
from kfs_credentials.stores import Address, secret_stores
from tests import needs
from tests.stores.contract import SCOPE, VALUE, entry
from tests.stores.processes import NOBODY, Said, as_nobody, mount, run, said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kfs_credentials.stores.encrypted import EncryptedStore

EIO = "the file system does not {} this object (Input/output error, EIO)"
EACCES = "the file system does not {} this object (Permission denied, EACCES)"
EPERM = "the file system does not {} this object (Operation not permitted, EPERM)"
DENIED = (
    "the file system refuses access to the directory for secrets (Permission denied, EACCES): give it, with all that "
    "is in it, to the user that runs this process, on a file system that is mounted for writing"
)


def shown(outcomes: Iterable[Any]) -> list[Said]:
    return [(type(one).__name__, str(one) if isinstance(one, Exception) else "") for one in outcomes]


def answers(refs: list[str]) -> list[Any]:
    """Return what the store says to a put of the same, a get and a replacement of all these: outcomes, or an error."""
    store = secret_stores["default"]
    addresses = [Address(SCOPE, ref) for ref in refs]
    calls: list[Callable[[], Any]] = [
        lambda: store.put_many([entry(ref) for ref in refs]),
        lambda: store.get_many(addresses),
        lambda: store.replace_many(addresses),
    ]
    found: list[Any] = []
    for call in calls:
        outcomes: list[Any] = []
        problem = said(lambda: outcomes.extend(call()))  # noqa: B023 - it is called at once
        found.append(problem if problem[0] else shown(outcomes))
    return found


def put_all(store: EncryptedStore, refs: list[str]) -> None:
    store.put_many([entry(ref) for ref in refs])


@pytest.fixture
def refs(reachable: Path) -> list[str]:
    """Three objects in a directory of another user's, who is nobody, and beside them the probe."""
    refs = [new_ref() for _ in range(3)]
    store = secret_stores["default"]
    put_all(store, refs)  # type: ignore[arg-type]
    probe_of(reachable).write_bytes(b"any bytes")
    probe_of(reachable).chmod(0o600)
    for path in (reachable, *reachable.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    return refs


def probe_of(location: Path) -> Path:
    return location / secret_stores["default"]._probe_name  # type: ignore[attr-defined,no-any-return]


def only(bad: str, good: str) -> list[Said]:
    return [(good, ""), ("SecretStoreError", bad), (good, "")]


def with_bad_blocks(paths: list[str], refs: list[str]) -> list[Any] | str:
    """Let each read of these files fail as a bad block does: with the memory of this process at 0 in their places."""
    for path in paths:
        if problem := mount("--bind", f"/proc/{os.getpid()}/mem", path):
            return problem
    return answers(refs)


def test_a_bad_block_of_one_file_is_the_outcome_of_its_object(refs: list[str], reachable: Path) -> None:
    """Put, get and replace name that one, and do the others."""
    found = run(with_bad_blocks, [str(reachable / object_name(refs[1]))], refs)
    if isinstance(found, str):
        needs.missing(found)
    bad = EIO.format("read")
    assert found == [only(bad, "Receipt"), only(bad, "Credentials"), only(bad, "Resealed")]


def test_bad_blocks_everywhere_are_an_unavailable_store(refs: list[str], reachable: Path) -> None:
    """The probe cannot be read either."""
    paths = [str(path) for path in (reachable / object_name(refs[1]), probe_of(reachable))]
    found = run(with_bad_blocks, paths, refs)
    if isinstance(found, str):
        needs.missing(found)
    assert (
        found
        == [("StoreUnavailable", "the file system of the secrets does not work now (Input/output error, EIO)")] * 3
    )


@pytest.fixture
def root() -> None:
    needs.root()


@pytest.mark.usefixtures("root")
def test_one_file_of_another_user_is_the_outcome_of_its_object(refs: list[str], reachable: Path) -> None:
    """As after a restore of one object by root."""
    os.chown(reachable / object_name(refs[1]), 0, 0)
    bad = EACCES.format("read")
    assert run(as_nobody, answers, refs) == [only(bad, "Receipt"), only(bad, "Credentials"), only(bad, "Resealed")]


@pytest.mark.usefixtures("root")
def test_one_file_is_told_apart_where_there_is_no_probe_yet(refs: list[str], reachable: Path) -> None:
    """The directory can be read."""
    probe_of(reachable).unlink()
    os.chown(reachable / object_name(refs[1]), 0, 0)
    assert run(as_nobody, answers, refs)[1] == only(EACCES.format("read"), "Credentials")


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("what", ["probe", "directory"])
def test_a_store_of_another_user_is_denied(refs: list[str], reachable: Path, what: str) -> None:
    """Where the probe cannot be read either, or the directory cannot."""
    os.chown(reachable / object_name(refs[1]), 0, 0)
    if what == "probe":
        os.chown(probe_of(reachable), 0, 0)
    else:
        probe_of(reachable).parent.chmod(0o300)
    assert run(as_nobody, answers, refs)[1] == ("StoreDenied", DENIED)


@pytest.mark.usefixtures("root")
def test_one_file_that_cannot_be_replaced_is_the_outcome_of_its_object(
    refs: list[str], reachable: Path, kfs_settings: Callable[..., None]
) -> None:
    """In a sticky directory only the owner of a file may rename another one over it; nothing is left behind."""
    path = reachable / object_name(refs[1])
    path.parent.chmod(0o1777)
    os.chown(path.parent, 0, 0)
    os.chown(path, 0, 0)
    path.chmod(0o644)
    before = path.read_bytes()
    keys: Any = django_settings.KFS_CREDENTIALS["KEYS"]
    kfs_settings(KEYS=[os.urandom(32), *keys])
    replaced = run(as_nobody, answers, refs)[2]
    assert replaced == only(EPERM.format("replace"), "Resealed")
    assert path.read_bytes() == before
    assert sorted(one.name for one in path.parent.iterdir()) == sorted(
        [probe_of(reachable).name, *(Path(object_name(ref)).name for ref in refs)]
    )
    assert secret_stores["default"].get(SCOPE, refs[0]) == VALUE

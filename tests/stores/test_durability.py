"""When a put returns, its secret outlasts a crash of the machine: shown by the system calls of a real process."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.stores.strace import SystemCall, trace


@pytest.fixture
def location(tmp_path: Path) -> Path:
    made = tmp_path / "secrets"
    made.mkdir()
    return made


class Calls(list[SystemCall]):
    """The calls of one action, in the order in which they began."""

    def named(self, name: str, pattern: str = "") -> list[SystemCall]:
        return [call for call in self if call.name == name and re.search(pattern, call.arguments)]

    def one(self, name: str, pattern: str = "") -> SystemCall:
        (call,) = self.named(name, pattern)
        return call


def by_action(calls: list[SystemCall]) -> list[Calls]:
    """Divide the calls: each action ends with the line of output that says so."""
    actions, current = [], Calls()
    for call in calls:
        current.append(call)
        if call.name == "write" and re.search(r'"\w+ (done|all but .*|\w+: .*)\\n"', call.arguments):
            actions.append(current)
            current = Calls()
    return actions


def in_order(*calls: SystemCall) -> bool:
    """Tell whether each call had ended before the next one began."""
    return all(call.ended < later.begun for call, later in itertools.pairwise(calls))


def test_each_file_is_synced_before_its_link_and_the_directory_before_the_return(location: Path) -> None:
    output, calls = trace(location, "put")
    assert output == ["put done"]
    (put,) = by_action(calls)
    returned = put[-1]
    links = put.named("linkat")
    assert len(links) == 3

    for link in links:
        file = int(re.findall(r'"/proc/self/fd/(\d+)"', link.arguments)[0])
        # The file is opened once and has no name before its link.
        opened = next(call for call in put.named("openat", "O_TMPFILE") if call.result == file)
        (written,) = (call for call in put.named("write") if call.file == file and call is not returned)
        (synced,) = (call for call in put.named("fsync", r"objects/v1/#\d+") if call.file == file)
        assert in_order(opened, written, synced, link)
        assert (written.result > 200, synced.result, link.result) == (True, 0, 0)
    names = put.one("fsync", "objects/v1>")
    assert all(in_order(link, names, returned) for link in links)
    assert names.result == 0
    assert not put.named("unlinkat")


def test_directories_that_were_made_are_synced_into_theirs_before_the_return(location: Path) -> None:
    _, calls = trace(location, "put_one", "put")
    first, second = by_action(calls)

    for made, above in ((f"{location}/objects", f"{location}"), (f"{location}/objects/v1", f"{location}/objects")):
        mkdir = first.one("mkdir", f'^"{made}", 0700')
        assert in_order(mkdir, first.one("fsync", f"<{above}>"), first.one("linkat"))
    # Once a process has made them durable, it need not do so again.
    assert not second.named("fsync", f"<{location}(/objects)?>")


def test_a_directory_that_another_process_made_is_made_durable_too(location: Path) -> None:
    # That process may have died before it was.
    (location / "objects" / "v1").mkdir(parents=True)
    _, calls = trace(location, "put_one")
    (put,) = by_action(calls)

    assert not put.named("mkdir")
    for above in (f"{location}", f"{location}/objects"):
        assert in_order(put.one("fsync", f"<{above}>"), put.one("linkat"))


def test_the_same_again_writes_nothing_and_makes_durable_what_is_there(location: Path) -> None:
    _, calls = trace(location, "put", "put_one", "put")
    _, one, three = by_action(calls)

    for again, number in ((one, 1), (three, 3)):
        returned = again[-1]
        assert not again.named("linkat")
        assert not again.named("openat", "O_TMPFILE|O_WRONLY|O_RDWR|O_CREAT")
        assert again.named("write") == [returned]
        files = again.named("fsync", r"objects/v1/[0-9a-f]{64}\.enc>")
        assert len({call.arguments for call in files}) == len(files) == number
        names = again.one("fsync", "objects/v1>")
        assert all(in_order(file, names, returned) for file in files)


def test_a_deletion_is_synced_before_the_return(location: Path) -> None:
    _, calls = trace(location, "put_one", "delete", "delete", looks=True)
    _, deleted, absent = by_action(calls)

    assert [call.result for call in deleted.named("unlinkat") if '.enc", 0' in call.arguments] == [0, -1]
    for action in (deleted, absent):
        assert in_order(action.named("unlinkat")[-1], action.one("fsync", "objects/v1>"), action[-1])
        # Nothing is opened but the directory: what is deleted is not read.
        assert {call.arguments.split(", ")[1] for call in action.named("openat")} == {f'"{location}/objects/v1"'}
        # Whether it is there is looked up before, and whether it is gone once it is durable that it is.
        before, after = (call for call in action.named("newfstatat") if '.enc"' in call.arguments)
        assert in_order(before, action.named("unlinkat")[0])
        assert in_order(action.one("fsync", "objects/v1>"), after)


FAILURES = {
    # What a file system may answer at any moment, and what becomes of the put.
    # Only this one file: another can be written and synced beside it.
    "fsync:error=EIO:when=3": "all but 1, SecretStoreError: the file system does not write this object "
    "(Input/output error, EIO)",
    "fsync:error=EIO:when=3+": "StoreUnavailable: the file system of the secrets does not work now "
    "(Input/output error, EIO)",
    "fsync:error=EIO:when=4": "StoreUnavailable: the file system of the secrets does not work now "
    "(Input/output error, EIO)",
    # None can be linked there, as under a profile of AppArmor: not even the one by which that is told.
    "linkat:error=EACCES": "StoreDenied: the file system refuses access to the directory for secrets "
    "(Permission denied, EACCES): give it, with all that is in it, to the user that runs this process, on a file "
    "system that is mounted for writing",
    "linkat:error=EIO": "StoreUnavailable: the file system of the secrets does not work now (Input/output error, EIO)",
    "linkat:error=EUCLEAN": "StoreUnavailable: the file system of the secrets does not work now "
    "(Structure needs cleaning, EUCLEAN)",
    "linkat:error=EACCES:when=1": "all but 1, SecretStoreError: the file system does not write this object "
    "(Permission denied, EACCES)",
    "linkat:error=ENOSPC": "StoreFull: the file system of the secrets does not work now "
    "(No space left on device, ENOSPC)",
    "linkat:error=EPERM": "StoreMisconfigured: the file system of the secrets knows no hard links, so that it cannot "
    "create a file once: put the directory for secrets on another one",
    "mkdir:error=EROFS": "StoreDenied: the file system refuses access to the directory for secrets "
    "(Read-only file system, EROFS): give it, with all that is in it, to the user that runs this process, on a file "
    "system that is mounted for writing",
}


@pytest.mark.parametrize("inject", FAILURES)
def test_a_failing_system_call_is_a_store_error_and_no_success(location: Path, inject: str) -> None:
    output, calls = trace(location, "put_one", inject=inject)
    assert output == [f"put_one {FAILURES[inject]}"]
    # Only the fsync of the directory comes after the link: there is an object then, and the next put syncs it.
    linked = any(call.name == "linkat" and '.enc"' in call.arguments and call.result == 0 for call in calls)
    assert linked == (inject == "fsync:error=EIO:when=4")
    assert bool(list(location.rglob("*.enc*"))) == linked

    assert trace(location, "put_one")[0] == ["put_one done"]


# In a batch of six on one thread, the fifth sync of a thread is that of a file: the call's own thread makes four, of
# directories and of the file by which a bad file is told from a bad file system. The fifth look at a name is one, too,
# and the fifth link.
ONE_BAD = {
    "sync of a new file": ([], "put_six", "fsync", "write"),
    "link of a new file": ([], "put_six", "linkat", "write"),
    "look at a name": ([], "put_six", "newfstatat", "write"),
    "sync of what is there already": (["put_six"], "put_six", "fsync", "sync"),
    "sync of a replacement": (["put_six"], "replace_six", "fsync", "replace"),
}


@pytest.mark.parametrize("case", ONE_BAD)
def test_one_bad_file_is_the_outcome_of_its_object_and_the_others_are_durable(location: Path, case: str) -> None:
    before, action, call, verb = ONE_BAD[case]
    if before:
        assert trace(location, *before)[0] == ["put_six done"]
    objects = location / "objects" / "v1"
    objects.mkdir(parents=True, exist_ok=True)

    only = objects if call == "newfstatat" else None
    output, calls = trace(location, action, inject=f"{call}:error=EIO:when=5", only=only, looks=call == "newfstatat")

    reason = f"the file system does not {verb} this object (Input/output error, EIO)"
    assert output == [f"{action} all but 1, SecretStoreError: {reason}"]
    assert len(list(location.rglob("*.enc"))) == (6 if before else 5)
    if call == "fsync":
        # The directory is synced after the last link; what failed is not synced again, which would seem to work.
        (done,) = by_action(calls)
        assert in_order(*done.named("linkat", r'\.enc(\.new)?"')[-1:], done.named("fsync", "objects/v1>")[-1], done[-1])
        files = [call for call in done.named("fsync") if not re.search(r"(secrets|objects|v1)>", call.arguments)]
        assert [call.result for call in files].count(-1) == 1
        assert len(files) == 7  # six, and the one by which the file system is tried
    if not before:
        assert trace(location, action)[0] == [f"{action} done"]


def test_a_directory_that_cannot_be_synced_is_the_outcome_of_the_whole_batch(location: Path) -> None:
    output, _ = trace(location, "put_six", inject="fsync:error=EIO:when=3")
    assert output == [
        "put_six StoreUnavailable: the file system of the secrets does not work now (Input/output error, EIO)"
    ]

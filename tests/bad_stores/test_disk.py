"""A disk that is full, read-only or gone in the middle: what is said, what waits, and that nothing is lost by it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials.crypto import object_name
from tests import needs
from tests.bad_stores.conftest import everybody_may_go_on
from tests.crashes.scene import CLEAN, LOOK, NOT_FINISHED, Scene
from tests.crashes.stage import LEDGER, Stage
from tests.crashes.stores import BEFORE_DELETE, BEFORE_PUT, BEFORE_REPLACE
from tests.crashes.workers import Worker

FULL = "No space left on device, ENOSPC"
READ_ONLY = "Read-only file system, EROFS"
SOURCES = 12
NAMED = "(SELECT id FROM sources)"


class Disk:
    """A small file system in the memory of this machine, mounted where the secrets are."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.elsewhere = Path(f"{place}-elsewhere")
        self.ballast = place / "ballast"

    def fill(self, but: int = 0) -> None:
        """Leave room for so many objects; each takes a page."""
        page = os.sysconf("SC_PAGESIZE")
        with self.ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(page))
            except OSError:
                pass
            file.truncate(file.tell() - but * page)

    def make_room(self) -> None:
        self.ballast.unlink()

    def remount(self, how: str) -> None:
        """Mount it read-only, `ro`, or for writing again, `rw`."""
        subprocess.run(["mount", "-o", f"remount,{how}", str(self.place)], check=True)

    def go(self) -> None:
        """Be mounted elsewhere; an empty directory is left."""
        self.elsewhere.mkdir()
        subprocess.run(["mount", "--move", str(self.place), str(self.elsewhere)], check=True)

    def come_back(self) -> None:
        """Be where it was again."""
        self.place.mkdir(exist_ok=True)
        assert list(self.place.iterdir()) == []
        subprocess.run(["mount", "--move", str(self.elsewhere), str(self.place)], check=True)


@pytest.fixture
def disk(secrets_directory: Path) -> Iterator[Disk]:
    """A disk under the store. Where mounting is impossible that is a failure in CI, and a skip elsewhere."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(secrets_directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        needs.missing(f"mounting is not allowed here: {done.stderr}")
    disk = Disk(secrets_directory)
    try:
        yield disk
    finally:
        # At once from here, and for good when the last process has ended that has a file open there.
        place = disk.place if disk.place.is_mount() else disk.elsewhere
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def scene(disk: Disk, scene: Scene) -> Scene:
    """A scene whose store is on that disk."""
    return scene


def no_half_file(scene: Scene) -> bool:
    """Return whether all there is of files is whole objects."""
    return all(path.suffix == ".enc" for path, *_ in scene.files() if path.name != "ballast")


# Full.


def waits_for_room(scene: Scene, worker: Worker) -> None:
    scene.wait_until(lambda: FULL in worker.printed, "it has met the full disk", worker)


def test_a_backfill_waits_for_room(disk: Disk, scene: Scene) -> None:
    """What fits is moved or not, what does not fit is not: no attempt is counted, and it goes on by itself."""
    scene.leave_only(SOURCES)
    disk.fill(but=4)
    worker = scene.start(BATCH_SIZE=3)
    waits_for_room(scene, worker)
    assert no_half_file(scene)
    scene.check_meanwhile("an object in the store has no ledger row")
    disk.make_room()
    assert worker.wait() == CLEAN, worker.printed
    assert scene.attempts() == 0
    assert len(scene.files()) == SOURCES
    assert scene.rows("SELECT id FROM sources WHERE credential_ref IS NULL") == []
    scene.check_always()


def test_a_service_says_that_there_is_no_room_and_leaves_a_source_what_it_has(disk: Disk, scene: Scene) -> None:
    stage = Stage(scene, 2)
    tenant, source, _ = stage.sources[0]
    resolution = "resolve_credentials", {"tenant": tenant, "source_id": source}
    disk.fill()
    answers = scene.call(stage.rotation(tenant, source), resolution)
    assert answers == [{"error": "StoreFull"}, {"credentials": {"token": source}}]
    disk.make_room()
    stage.recover()


def test_a_reencryption_waits_for_room(disk: Disk, scene: Scene) -> None:
    stage = Stage(scene, SOURCES)
    keys = [os.urandom(32).hex(), *scene.keys]
    disk.fill()
    worker = scene.start_reencryption(KEYS=keys, BATCH_SIZE=5)
    waits_for_room(scene, worker)
    assert no_half_file(scene)
    disk.make_room()
    assert worker.wait() == CLEAN, worker.printed
    scene.keys = keys[:1]
    scene.check_values(stage.values)


def test_a_cleanup_makes_room(disk: Disk, scene: Scene) -> None:
    """Not even the epoch can be written that begins before an erasure: the first object of the batch goes before it."""
    stage = Stage(scene, SOURCES)
    stage.orphans()
    disk.fill()
    worker = scene.start_cleanup()
    assert worker.wait() == CLEAN, worker.printed
    assert FULL not in worker.printed
    # That one was there too, and is not noted as one that somebody else had erased.
    receipts = scene.rows("SELECT receipt, count(*) FROM kfs_credentials_secret_object WHERE receipt <> '' GROUP BY 1")
    assert receipts == [("erased", 3)]
    disk.make_room()
    stage.check()


def first_to_erase(stage: Stage, disk: Disk) -> Path:
    """Make some refs due, and return the file of the one that is claimed first."""
    scene = stage.scene
    stage.orphans()
    scene.execute(f"UPDATE {LEDGER} SET state = 'retired', next_delete_at = now() WHERE source_id NOT IN {NAMED}")
    (ref,) = scene.rows(f"SELECT credential_ref FROM {LEDGER} WHERE state = 'retired' ORDER BY id LIMIT 1")[0]
    scene.execute(f"UPDATE {LEDGER} SET next_delete_at = '2000-01-01' WHERE credential_ref = %s", [ref])
    return disk.place / object_name(ref)


def test_a_cleanup_makes_room_beside_a_file_that_cannot_be_removed(disk: Disk, scene: Scene) -> None:
    """Not by it, and not never: it is the one that is tried first, and each batch is as large as it is alone."""
    stage = Stage(scene, SOURCES)
    first = first_to_erase(stage, disk)
    first.unlink()
    first.mkdir()
    disk.fill()
    worker = scene.start_cleanup(PARK_AFTER=2, BATCH_SIZE=1)
    assert worker.wait() == LOOK, worker.printed
    states = f"SELECT state, delete_attempts, count(*) FROM {LEDGER} WHERE state <> 'active' GROUP BY 1, 2 ORDER BY 1"
    assert scene.rows(states) == [("deleted", 0, 2), ("retired", 2, 1)]
    first.rmdir()
    disk.make_room()
    scene.execute(f"UPDATE {LEDGER} SET next_delete_at = now() WHERE state = 'retired'")
    stage.recover()


def test_a_cleanup_makes_room_beside_an_object_that_is_gone_already(disk: Disk, scene: Scene) -> None:
    """No room is made by that one, and it is put off: each batch is as large as it is alone."""
    stage = Stage(scene, SOURCES)
    first = first_to_erase(stage, disk)
    first.unlink()
    disk.fill()
    worker = scene.start_cleanup(BATCH_SIZE=1, RETRY_BASE=1)
    assert worker.wait() == CLEAN, worker.printed
    assert scene.rows(f"SELECT DISTINCT state, delete_attempts FROM {LEDGER} WHERE state <> 'active'") == [
        ("deleted", 0)
    ]
    disk.make_room()
    stage.check()


def test_a_full_disk_without_anything_to_erase_is_waited_for(disk: Disk, scene: Scene) -> None:
    """What is due was erased by somebody else: no room is made by that, and no attempt is counted."""
    stage = Stage(scene, SOURCES)
    stage.orphans()
    for path, *_ in scene.files():
        path.unlink()
    disk.fill()
    worker = scene.start_cleanup()
    waits_for_room(scene, worker)
    assert scene.rows(f"SELECT count(*) FROM {LEDGER} WHERE state = 'deleted'") == [(0,)]
    disk.make_room()
    assert worker.wait() == CLEAN, worker.printed
    assert scene.rows(f"SELECT DISTINCT delete_attempts FROM {LEDGER} WHERE state = 'deleted'") == [(0,)]


# Read-only, and gone.


Start = Callable[..., Worker]


class Work:
    """What is under way when it happens: where it is held up, and how it is begun."""

    def __init__(self, scene: Scene, kind: str) -> None:
        self.stage = Stage(scene, SOURCES)
        self.keys = scene.keys
        self.settings: dict[str, Any] = {}
        starts: dict[str, tuple[Start, str]] = {
            "backfill": (scene.start, BEFORE_PUT),
            "cleanup": (scene.start_cleanup, BEFORE_DELETE),
            "reencryption": (scene.start_reencryption, BEFORE_REPLACE),
        }
        self.start, self.gate = starts[kind]
        if kind.startswith("backfill"):
            (space,) = scene.new_spaces("a tenant", 1)
            new = scene.new_legacy_sources(space, SOURCES)
            self.stage.values |= {("a tenant", source): {"token": source} for source in new}
        elif kind == "cleanup":
            self.stage.orphans()
        else:
            self.settings["KEYS"] = self.keys = [os.urandom(32).hex(), *scene.keys]


KINDS = ["backfill", "cleanup", "reencryption"]


def goes_wrong(scene: Scene, work: Work, happen: Callable[[], None], told: str) -> None:
    """Let it happen in the middle of the work: the run ends, all workers pause, and a person is told why."""
    with scene.gate(work.gate) as gate:
        worker = work.start(**work.settings)
        gate.wait()
        happen()
        gate.open()
        assert worker.wait() == NOT_FINISHED, worker.printed
    assert told in worker.printed
    assert "resume_credential_workers" in worker.printed
    another = work.start(**work.settings)
    assert another.wait() in (1, NOT_FINISHED), another.printed


def goes_on(scene: Scene, work: Work) -> None:
    """The same again, once it is mended: nothing is missing, and nothing has counted as an attempt."""
    everybody_may_go_on(scene)
    again = work.start(**work.settings)
    assert again.wait() == CLEAN, again.printed
    assert scene.attempts() == 0
    assert scene.rows(f"SELECT DISTINCT delete_attempts FROM {LEDGER}") == [(0,)]
    assert no_half_file(scene)
    scene.keys = work.keys
    scene.check_values(work.stage.values)


@pytest.mark.parametrize("kind", KINDS)
def test_it_becomes_read_only(disk: Disk, scene: Scene, kind: str) -> None:
    work = Work(scene, kind)
    goes_wrong(scene, work, lambda: disk.remount("ro"), READ_ONLY)
    disk.remount("rw")
    goes_on(scene, work)


def test_a_read_only_store_is_still_read(disk: Disk, scene: Scene) -> None:
    stage = Stage(scene, 2)
    tenant, source, _ = stage.sources[0]
    disk.remount("ro")
    assert scene.call(stage.rotation(tenant, source)) == [{"error": "StoreDenied"}]
    scene.check_values(stage.values)
    disk.remount("rw")
    stage.recover()


# Gone: the volume is not mounted any more, and then it is again.


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("backfill", "nothing"),
        ("backfill", "an empty directory"),
        ("cleanup", "an empty directory"),
        ("reencryption", "an empty directory"),
    ],
)
def test_it_vanishes_and_comes_back(scene: Scene, disk: Disk, kind: str, left: str) -> None:
    """Nothing is made, put, erased or taken for gone in its place."""
    work = Work(scene, kind)

    def vanish() -> None:
        disk.go()
        if left == "nothing":
            disk.place.rmdir()

    goes_wrong(
        scene, work, vanish, "the directory for secrets" if left == "nothing" else "the store does not show that it is"
    )
    disk.come_back()
    goes_on(scene, work)

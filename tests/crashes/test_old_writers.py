"""An old writer saves a whole row as it was before a rotation, and brings back a ref that is not in use any more."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from kfs_credentials.crypto import Scope
from tests.crashes.scene import CLEAN, LOOK, Scene
from tests.crashes.stage import LEDGER, Stage
from tests.crashes.stores import AFTER_DELETE, BEFORE_DELETE, IN_DELETE
from tests.crashes.workers import Worker

SOURCES = 3
ROTATED = {"token": "rotated to"}


class Rotated(NamedTuple):
    """A source that was rotated, both of its refs, and whose they are."""

    tenant: str
    source: str
    older: str
    newer: str
    scope: Scope


def rotate(stage: Stage, **settings: object) -> Rotated:
    """Rotate a source's credentials."""
    scene = stage.scene
    tenant, source, older = stage.sources[0]
    arguments = {"tenant": tenant, "source_id": source, "credentials": ROTATED}
    (answer,) = scene.call(("rotate_credentials", arguments), **settings)
    stage.values[tenant, source] = ROTATED
    space = scene.value("SELECT knowledge_space_id FROM sources WHERE id = %s", [source])
    return Rotated(tenant, source, older, answer["ref"], Scope(tenant, space, source))


def save_as_before(stage: Stage, rotated: Rotated) -> None:
    """Let the old writer save its row."""
    stage.save(rotated.source, rotated.older)
    stage.values[rotated.tenant, rotated.source] = {"token": rotated.source}


def check_both(stage: Stage, rotated: Rotated) -> None:
    """The application has the older secret, and the newer one can be read under its own ref; all is at rest."""
    stage.check()
    assert stage.scene.store.get(rotated.scope, rotated.newer) == ROTATED


@pytest.mark.parametrize("grace", [600, 0])
def test_neither_secret_is_lost(scene: Scene, grace: float) -> None:
    """Whether the older one is not due yet, or due at the moment at which the cleanup comes by."""
    stage = Stage(scene, SOURCES)
    rotated = rotate(stage, ERASE_GRACE=grace)
    save_as_before(stage, rotated)
    for _ in range(2):  # the second finds nothing to do
        cleanup = scene.start_cleanup()
        assert cleanup.wait() == LOOK, cleanup.printed
        check_both(stage, rotated)
    assert scene.value("SELECT credential_ref FROM sources WHERE id = %s", [rotated.source]) == rotated.older
    assert scene.rows(f"SELECT credential_ref FROM {LEDGER} WHERE state = 'retired'") == [(rotated.newer,)]


def start_to_erase(scene: Scene, place: str, stack: ExitStack, **settings: object) -> tuple[Worker, object]:
    """Return a cleanup that has claimed the older ref and stands at a gate."""
    gate = stack.enter_context(scene.gate(place))
    eraser = scene.start_cleanup(**settings)
    gate.wait()
    assert scene.rows(f"SELECT count(*) FROM {LEDGER} WHERE state = 'deleting'") == [(1,)]
    return eraser, gate


@pytest.mark.parametrize(("place", "lease"), [(BEFORE_DELETE, 1), (BEFORE_DELETE, 600), (IN_DELETE, 600)])
def test_a_stalled_eraser(scene: Scene, place: str, lease: float) -> None:
    """It wakes up when another has rescued the secret by a copy, and erased the ref that it still believes to hold."""
    stage = Stage(scene, SOURCES)
    rotated = rotate(stage)
    with ExitStack() as stack:
        eraser, _ = start_to_erase(scene, place, stack, LEASE=lease)
        eraser.freeze()
    save_as_before(stage, rotated)
    if lease > 1:
        scene.expire_leases()
    other = scene.start_cleanup()  # waits for a lease that was not moved
    assert other.wait() == LOOK, other.printed
    assert "1 source rescued by a copy" in other.printed
    check_both(stage, rotated)
    before = scene.everything()
    eraser.send(signal.SIGCONT)
    assert eraser.wait() == LOOK, eraser.printed
    assert eraser.printed.rstrip().splitlines()[-1].startswith("0 erased")
    assert scene.everything() == before
    check_both(stage, rotated)


def test_a_stalled_eraser_that_comes_first(scene: Scene) -> None:
    """It wakes up when the secret is rescued, and the ref that it holds no more is still to be erased."""
    stage = Stage(scene, SOURCES)
    rotated = rotate(stage)
    with ExitStack() as stack:
        eraser, _ = start_to_erase(scene, IN_DELETE, stack, LEASE=600)
        eraser.freeze()
    save_as_before(stage, rotated)
    scene.expire_leases()
    other = scene.start_cleanup("--due", ERASE_GRACE=600)
    assert other.wait() == LOOK, other.printed
    row = f"SELECT state, next_delete_at > now() FROM {LEDGER} WHERE credential_ref = %s"
    assert scene.rows(row, [rotated.older]) == [("retired", True)]
    assert scene.store.get(rotated.scope, rotated.older) == {"token": rotated.source}
    eraser.send(signal.SIGCONT)
    scene.wait_until(lambda: len(list(scene.store.list())) == SOURCES + 1, "it has erased the older one", eraser)
    scene.execute(f"UPDATE {LEDGER} SET next_delete_at = now() WHERE credential_ref = %s", [rotated.older])
    assert eraser.wait() == LOOK, eraser.printed
    check_both(stage, rotated)


def test_an_eraser_that_is_not_stalled(scene: Scene) -> None:
    """Its lease holds while another rescues the secret from under its hands: it erases what nobody names by then."""
    stage = Stage(scene, SOURCES)
    rotated = rotate(stage)
    with ExitStack() as stack:
        eraser, _ = start_to_erase(scene, IN_DELETE, stack)
        save_as_before(stage, rotated)
        other = scene.start_cleanup("--due")
        assert other.wait() == LOOK, other.printed
        assert "1 source rescued by a copy" in other.printed
    assert eraser.wait() == LOOK, eraser.printed
    check_both(stage, rotated)


@pytest.mark.parametrize("settled", [False, True])
def test_what_was_erased_before_the_old_writer_saved(scene: Scene, settled: bool) -> None:
    """The older secret is gone, and found to be so; the newer one is kept until a person chooses it."""
    stage = Stage(scene, SOURCES)
    rotated = rotate(stage)
    if settled:
        eraser = scene.start_cleanup("--due", LATE_WRITE_HORIZON=600)
        assert eraser.wait() == CLEAN, eraser.printed
        scene.execute(f"UPDATE {LEDGER} SET next_delete_at = now() WHERE state = 'deleted'")
    else:
        with ExitStack() as stack:
            eraser, _ = start_to_erase(scene, AFTER_DELETE, stack)
            eraser.kill()
    stage.save(rotated.source, rotated.older)
    for _ in range(2):
        scene.expire_leases()
        cleanup = scene.start_cleanup()
        assert cleanup.wait() == LOOK, cleanup.printed
        assert "which is unreadable: rotate its credentials, or choose the newer ref" in cleanup.printed
        assert scene.store.get(rotated.scope, rotated.newer) == ROTATED
        (answer,) = scene.call(("resolve_credentials", {"tenant": rotated.tenant, "source_id": rotated.source}))
        assert answer == {"error": "SecretNotFound"}

"""Workers and applications whose clocks are two hours apart, and one whose clock jumps, on one database.

What counts is the database's clock: nothing is taken over early, and nothing is held for ever.
"""

from __future__ import annotations

import itertools
import secrets
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.conditions.clocks import HOUR, Clock, off_by
from tests.crashes.scene import CLEAN, LOOK, NOT_FINISHED, ORPHANED, Scene
from tests.crashes.stage import AT_ONCE, LEDGER, Stage
from tests.crashes.stores import BEFORE_DELETE, BEFORE_PUT
from tests.crashes.workers import Nursery, Worker

AHEAD, BEHIND = HOUR, -HOUR
SOURCES = 24
JUMPS = 20


class Clocks:
    """Nurseries whose processes have other clocks."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.ahead = stack.enter_context(Nursery(environment=off_by(AHEAD)))
        self.behind = stack.enter_context(Nursery(environment=off_by(BEHIND)))
        self.clock = Clock(directory / "jumping", AHEAD)
        self.jumping = stack.enter_context(Nursery(environment=self.clock.variables))


@pytest.fixture
def scene(scene: Scene) -> Scene:
    """A scene whose workers do not look too often: each look at another clock costs something."""
    scene.settings["POLL_INTERVAL"] = 0.3
    return scene


@pytest.fixture(scope="module")
def clocks(public_directory: Path) -> Iterator[Clocks]:
    """The nurseries."""
    with ExitStack() as stack:
        yield Clocks(stack, public_directory)


def time_of(scene: Scene, nursery: Nursery) -> float:
    """Return how far a process of that nursery is ahead of the database."""
    scene.nursery = nursery
    worker = scene._start("tests.conditions.processes.tell_time", [], {})
    assert worker.wait() == CLEAN, worker.printed
    (answer,) = worker.answers
    return float(answer["time"]) - float(scene.value("SELECT extract(epoch FROM clock_timestamp())"))


def wait_for_a_look(scene: Scene, worker: Worker) -> None:
    """Wait until a worker has come to the end of a step that it began after this call."""
    now = scene.value("SELECT clock_timestamp() + interval '1 second'")
    ticked = "SELECT FROM kfs_credentials_tick WHERE split_part(worker_id, ':', 2) = %s AND ticked_at > %s"
    scene.wait_until(lambda: scene.rows(ticked, [str(worker.pid), now]), "the worker has looked", watched=worker)


def end(*workers: Worker) -> None:
    """Let those that watch come to their end."""
    for worker in workers:
        worker.send(signal.SIGTERM)
        assert worker.wait() in (CLEAN, LOOK, NOT_FINISHED), worker.printed


def test_they_have_other_clocks(scene: Scene, clocks: Clocks) -> None:
    """Else the others here could not fail."""
    assert time_of(scene, clocks.ahead) == pytest.approx(AHEAD, abs=60)
    assert time_of(scene, clocks.behind) == pytest.approx(BEHIND, abs=60)
    clocks.clock.jump(AHEAD)
    assert time_of(scene, clocks.jumping) == pytest.approx(AHEAD, abs=60)
    clocks.clock.jump(BEHIND)
    assert time_of(scene, clocks.jumping) == pytest.approx(BEHIND, abs=60)


@pytest.mark.long
def test_a_backfill_of_all_three(scene: Scene, clocks: Clocks) -> None:
    workers = []
    for nursery, size in ((clocks.ahead, 10), (clocks.behind, 12), (clocks.jumping, 14)):
        scene.nursery = nursery
        workers.append(scene.start(BATCH_SIZE=size))
    for jump, worker in zip(itertools.cycle((BEHIND, AHEAD)), itertools.cycle(workers), strict=False):
        clocks.clock.jump(jump)
        if worker.ends_within(0.02) and all(worker.is_over for worker in workers):
            break
    for worker in workers:
        assert worker.wait() == LOOK, worker.printed
        assert "lost" not in worker.printed, worker.printed
    scene.check_end()
    assert scene.attempts() == 0
    ahead_of_it = (
        f"SELECT FROM {LEDGER} WHERE updated_at > clock_timestamp() OR created_at > clock_timestamp() "
        "UNION ALL SELECT FROM source_credential_backfills WHERE updated_at > clock_timestamp() "
        "UNION ALL SELECT FROM kfs_credentials_event WHERE created_at > clock_timestamp()"
    )
    assert scene.rows(ahead_of_it) == []


@pytest.mark.parametrize("holder_is_ahead", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_lease_is_not_taken_over_early_and_not_held_for_ever(
    scene: Scene, clocks: Clocks, holder_is_ahead: bool
) -> None:
    scene.leave_only(SOURCES)
    scene.nursery, others = (clocks.ahead, clocks.behind) if holder_is_ahead else (clocks.behind, clocks.ahead)
    leases = "SELECT id, lease_token FROM source_credential_backfills ORDER BY id"
    with scene.gate(BEFORE_PUT) as gate:
        holder = scene.start(BATCH_SIZE=SOURCES, LEASE=600)
        gate.wait()
        gate.let_others_pass()
        held = scene.rows(leases)
        assert len(held) == SOURCES
        until = (
            "SELECT DISTINCT extract(epoch FROM lease_expires_at - heartbeat_at)::int FROM source_credential_backfills"
        )
        assert scene.value(until) == 600
        assert scene.value("SELECT max(heartbeat_at) < clock_timestamp() FROM source_credential_backfills")
        scene.nursery = others
        other = scene.start("--watch", BATCH_SIZE=SOURCES, LEASE=600)
        wait_for_a_look(scene, other)
        assert scene.rows(leases) == held
        holder.kill()
    wait_for_a_look(scene, other)
    assert scene.rows(leases) == held, "by its own clock it was over long ago, or will not be for an hour"
    scene.expire_leases()
    scene.wait_until(partial(scene.has_moved, SOURCES), "the other has taken over", watched=other)
    end(other)
    scene.check_always()


def test_an_erasure_and_a_reservation(scene: Scene, clocks: Clocks) -> None:
    """What is due, and when a reservation is held to be given up, is for the database's clock to say."""
    stage = Stage(scene, SOURCES)
    stage.orphans()
    scene.nursery, others = clocks.behind, clocks.ahead
    states = f"SELECT state, count(*) FROM {LEDGER} GROUP BY state"
    with scene.gate(BEFORE_DELETE) as gate:
        holder = scene.start_cleanup(LEASE=600)
        gate.wait()
        gate.let_others_pass()
        holder.kill()
    # Beside it what waits for its grace, and what an application has reserved and not put.
    tenant, source, _ = stage.sources.pop()
    stage.values[tenant, source] = None
    scene.call(("revoke_credentials", {"tenant": tenant, "source_id": source}), ERASE_GRACE=600)
    with scene.gate(BEFORE_PUT) as gate:
        tenant, source, _ = stage.sources[-1]
        application = scene.start_application(stage.rotation(tenant, source), RECOVER_AFTER=600)
        gate.wait()
        application.kill()
    before = {"active": SOURCES - AT_ONCE - 1, "deleting": AT_ONCE, "retired": 1, "staged": 1}
    assert dict(scene.rows(states)) == before
    lengths = (
        "SELECT extract(epoch FROM recover_after - created_at)::int, created_at < clock_timestamp() "
        f"FROM {LEDGER} WHERE state = 'staged' "
        "UNION ALL SELECT extract(epoch FROM next_delete_at - updated_at)::int, updated_at < clock_timestamp() "
        f"FROM {LEDGER} WHERE state = 'retired'"
    )
    assert scene.rows(lengths) == [(600, True)] * 2
    scene.nursery = others
    other = scene.start_cleanup("--watch", LEASE=600, RECOVER_AFTER=0.1)
    wait_for_a_look(scene, other)
    assert dict(scene.rows(states)) == before
    scene.expire_leases()
    scene.expire_reservations()
    scene.execute(f"UPDATE {LEDGER} SET next_delete_at = now() WHERE state = 'retired'")
    final = f"SELECT FROM {LEDGER} WHERE state = 'deleted' AND next_delete_at IS NULL"
    scene.wait_until(lambda: len(scene.rows(final)) == AT_ONCE + 2, "all of it is erased", watched=other)
    end(other)
    stage.check()


@pytest.mark.long
def test_everything_at_once(scene: Scene, clocks: Clocks) -> None:
    """Backfill, cleanup and applications of either clock, and then another key by one whose clock jumps."""
    stage = Stage(scene, SOURCES)
    tenant, _, _ = stage.sources[0]
    (space,) = scene.new_spaces(tenant, 1)
    workers = []
    for nursery in (clocks.ahead, clocks.behind):
        scene.nursery = nursery
        workers += [
            scene.start("--watch", BATCH_SIZE=3),
            scene.start_cleanup("--watch", BATCH_SIZE=3, RECOVER_AFTER=1),
        ]
    applications = []
    for nursery in (clocks.ahead, clocks.behind, clocks.jumping):
        legacy = scene.new_legacy_sources(space, 6)
        stage.values |= {(tenant, source): {"token": source} for source in legacy}
        scene.nursery = nursery
        rotated = [stage.sources.pop()[:2] for _ in range(3)]
        stage.values |= {one: {"token": "new"} for one in rotated}
        applications.append(scene.start_application(*[stage.rotation(*one) for one in rotated]))
        stage.orphans()
        clocks.clock.jump(BEHIND)
    for application in applications:
        assert application.wait() == CLEAN, application.printed
        assert all("ref" in answer for answer in application.answers), application.answers
    clocks.clock.jump(AHEAD)
    moved = "SELECT FROM sources WHERE metadata ? 'credentials'"
    scene.wait_until(lambda: not scene.rows(moved), "all is moved", watched=workers[0])
    final = f"SELECT FROM {LEDGER} WHERE state = 'deleted' AND next_delete_at IS NULL"
    scene.wait_until(lambda: len(scene.rows(final)) >= 9 + 3 * AT_ONCE, "all is erased", watched=workers[1])
    scene.check_meanwhile(ORPHANED)
    end(*workers)
    scene.nursery = clocks.jumping
    scene.keys.insert(0, secrets.token_bytes(32).hex())
    reencryption = scene.start_reencryption(BATCH_SIZE=12)
    for jump in itertools.islice(itertools.cycle((BEHIND, AHEAD)), JUMPS):
        clocks.clock.jump(jump)
        if reencryption.ends_within(0.05):
            break
    assert reencryption.wait() == CLEAN, reencryption.printed
    scene.keys.pop()
    scene.check_values(stage.values)

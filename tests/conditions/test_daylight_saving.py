"""The clocks go forward or back while work is on its way, in a project without UTC: nothing comes an hour off.

The server's own clock stands shortly before the change, and jumps over it when the test says so.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from example_project import postgres
from kfs_credentials.backfill import Backfill
from kfs_credentials.cleanup import Cleanup
from kfs_credentials.status import read_cleanup_left, read_status
from tests.cleanup.runs import patrol, sweep
from tests.conditions.clocks import HOUR, Clock, server_with
from tests.conditions.conftest import SceneOn
from tests.crashes.database import ALIAS
from tests.crashes.scene import CLEAN, NOT_FINISHED, Scene
from tests.crashes.stage import AT_ONCE, LEDGER, Stage
from tests.crashes.stores import BEFORE_DELETE, BEFORE_PUT
from tests.crashes.workers import Nursery, Worker

SOURCES = 12
DAY = 24 * HOUR
TICKS = 1.5
"""Seconds after which a tick tells of a step that was begun after the clock was set."""


class Change(NamedTuple):
    """A moment at which the clocks on the walls of a zone go forward or back."""

    zone: str
    at: datetime


CHANGES = {
    "back, Berlin": Change("Europe/Berlin", datetime(2026, 10, 25, 1, tzinfo=UTC)),
    "back, St. John's": Change("America/St_Johns", datetime(2026, 11, 1, 4, 30, tzinfo=UTC)),
    "forward, St. John's": Change("America/St_Johns", datetime(2027, 3, 14, 5, 30, tzinfo=UTC)),
    "forward, Berlin": Change("Europe/Berlin", datetime(2027, 3, 28, 1, tzinfo=UTC)),
}

SHORT = "back, Berlin"
"""The one that is a part of the suite: there is an hour twice."""

both_ways = pytest.mark.parametrize(
    "change", [SHORT, pytest.param("forward, St. John's", marks=pytest.mark.long)], indirect=True
)


class Place(NamedTuple):
    """A scene, its change, and the clock of its server."""

    scene: Scene
    change: Change
    clock: Clock

    def go_to(self, seconds: float) -> None:
        """Let it be so many seconds after the change now, or before."""
        self.clock.set(self.change.at + timedelta(seconds=seconds))

    def wait_for_a_look(self, worker: Worker, seconds: float) -> None:
        """Wait until a worker has come to the end of a step that it took so many seconds after the change, or later."""
        ticked = "SELECT FROM kfs_credentials_tick WHERE split_part(worker_id, ':', 2) = %s AND ticked_at > %s"
        moment = self.change.at + timedelta(seconds=seconds + TICKS)
        self.scene.wait_until(
            lambda: self.scene.rows(ticked, [str(worker.pid), moment]), "the worker has looked", watched=worker
        )


@pytest.fixture(scope="module")
def server(public_directory: Path) -> Iterator[tuple[postgres.Server, Clock]]:
    """A server, and its clock."""
    clock = Clock(public_directory / "clock")
    with server_with(clock, public_directory) as server:
        yield server, clock


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.long] * (name != SHORT)) for name in CHANGES])
def change(request: pytest.FixtureRequest, settings: Any) -> Change:
    """A change of the clocks in the project's time zone."""
    change = CHANGES[request.param]
    settings.USE_TZ, settings.TIME_ZONE = False, change.zone
    return change


@pytest.fixture(scope="module")
def nursery_in() -> Iterator[Callable[[str], Nursery]]:
    """Return a function that gives the nursery of a project in a time zone."""
    with ExitStack() as stack:
        settings = "tests.conditions.settings"
        yield cache(lambda zone: stack.enter_context(Nursery(settings, environment={"KFS_TESTS_TIME_ZONE": zone})))


@pytest.fixture
def place(
    server: tuple[postgres.Server, Clock], change: Change, nursery_in: Callable[[str], Nursery], scene_on: SceneOn
) -> Iterator[Place]:
    """A place in that time zone."""
    running, clock = server
    clock.set(change.at - timedelta(hours=1))
    with scene_on(running, nursery_in(change.zone)) as scene:
        assert scene.value("SHOW timezone") == change.zone
        yield Place(scene, change, clock)


def test_it_is_another_hour_on_the_wall(place: Place) -> None:
    """Else the others here could not fail."""
    offset = "SELECT extract(timezone FROM now())"
    place.go_to(-30)
    before = place.scene.value(offset)
    place.go_to(30)
    assert abs(place.scene.value(offset) - before) == HOUR
    hours = "SELECT extract(epoch FROM now() - (now() - interval '1 day'))"
    assert place.scene.value(hours) in (23 * HOUR, 25 * HOUR)


@both_ways
def test_a_lease_that_crosses_it(place: Place) -> None:
    """It holds until its time is up, and no longer."""
    scene = place.scene
    scene.leave_only(SOURCES)
    place.go_to(-400)
    with scene.gate(BEFORE_PUT) as gate:
        dead = scene.start(BATCH_SIZE=SOURCES, LEASE=600)
        gate.wait()
        dead.kill()
    leases = "SELECT id, lease_token, lease_expires_at FROM source_credential_backfills ORDER BY id"
    before = scene.rows(leases)
    assert len(before) == SOURCES
    place.go_to(50)
    other = scene.start("--watch", BATCH_SIZE=SOURCES, LEASE=600)
    place.wait_for_a_look(other, 50)
    assert scene.rows(leases) == before
    place.go_to(250)
    scene.wait_until(partial(scene.has_moved, SOURCES), "what the dead one held is moved", watched=other)
    other.send(signal.SIGTERM)
    assert other.wait() in (CLEAN, NOT_FINISHED), other.printed
    scene.check_always()


@both_ways
def test_a_grace_and_an_erasure_that_cross_it(place: Place) -> None:
    """What is retired is erased when the grace is over, and what is being erased when the lease is."""
    scene = place.scene
    stage = Stage(scene, SOURCES)
    stage.orphans()
    states = f"SELECT state, count(*) FROM {LEDGER} GROUP BY state"
    place.go_to(-400)
    with scene.gate(BEFORE_DELETE) as gate:
        eraser = scene.start_cleanup("--watch", ERASE_GRACE=100, LEASE=300)
        scene.wait_until(lambda: dict(scene.rows(states)).get("retired") == AT_ONCE, "they are retired", watched=eraser)
        place.go_to(-200)
        gate.wait()
        eraser.kill()
    assert dict(scene.rows(states)) == {"active": SOURCES - AT_ONCE, "deleting": AT_ONCE}
    revoked = [stage.sources.pop()[:2] for _ in range(AT_ONCE)]
    stage.values.update(dict.fromkeys(revoked))
    calls = [("revoke_credentials", {"tenant": tenant, "source_id": source}) for tenant, source in revoked]
    scene.call(*calls, ERASE_GRACE=300)
    place.go_to(30)
    other = scene.start_cleanup("--watch", LEASE=300)
    place.wait_for_a_look(other, 30)
    assert dict(scene.rows(states)) == {"active": SOURCES - 2 * AT_ONCE, "deleting": AT_ONCE, "retired": AT_ONCE}
    place.go_to(250)
    final = f"SELECT FROM {LEDGER} WHERE state = 'deleted' AND next_delete_at IS NULL"
    scene.wait_until(lambda: len(scene.rows(final)) == 2 * AT_ONCE, "all are erased", watched=other)
    other.send(signal.SIGTERM)
    assert other.wait() in (CLEAN, NOT_FINISHED), other.printed
    stage.check()


def test_what_takes_longer_than_a_day(place: Place, kfs_settings: Any) -> None:
    """The days on the wall are of 23 or 25 hours; ours are not."""
    kfs_settings(RECOVER_AFTER=2 * DAY, ERASE_GRACE=DAY, LATE_WRITE_HORIZON=3 * DAY)
    place.go_to(-12 * HOUR)
    backfill = Backfill(using=ALIAS, store=place.scene.store, worker="tests", lease=2 * DAY)
    batch = backfill.discover(2)
    assert batch is not None
    lengths = (
        "SELECT DISTINCT extract(epoch FROM job.lease_expires_at - job.heartbeat_at)::float, "
        "extract(epoch FROM ledger.recover_after - ledger.created_at)::float FROM source_credential_backfills job "
        f"JOIN {LEDGER} ledger ON ledger.credential_ref = job.candidate_credential_ref"
    )
    assert place.scene.rows(lengths) == [(2 * DAY, 2 * DAY)]
    backfill.start_put(batch)
    backfill.finish_put(batch)
    backfill.settle(batch)
    place.scene.execute("DELETE FROM sources WHERE id = %s", [batch.items[0].source_id])
    cleanup = Cleanup(using=ALIAS, worker="tests", lease=DAY)
    sweep(cleanup)
    grace = f"SELECT extract(epoch FROM next_delete_at - updated_at)::float FROM {LEDGER} WHERE state = 'retired'"
    assert place.scene.rows(grace) == [(DAY,)]


def test_on_the_day_after_it_rounds_and_retention_are_as_on_any_other(place: Place, kfs_settings: Any) -> None:
    kfs_settings(LEDGER_RETENTION=DAY, EVENT_RETENTION=DAY)
    place.go_to(12 * HOUR)
    scene, cleanup = place.scene, Cleanup(using=ALIAS, worker="tests", lease=60.0)
    sweep(cleanup)
    patrol(cleanup)
    covers = "UPDATE kfs_credentials_round SET covers_until = now() - make_interval(secs => %s) WHERE name = 'sweep'"
    scene.execute(covers, [50])
    assert cleanup.begin_sweep(every=60) is None
    scene.execute(covers, [70])
    assert cleanup.begin_sweep(every=60) is not None
    final = """
        WITH made AS (SELECT gen_random_uuid() AS id, now() - make_interval(secs => %s) AS moment)
        INSERT INTO source_secret_lifecycle_refs (id, tenant_id, knowledge_space_id, source_id, credential_ref,
          operation_id, purpose, state, recover_after, delete_attempts, row_version, created_at, updated_at, deleted_at)
        SELECT id, 'tests', id, id, 'source-secret:v1:' || id, id, 'create', 'deleted', moment, 0, 0, moment, moment,
          moment FROM made"""
    event = """
        INSERT INTO kfs_credentials_event (created_at, kind, actor)
        VALUES (now() - make_interval(secs => %s), 'paused', 'tests')"""
    for seconds, gone in ((DAY - 600, 0), (DAY + 600, 1)):
        scene.execute("DELETE FROM kfs_credentials_event")
        scene.execute(final, [seconds])
        scene.execute(event, [seconds])
        assert cleanup.purge_events(1) == gone
        assert cleanup.purge(10) == gone


def test_ages_and_times_ahead(place: Place) -> None:
    scene = place.scene
    scene.leave_only(1)
    place.go_to(-HOUR / 2)
    backfill = Backfill(using=ALIAS, store=scene.store, worker="tests", lease=60.0)
    batch = backfill.discover(1)
    assert batch is not None
    backfill.release(batch)
    cleanup = Cleanup(using=ALIAS, worker="tests", lease=60.0)
    sweep(cleanup)
    scene.execute(f"UPDATE {LEDGER} SET state = 'retired', next_delete_at = now() + interval '2 hours'")
    place.go_to(HOUR / 2)
    status = read_status(ALIAS)
    a_while = pytest.approx(HOUR, abs=300)
    assert status.backfills["oldest_queued_seconds"] == a_while
    assert status.ages["backfills"]["queued"] == a_while
    assert status.rounds["last_sweep_seconds"] == a_while
    _, ahead = read_cleanup_left(ALIAS)
    assert ahead == a_while

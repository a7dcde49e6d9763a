"""The database's own time limits are short, and the store is slow: no transaction waits for it, and nothing is lost."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable
from functools import partial

import pytest

from tests.crashes.scene import CLEAN, NOT_FINISHED, Scene
from tests.crashes.stage import AT_ONCE, LEDGER, Stage
from tests.crashes.stores import BEFORE_DELETE, BEFORE_PUT, BEFORE_REPLACE
from tests.crashes.workers import Worker

SOURCES = 12
LIMITS = {
    "idle_in_transaction_session_timeout": "1s",
    "idle_session_timeout": "2s",
    "lock_timeout": "1ms",
    "statement_timeout": "10s",
}
LONG = 15.0
"""Seconds for which no transaction is idle, however busy the machine is; its own limit would end it after 30."""
MANY = 120
MOST = 60
"""So many rows can be written by one statement, at 5 ms each, before its time is up."""
BACKFILL, CLEANUP, REENCRYPTION, CREATE, ROTATE = "backfill", "cleanup", "reencryption", "create", "rotate"

Start = Callable[[Stage, str], Worker]


def backfill(stage: Stage, space: str) -> Worker:
    """Start a backfill, with something to move."""
    tenant = stage.sources[0][0]
    for one in (space, *stage.scene.new_spaces(tenant, 1)):
        made = stage.scene.new_legacy_sources(one, AT_ONCE)
        stage.values |= {(tenant, source): {"token": source} for source in made}
    return stage.scene.start()


def cleanup(stage: Stage, _: str) -> Worker:
    """Start a cleanup, with something to erase."""
    stage.orphans()
    return stage.scene.start_cleanup()


def reencryption(stage: Stage, _: str) -> Worker:
    """Start a change of the key."""
    stage.scene.keys.insert(0, secrets.token_bytes(32).hex())
    return stage.scene.start_reencryption()


def create(stage: Stage, space: str) -> Worker:
    """Start an application that makes a source in that space, and then one elsewhere."""
    tenant = stage.sources[0][0]
    made = {"tenant": tenant, "type": "web", "name": "n", "uri": "u", "credentials": {"token": "new"}}
    (other,) = stage.scene.new_spaces(tenant, 1)
    return stage.scene.start_application(*[("create_source", {**made, "space_id": one}) for one in (space, other)])


def rotate(stage: Stage, space: str) -> Worker:
    """Start an application that rotates the credentials of a source in that space, and then of another one."""
    ((source,),) = stage.scene.rows("SELECT id::text FROM sources WHERE knowledge_space_id = %s LIMIT 1", [space])
    ((other,),) = stage.scene.rows("SELECT id::text FROM sources WHERE knowledge_space_id <> %s LIMIT 1", [space])
    tenants = {source: tenant for tenant, source, _ in stage.sources}
    stage.values[tenants[other], other] = {"token": "new"}
    return stage.scene.start_application(stage.rotation(tenants[source], source), stage.rotation(tenants[other], other))


def is_ended(scene: Scene, worker: Worker) -> bool:
    """Return whether a process has no session any more; fail if one of its transactions has waited for something."""
    query = (
        "SELECT state, clock_timestamp() - state_change > make_interval(secs => %s) FROM pg_stat_activity "
        "WHERE application_name = %s"
    )
    sessions = scene.rows(query, [LONG, worker.name])
    assert ("idle in transaction", True) not in sessions
    return not sessions


def delete_space(stage: Stage, space: str) -> None:
    """Delete a space with its sources, as somebody who waits for nobody."""
    with stage.scene.session() as session:
        session.execute("SET lock_timeout = '1ms'")
        gone = session.execute("SELECT id::text FROM sources WHERE knowledge_space_id = %s", [space]).fetchall()
        session.execute("DELETE FROM knowledge_spaces WHERE id = %s", [space])
        session.commit()
    stage.values |= {key: None for key in stage.values if (key[1],) in gone}


@pytest.mark.parametrize(
    ("start", "at"),
    [
        (backfill, BEFORE_PUT),
        (cleanup, BEFORE_DELETE),
        (reencryption, BEFORE_REPLACE),
        (create, BEFORE_PUT),
        (rotate, BEFORE_PUT),
    ],
)
def test_a_store_that_takes_longer_than_every_limit(scene: Scene, start: Start, at: str) -> None:
    """No transaction is open meanwhile, and a deletion of the space neither waits nor leaves anything behind."""
    stage = Stage(scene, SOURCES)
    ((space,),) = scene.rows("SELECT knowledge_space_id::text FROM sources GROUP BY 1 ORDER BY count(*) DESC LIMIT 1")
    for name, limit in LIMITS.items():
        scene.configure(f"SET {name} = '{limit}'")
    with scene.gate(at) as gate:
        worker = start(stage, space)
        gate.wait()
        gate.let_others_pass()
        scene.wait_until(lambda: is_ended(scene, worker), "its session was ended for being idle", worker)
        delete_space(stage, space)
    assert worker.wait() == CLEAN, worker.printed
    if start in (create, rotate):
        first, second = worker.answers
        assert first == {"error": "SpaceNotFound" if start is create else "SourceNotFound"}
        assert second["ref"]
    assert scene.attempts() == 0
    assert scene.value(f"SELECT sum(delete_attempts) FROM {LEDGER}") == 0
    for name in LIMITS:
        scene.configure(f"RESET {name}")
    scene.recover()
    if start is reencryption:
        scene.keys.pop()  # it is not needed any more
        scene.check_values(stage.values)
    else:
        stage.check()


def test_a_watch_whose_session_ends_while_it_is_idle(scene: Scene) -> None:
    """It connects anew when it looks again."""
    stage = Stage(scene, SOURCES)
    (space,) = scene.new_spaces(stage.sources[0][0], 1)
    workers = [
        scene.start("--watch", POLL_INTERVAL=2),
        scene.start_cleanup("--watch", POLL_INTERVAL=2, RECOVER_AFTER=1),
    ]
    for worker in workers:
        scene.wait_until_idle(worker)
    scene.configure("SET idle_session_timeout = '200ms'")
    scene.terminate_all()
    for worker in workers:
        scene.wait_until(partial(is_ended, scene, worker), "its session was ended for being idle", worker)
    made = scene.new_legacy_sources(space, AT_ONCE)
    stage.values |= {(stage.sources[0][0], source): {"token": source} for source in made}
    stage.orphans()
    left = "SELECT FROM sources WHERE metadata ? 'credentials'"
    scene.wait_until(lambda: not scene.rows(left), "they are moved", watched=workers[0])
    final = f"SELECT FROM {LEDGER} WHERE state = 'deleted' AND next_delete_at IS NULL"
    scene.wait_until(lambda: len(scene.rows(final)) == AT_ONCE, "they are erased", watched=workers[1])
    for worker in workers:
        worker.send(signal.SIGTERM)
        assert worker.wait() in (CLEAN, NOT_FINISHED), worker.printed
    scene.configure("RESET idle_session_timeout")
    assert scene.attempts() == 0
    scene.recover()
    stage.check()


def sizes(scene: Scene, kinds: str) -> list[int]:
    """Return how many refs one statement has moved, of those that it took."""
    query = f"SELECT count(*) FROM kfs_credentials_event WHERE kind IN ({kinds}) GROUP BY created_at"
    return [size for (size,) in scene.rows(query)]


@pytest.fixture(params=["statement_timeout", "transaction_timeout"])
def limit(request: pytest.FixtureRequest, scene: Scene) -> str:
    """A limit of how long a statement may take, or a transaction."""
    if request.param == "transaction_timeout" and scene.value("SHOW server_version_num") < "170000":
        pytest.skip("PostgreSQL 17 is the first one to have transaction_timeout")
    return str(request.param)


def test_a_cleanup_whose_statements_take_too_long(scene: Scene, limit: str) -> None:
    """Batches get smaller until they pass."""
    stage = Stage(scene, MANY + AT_ONCE)
    for _ in range(MANY // AT_ONCE):
        stage.orphans()
    scene.slow_down("UPDATE", LEDGER, seconds=0.005)
    scene.configure(f"SET {limit} = '300ms'")
    worker = scene.start_cleanup(BATCH_SIZE=MANY)
    assert worker.wait() == CLEAN, worker.printed
    scene.configure(f"RESET {limit}")
    assert 1 < max(sizes(scene, "'erased'")) <= MOST
    assert scene.value(f"SELECT sum(delete_attempts) FROM {LEDGER}") == 0
    stage.check()


def test_a_change_of_the_key_whose_statements_take_too_long(scene: Scene, limit: str) -> None:
    """Batches get smaller until they pass."""
    stage = Stage(scene, MANY)
    scene.slow_down("UPDATE", "kfs_credentials_secret_object", seconds=0.005)
    scene.configure(f"SET {limit} = '300ms'")
    scene.keys.insert(0, secrets.token_bytes(32).hex())
    worker = scene.start_reencryption(BATCH_SIZE=MANY)
    assert worker.wait() == CLEAN, worker.printed
    scene.configure(f"RESET {limit}")
    under = "SELECT count(*) FROM kfs_credentials_secret_object GROUP BY updated_at"
    assert 1 < max(size for (size,) in scene.rows(under)) <= MOST
    scene.keys.pop()
    scene.check_values(stage.values)

"""A worker that is killed at a known step, each step of its work in turn: the next one finishes what it began."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.crashes.database import NUMBER
from tests.crashes.scene import KINDS, LOOK, Scene
from tests.crashes.stores import AFTER_PUT, BEFORE_PUT, IN_PUT, VISIBLE_AT_GATE

JOBS = "source_credential_backfills"
LEDGER = "source_secret_lifecycle_refs"

# What a worker writes, and how a trigger knows it: event, table, condition.
WRITES = {
    "fail": ("UPDATE", LEDGER, "NEW.state = 'retired' AND NEW.last_error_code = 'SOURCE_SECRET_TOO_LARGE'"),
    "reserve": ("INSERT", JOBS, ""),
    "reserve, the last table": ("INSERT", "kfs_credentials_secret_object", ""),
    "activate": ("UPDATE", "sources", "NEW.credential_ref IS NOT NULL"),
    "activate, the last table": ("UPDATE", JOBS, "NEW.run_state = 'succeeded'"),
    "claim": ("UPDATE", JOBS, "OLD.run_state = 'queued' AND NEW.run_state = 'running'"),
    "refresh": (
        "UPDATE",
        JOBS,
        "OLD.run_state = 'running' AND NEW.candidate_credential_ref <> OLD.candidate_credential_ref",
    ),
}


def prepare(scene: Scene, step: str) -> None:
    """Bring about what has to be there for a step to happen."""
    if step in ("claim", "refresh"):
        # Jobs that wait: what a worker leaves that is stopped before it has put anything.
        with scene.gate(BEFORE_PUT) as gate:
            worker = scene.start()
            gate.wait()
            worker.kill()
        scene.queue_again()
    if step == "refresh":
        # Their candidates were reserved for other values.
        scene.execute(f"UPDATE {JOBS} SET secret_fingerprint = repeat('f', 64) WHERE run_state = 'queued'")


def finish(scene: Scene) -> None:
    """Let another worker do the rest, and a cleanup; everything must be as if nobody had been killed."""
    scene.expire_leases()
    scene.drain()
    scene.check_end()
    scene.recover()
    scene.check_cleaned()
    scene.check_end()


@pytest.mark.long
def test_killed_in_a_statement(scene: Scene) -> None:
    for step, (event, table, condition) in WRITES.items():
        prepare(scene, step)
        with scene.held_up(event, table, condition=condition) as hold_up:
            worker = scene.start()
            backend = hold_up.wait(worker)
            worker.kill()
            hold_up.let_go()
            scene.wait_for_end_of(backend)
        scene.check_always()
        scene.expire_leases()
    finish(scene)


@pytest.mark.parametrize(
    "committed",
    [pytest.param(False, id="rolled back", marks=pytest.mark.long), pytest.param(True, id="committed")],
)
def test_killed_in_the_commit(scene: Scene, committed: bool) -> None:
    """The commit is under way when the worker dies: it may still take place, or not."""
    for step, (event, table, condition) in WRITES.items():
        prepare(scene, step)
        with scene.held_up(event, table, condition=condition, commit=True) as hold_up:
            worker = scene.start()
            backend = hold_up.wait(worker)
            assert scene.value("SELECT query FROM pg_stat_activity WHERE pid = %s", [backend]) == "COMMIT"
            worker.kill()
            if committed:
                hold_up.let_go()
            else:
                scene.terminate(backend)
            scene.wait_for_end_of(backend)
        scene.check_always()
        scene.expire_leases()
    finish(scene)


def test_killed_in_the_put(scene: Scene) -> None:
    for place in (BEFORE_PUT, IN_PUT, AFTER_PUT):
        already = len(list(scene.store.list()))
        with scene.gate(place) as gate:
            worker = scene.start()
            gate.wait()
            put = len(list(scene.store.list())) - already
            # The batch that was killed before is claimed first, in groups of at most half of its twenty.
            assert put == 0 if place == BEFORE_PUT else put >= VISIBLE_AT_GATE
            worker.kill()
        scene.check_always()
        scene.expire_leases()
    finish(scene)
    # What was put by a worker that died is what is in use now: nothing was put a second time.
    assert len(list(scene.store.list())) == KINDS["movable"]


def test_no_transaction_is_open_during_a_put(scene: Scene) -> None:
    """A deletion that comes meanwhile does not wait for the store, and the object stays known."""
    ((space, sources),) = scene.rows(
        "SELECT knowledge_space_id, count(*) FROM sources GROUP BY 1 ORDER BY 2 DESC LIMIT 1"
    )
    with scene.gate(IN_PUT) as gate:
        worker = scene.start(BATCH_SIZE=500)
        gate.wait()
        states = scene.rows(
            "SELECT state, xact_start IS NULL FROM pg_stat_activity WHERE application_name = %s", [worker.name]
        )
        assert states == [("idle", True)]
        # If this waited, it would for ever: the gate is opened after it.
        scene.execute("DELETE FROM knowledge_spaces WHERE id = %s", [space])
    assert worker.wait() == LOOK, worker.printed
    scene.check_always()
    assert scene.value("SELECT count(*) FROM sources") == NUMBER - sources
    # Their jobs went with them; what was reserved for them is known, and when it will be given up.
    left = scene.rows(
        f"SELECT DISTINCT state, recover_after < now() FROM {LEDGER} WHERE knowledge_space_id = %s", [space]
    )
    assert left == [("candidate", False)]


def test_killed_while_it_waits_for_a_row(scene: Scene) -> None:
    with ExitStack() as stack:
        gate = stack.enter_context(scene.gate(AFTER_PUT))
        worker = scene.start()
        gate.wait()
        session = stack.enter_context(scene.session())
        session.execute(f"SELECT FROM {LEDGER} FOR UPDATE")
        gate.open()
        backend = scene.wait_for_lock(worker)
        worker.kill()
        session.rollback()
        scene.wait_for_end_of(backend)
    scene.check_always()
    finish(scene)

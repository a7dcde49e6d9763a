"""A row that kills whoever works on it: it is found, it alone is blamed, and it holds up nobody else."""

from __future__ import annotations

import signal
from uuid import UUID

import pytest

from tests.crashes.scene import CLEAN, LOOK, Scene
from tests.crashes.stores import BEFORE_PUT

SOURCES = 60
ATTEMPTS = 3
POISON = "made-up-poison"


def make_poison(scene: Scene, number: int) -> list[UUID]:
    """Let the credentials of some sources in the middle kill their worker; return the ids."""
    return [
        source
        for (source,) in scene.rows(
            "UPDATE sources SET metadata = jsonb_set(metadata, '{credentials}', %s::jsonb) WHERE id IN ("
            "SELECT id FROM sources WHERE jsonb_typeof(metadata -> 'credentials') = 'object' "
            "ORDER BY id OFFSET 25 LIMIT %s) RETURNING id",
            [f'{{"token": "{POISON}"}}', number],
        )
    ]


def run_until_it_ends_by_itself(scene: Scene, **settings: object) -> int:
    """Start workers, as a supervisor does, until one is not killed; return how many were."""
    for deaths in range(100):
        worker = scene.start(poison=POISON, MAX_ATTEMPTS=ATTEMPTS, **settings)
        if (code := worker.wait()) != -signal.SIGKILL:
            assert code == LOOK, worker.printed
            return deaths
        scene.expire_leases()
    pytest.fail("the poison was not found")


@pytest.mark.parametrize(("size", "number"), [(1, 1), (20, 2), (500, 1)])
def test_the_row_that_kills_its_worker_fails_alone(scene: Scene, size: int, number: int) -> None:
    scene.leave_only(SOURCES)
    poisoned = make_poison(scene, number)
    deaths = run_until_it_ends_by_itself(scene, BATCH_SIZE=size)

    # In halves until it is alone, and then so many times.
    assert deaths <= number * (size.bit_length() + ATTEMPTS + 1)
    blamed = scene.rows(
        "SELECT job.source_id, job.retry_count, job.last_error_code, ledger.state, "
        "src.metadata #>> '{credentials,token}' FROM source_credential_backfills job "
        "JOIN sources src ON src.id = job.source_id "
        "JOIN source_secret_lifecycle_refs ledger ON ledger.credential_ref = job.candidate_credential_ref "
        "WHERE job.retry_count > 0 OR job.run_state = 'failed'"
    )
    assert sorted(blamed) == sorted(
        (source, ATTEMPTS, "SOURCE_CREDENTIAL_WORKER_LOST", "retired", POISON) for source in poisoned
    )
    assert scene.states() == {"succeeded": SOURCES - number, "failed": number}
    scene.check_always()


@pytest.mark.parametrize("claimed", [False, True], ids=["discovered", "claimed"])
def test_who_is_alone_beside_another_batch_is_not_alone(scene: Scene, claimed: bool) -> None:
    """Three rows in batches of two: when the worker dies, nobody knows which of the three it was."""
    scene.leave_only(3)
    die_with_two_batches(scene)
    if claimed:
        scene.queue_again()
        die_with_two_batches(scene)
    scene.expire_leases()
    assert scene.start().wait() == CLEAN
    assert scene.states() == {"succeeded": 3}
    assert scene.attempts() == 0


def die_with_two_batches(scene: Scene) -> None:
    with scene.gate(BEFORE_PUT) as gate:
        worker = scene.start(BATCH_SIZE=2)
        gate.wait()
        scene.wait_for_the_store(worker)
        worker.kill()
    assert scene.states() == {"running": 3}

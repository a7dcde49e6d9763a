"""No error takes a value along out of what operators run: re-encryption, verification, settling, cleanup and repair."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from kfs_credentials.cleanup import Cleanup
from kfs_credentials.in_clear import Settled, Verdict, compared, keep_plaintext, keep_ref, read, scrub_same, wrap
from kfs_credentials.models import KnowledgeSpace, RefState, SecretObject, Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.reencryption import Outcome, Reencryption
from kfs_credentials.reencryption_worker import ReencryptionWorker
from kfs_credentials.ref_operations import restore
from kfs_credentials.repairs import Repair
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.verification.run import Run as Verification
from tests.cleanup.rows import add_secret
from tests.cleanup.runs import erase_all, patrol, sweep
from tests.cleanup.workers import new_worker
from tests.factories import SourceFactory
from tests.keys import NEW
from tests.leaks.canary import CANARY, CREDENTIALS, OTHER_CANARY
from tests.leaks.frames import Run, leaks_at_each_line
from tests.leaks.saved import Saved
from tests.ref_scenes import rows as of_refs
from tests.services.conftest import create, execute, rotate

pytestmark = pytest.mark.django_db(transaction=True)

OTHER = {"access_token": OTHER_CANARY}
Change = Callable[..., None]


def beside(source: Source, value: Any) -> None:
    """Let an old writer bring credentials back, whatever they are."""
    execute(f"""UPDATE sources SET metadata = '{json.dumps({"credentials": value})}' WHERE id = '{source.pk}'""")


def ref_of(source: Source) -> str:
    ref = Source.objects.values_list("credential_ref", flat=True).get(pk=source.pk)
    assert ref is not None
    return ref


class World:
    """Sources of every kind that an operator has to do with, and the steps of those who work for one."""

    def __init__(self, space: KnowledgeSpace, store: EncryptedStore) -> None:
        self.store = store
        names = ("same", "different", "retired", "claimed", "unknown", "older", "plain")
        self.sources = {name: create(space, CREDENTIALS, name=name) for name in names}
        self.refs = {name: ref_of(source) for name, source in self.sources.items()}
        beside(self.sources["same"], CREDENTIALS)
        beside(self.sources["different"], OTHER)
        self.array = SourceFactory.create(knowledge_space=space, metadata={"credentials": [CANARY]})
        self.newer = ref_of(rotate(self.sources["older"], OTHER))
        ledger = LedgerRow.objects
        for name in ("retired", "claimed"):
            ledger.filter(credential_ref=self.refs[name]).update(state=RefState.RETIRED)
        ledger.filter(credential_ref=self.refs["claimed"]).update(delete_attempts=1)
        ledger.filter(credential_ref=self.refs["unknown"]).delete()
        SecretObject.objects.filter(pk=self.refs["unknown"]).delete()
        execute(f"UPDATE sources SET credential_ref = '{self.refs['older']}' WHERE name = 'older'")
        for _ in range(2):
            add_secret(store)  # due for erasure

    @property
    def cleanup(self) -> Cleanup:
        return Cleanup(using="default", worker="tests", lease=60.0)


@pytest.fixture
def world(space: KnowledgeSpace, store: EncryptedStore, kfs_settings: Change) -> World:
    kfs_settings(ERASE_GRACE=0, LATE_WRITE_HORIZON=0)
    return World(space, store)


@pytest.fixture
def saved(world: World, secrets_directory: Path) -> Iterator[Saved]:
    with Saved.now(secrets_directory) as saved:
        yield saved


def rescue(world: World) -> Run:
    return expected(Repair.RESCUED, lambda: world.cleanup.repair(world.refs["claimed"]))


def register(world: World) -> Run:
    return expected(Repair.REGISTERED, lambda: world.cleanup.repair(world.refs["unknown"]))


def reinstate(world: World) -> Run:
    return expected(Repair.REINSTATED, lambda: world.cleanup.repair(world.refs["older"]))


def restore_what_was_displaced(world: World) -> Run:
    assert world.cleanup.repair(world.refs["older"]) is Repair.REINSTATED
    return expected(1, lambda: restore("default", of_refs(world.newer)).done)


def scrub_what_is_the_same(world: World) -> Run:
    def run() -> object:
        found = list(compared("default", [source.pk for source in world.sources.values()]))
        return scrub_same("default", [one for one, verdict in found if verdict is Verdict.SAME])

    return expected({world.sources["same"].pk}, run)


def settle_for_the_ref(world: World) -> Run:
    ((found,),) = read("default", [world.sources["different"].pk])
    return expected(Settled.DONE, lambda: keep_ref("default", found))


def settle_for_the_plaintext(world: World) -> Run:
    ((found,),) = read("default", [world.sources["different"].pk])
    return expected(Settled.DONE, lambda: keep_plaintext("default", found))


def wrap_an_array(world: World) -> Run:
    ((found,),) = read("default", [world.array.pk])
    return expected(Settled.DONE, lambda: wrap("default", found, "token"))


def verify(world: World) -> Run:
    verification = Verification("default", deep=True, scrub=True)

    def run() -> bool:
        verification.run()
        return verification.reading.read > 1 and verification.listing.seen > 1

    return expected(True, run)


def erase(world: World) -> Run:
    return expected(True, lambda: sum(erase_all(world.cleanup).values()) > 1)


def sweep_and_patrol(world: World) -> Run:
    def run() -> bool:
        sweep(world.cleanup)
        return patrol(world.cleanup).found is not None

    return expected(True, run)


def run_a_cleanup(world: World) -> Run:
    worker = new_worker(world.cleanup, due_only=True)
    return worker.run


def expected(result: object, run: Run) -> Run:
    """Return what is to be run, so that it tells if it does not do what it is there for."""

    def check() -> None:
        assert run() == result

    return check


STEPS: dict[Callable[[World], Run], list[str]] = {
    rescue: ["repairs.py", "ledger.py"],
    register: ["repairs.py"],
    reinstate: ["repairs.py"],
    restore_what_was_displaced: ["ref_operations.py"],
    scrub_what_is_the_same: ["in_clear.py", "operations.py"],
    settle_for_the_ref: ["in_clear.py"],
    settle_for_the_plaintext: ["in_clear.py"],
    wrap_an_array: ["in_clear.py", "batch.py"],
    verify: ["verification/deep.py", "verification/objects.py", "verification/run.py"],
    erase: ["cleanup.py"],
    sweep_and_patrol: ["cleanup.py"],
    run_a_cleanup: ["cleanup_worker.py"],
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_whatever_happens_at_whatever_line(
    step: Callable[[World], Run], world: World, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare() -> Run:
        saved.restore()
        return step(world)

    leaks_at_each_line(prepare, STEPS[step], caplog)


def test_whatever_happens_at_whatever_line_of_a_re_encryption(
    world: World, saved: Saved, settings: Settings, kfs_settings: Change, caplog: pytest.LogCaptureFixture
) -> None:
    kfs_settings(KEYS=[NEW, *settings.KFS_CREDENTIALS["KEYS"]])

    def prepare() -> Run:
        saved.restore()
        steps = Reencryption(using="default", worker="tests", lease=60.0, by="tests")
        worker = ReencryptionWorker(steps, batch_size=10)
        return expected(True, lambda: worker.run().outcomes[Outcome.REWRITTEN] > 1)

    leaks_at_each_line(prepare, ["reencryption.py", "reencryption_worker.py"], caplog)

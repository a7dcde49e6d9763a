"""No error takes a value along out of what operators run: re-encryption, verification, settling, cleanup and repair."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from pytest_django import Settings

import kfs_credentials
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
from tests.cleanup.workers import new_worker
from tests.factories import SourceFactory
from tests.keys import NEW
from tests.leaks.canary import CANARY, CREDENTIALS, OTHER_CANARY
from tests.leaks.frames import Run, Watcher, leaks_at_each_line
from tests.leaks.saved import Saved
from tests.ref_scenes import rows as of_refs
from tests.services.conftest import create, execute, rotate

pytestmark = pytest.mark.django_db(transaction=True)

FOLDER = Path(kfs_credentials.__file__).parent
COMMANDS = [str(path.relative_to(FOLDER)) for path in FOLDER.rglob("management/**/*.py")]
BESIDE_COMMANDS = [
    *("actor.py", "audit.py", "conf.py", "moments.py", "pause.py", "receivers.py", "selection.py", "status.py"),
    *("ticks.py", "verification/findings.py", "verification/leftovers.py", "verification/reading.py"),
]
LOOK = 3
"""The exit code of commands that leave something for a person."""
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


def expected(result: object, run: Run) -> Run:
    """Return what is to be run, so that it tells if it does not do what it is there for."""

    def check() -> None:
        assert run() == result

    return check


STEPS: dict[Callable[[World], Run], list[str]] = {
    rescue: ["repairs.py"],
    register: ["repairs.py"],
    scrub_what_is_the_same: ["in_clear.py", "operations.py"],
    settle_for_the_ref: ["in_clear.py"],
    settle_for_the_plaintext: ["in_clear.py"],
    wrap_an_array: ["in_clear.py", "batch.py"],
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_whatever_happens_at_whatever_line(
    step: Callable[[World], Run], world: World, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare() -> Run:
        saved.restore()
        return step(world)

    leaks_at_each_line(prepare, STEPS[step], caplog)


# What only passes values by, in wrappers, or has none at all: nothing can be reached from a variable at any line.


def verify(world: World) -> Run:
    def run() -> None:
        verification = Verification("default", deep=True, scrub=True)
        verification.run()
        assert verification.reading.read > 1
        assert verification.listing.seen > 1

    return run


def run_a_cleanup(world: World) -> Run:
    def run() -> None:
        summary = new_worker(world.cleanup, due_only=True).run()
        assert summary.repairs == {Repair.RESCUED: 1, Repair.REINSTATED: 2, Repair.REGISTERED: 1}
        assert summary.outcomes.total() > 1

    return run


def reencrypt(world: World) -> Run:
    def run() -> None:
        steps = Reencryption(using="default", worker="tests", lease=60.0, by="tests")
        assert ReencryptionWorker(steps, batch_size=10).run().outcomes[Outcome.REWRITTEN] > 1

    return run


def restore_what_was_displaced(world: World) -> Run:
    assert world.cleanup.repair(world.refs["older"]) is Repair.REINSTATED
    return expected(1, lambda: restore("default", of_refs(world.newer)).done)


def run_all_commands(world: World) -> Run:
    for file in COMMANDS:
        import_module("kfs_credentials." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))

    def run() -> None:
        codes = dict[str, Any]()
        for command, *arguments in (
            ["run_credential_backfill"],
            ["run_secret_cleanup"],
            ["reencrypt_secrets"],
            ["verify_credentials", "--deep", "--scrub-same", "--yes"],
            ["credential_status"],
            ["retry_credential_backfill", "--all"],
            ["settle_credential_conflict", "--source", str(world.sources["different"].pk), "--keep", "ref", "--yes"],
            ["settle_unsupported_credentials", str(world.array.pk), "--wrap", "token"],
            ["pause_credential_workers", "--reason", "tests"],
            ["resume_credential_workers"],
            ["bind_secret_store"],
        ):
            try:
                call_command(command, *arguments)
            except SystemExit as end:
                codes[command] = end.code
        assert codes == dict.fromkeys(["run_credential_backfill", "run_secret_cleanup", "verify_credentials"], LOOK)
        assert not Source.objects.unsupported().exists()

    return run


WITHOUT_VALUES: dict[Callable[[World], Run], list[str]] = {
    verify: ["verification/deep.py", "verification/objects.py", "verification/database.py", "verification/run.py"],
    run_a_cleanup: ["cleanup.py", "cleanup_worker.py", "repairs.py", "ledger.py", "worker.py", "leases.py"],
    restore_what_was_displaced: ["ref_operations.py", "ledger.py"],
    run_all_commands: [*COMMANDS, *BESIDE_COMMANDS],
    reencrypt: ["reencryption.py", "reencryption_worker.py", "keys.py", "binding.py"],
}


@pytest.mark.parametrize("step", WITHOUT_VALUES, ids=lambda step: step.__name__)
def test_there_is_no_value_at_any_line(
    step: Callable[[World], Run], world: World, settings: Settings, kfs_settings: Change
) -> None:
    if step is reencrypt:
        kfs_settings(KEYS=[NEW, *settings.KFS_CREDENTIALS["KEYS"]])
    run = step(world)
    with Watcher(WITHOUT_VALUES[step]) as watcher:
        run()
    assert watcher.leaks == set()
    assert len(watcher.lines) > 50


def test_the_watcher_sees_what_it_has_to(world: World) -> None:
    """So that the test above means something: where values are worked on, it finds them."""
    run = wrap_an_array(world)
    with Watcher(["in_clear.py"]) as watcher:
        run()
    assert any(leak.endswith(", text") for leak in watcher.leaks)

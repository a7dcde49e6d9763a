"""Every move of a ref has its event, in the same transaction: what the events say is compared with what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from kfs_credentials import services
from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Batch, Move
from kfs_credentials.cleanup import Cleanup, Outcome
from kfs_credentials.crypto import new_ref
from kfs_credentials.errors import SecretRetained, SecretStoreError, StoreUnavailable
from kfs_credentials.models import EventKind, RefState, Source, SourceCredentialBackfill
from kfs_credentials.operations import retry_failed_jobs
from kfs_credentials.ref_operations import abandon, discard, erase_again, restore
from kfs_credentials.repairs import Repair
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import (
    add_ref,
    add_secret,
    bare_source,
    in_database,
    make_source,
    name_ref,
    pass_horizon,
    put_late,
    ref_of,
    scope_of,
)
from tests.cleanup.runs import claim, erase, patrol, sweep
from tests.factories import SourceFactory
from tests.move_history import OF_REFS, History, noted
from tests.ref_scenes import displaced, out_of_use, parked, rotated, rows, unreadable

pytestmark = pytest.mark.django_db(transaction=True)

TENANT = "tenant-a"
NEW = {"token": "made-up-new"}


class Scene(NamedTuple):
    """What a story is told with."""

    history: History
    store: EncryptedStore
    backfill: Backfill
    cleanup: Cleanup
    settings: Callable[..., None]
    patch: pytest.MonkeyPatch

    def put(self) -> Batch:
        """Lease what is there, and put it."""
        batch = self.backfill.claim(10) or self.backfill.discover(10)
        assert batch is not None
        self.backfill.start_put(batch)
        self.backfill.finish_put(batch)
        return batch

    def answer(self, answer: Any) -> None:
        """Let the store answer this to each erasure."""
        self.patch.setattr(self.store, "_delete_many", lambda addresses, deadline: [answer for _ in addresses])


Story = Callable[[Scene], None]


def created(scene: Scene) -> None:
    with scene.history.watching():
        make_source()


def rotated_twice(scene: Scene) -> None:
    source = make_source()
    with scene.history.watching():
        for _ in range(2):
            services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW)


def revoked(scene: Scene) -> None:
    source = make_source()
    with scene.history.watching():
        for _ in range(2):  # the second time nothing moves
            services.revoke_credentials(tenant=TENANT, source_id=source.pk)


def revoked_while_one_waits(scene: Scene) -> None:
    pair = displaced()
    with scene.history.watching():
        services.revoke_credentials(tenant=TENANT, source_id=pair.source)


def revoked_and_not_known(scene: Scene) -> None:
    source = bare_source()
    name_ref(source, new_ref())
    with scene.history.watching():
        services.revoke_credentials(tenant=TENANT, source_id=source.pk)


def deleted(scene: Scene) -> None:
    source = make_source()
    with scene.history.watching():
        services.delete_source(tenant=TENANT, source_id=source.pk)


def space_deleted(scene: Scene) -> None:
    source = make_source()
    make_source(source.knowledge_space)
    with scene.history.watching():
        services.delete_knowledge_space(tenant=TENANT, space_id=source.knowledge_space_id)


def moved(scene: Scene) -> None:
    SourceFactory.create_batch(3)
    with scene.history.watching():
        assert scene.backfill.settle(scene.put()) == {Move.ACTIVATE: 3}


def refreshed(scene: Scene) -> None:
    scene.settings(RETRY_BASE=0)
    SourceFactory.create_batch(2)
    with scene.history.watching():
        batch = scene.put()
        in_database("UPDATE sources SET metadata = %s", '{"credentials": {"token": "made-up, other"}}')
        assert scene.backfill.settle(batch) == {Move.REFRESH: 2}
        assert scene.backfill.settle(scene.put()) == {Move.ACTIVATE: 2}


def given_up(scene: Scene) -> None:
    SourceFactory.create_batch(2)
    with scene.history.watching():
        batch = scene.put()
        in_database("UPDATE sources SET metadata = '{}'")
        assert scene.backfill.settle(batch) == {Move.ABANDON: 2}


def failed(scene: Scene) -> None:
    scene.settings(MAX_SECRET_BYTES=20)
    SourceFactory.create(credentials={"token": "made-up, and too large"})
    with scene.history.watching():
        assert scene.backfill.settle(scene.put()) == {Move.FAIL: 1}


def failed_and_retried(scene: Scene) -> None:
    scene.settings(MAX_SECRET_BYTES=20)
    SourceFactory.create_batch(2, credentials={"token": "made-up, and too large"})
    scene.backfill.settle(scene.put())
    with scene.history.watching():
        jobs = SourceCredentialBackfill.objects.values_list("pk", flat=True)
        assert retry_failed_jobs("default", [(job, None) for job in jobs]).queued == 2


def failed_and_over(scene: Scene) -> None:
    failed(scene)
    in_database("UPDATE sources SET metadata = '{}'")
    with scene.history.watching():
        jobs = SourceCredentialBackfill.objects.values_list("pk", flat=True)
        assert retry_failed_jobs("default", [(job, None) for job in jobs]).ended == 1


def rejected(scene: Scene) -> None:
    """One row of three that the database refuses is found by halves; what was rolled back has left no event."""
    sources = SourceFactory.create_batch(3)
    in_database(f"ALTER TABLE sources ADD CONSTRAINT kfs_tests CHECK (version < 2 OR id <> '{sources[1].pk}')")
    try:
        with scene.history.watching():
            assert scene.backfill.settle(scene.put()) == {Move.ACTIVATE: 2, Move.FAIL: 1}
    finally:
        in_database("ALTER TABLE sources DROP CONSTRAINT kfs_tests")


def activated_elsewhere(scene: Scene) -> None:
    source = SourceFactory.create()
    with scene.history.watching():
        batch = scene.put()
        name_ref(source, batch.items[0].ref)
        assert scene.backfill.settle(batch) == {Move.ADOPT: 1}


def released(scene: Scene) -> None:
    """Leases come and go: nothing has become of the refs by that."""
    SourceFactory.create()
    batch = scene.put()
    add_secret(scene.store)
    scene.answer(StoreUnavailable("down"))
    with scene.history.watching():
        scene.backfill.release(batch)
        assert erase(scene.cleanup) == {Outcome.RELEASED: 1}
        scene.cleanup.release(claim(scene.cleanup))


def reconciled(scene: Scene) -> None:
    source = bare_source()
    name_ref(source, add_secret(scene.store, source, "staged, unused").credential_ref)
    add_ref(situation="staged, unused")
    with scene.history.watching():
        assert scene.cleanup.reconcile(10) == {"activated": 1, "retired": 1}


def swept(scene: Scene) -> None:
    for _ in range(2):
        make_source()
    in_database("UPDATE sources SET credential_ref = NULL")
    with scene.history.watching():
        assert sweep(scene.cleanup)[0] == 2


def erased_and_confirmed(scene: Scene) -> None:
    add_secret(scene.store)
    add_ref()
    with scene.history.watching():
        assert erase(scene.cleanup) == {Outcome.ERASED: 2}
    pass_horizon()
    with scene.history.watching():
        assert erase(scene.cleanup) == {Outcome.CONFIRMED: 2}


def written_late(scene: Scene) -> None:
    row = add_ref(situation="final")
    put_late(scene.store, row)
    with scene.history.watching():
        patrol(scene.cleanup)
        assert erase(scene.cleanup) == {Outcome.ERASED: 1}


def erasure_failed(scene: Scene) -> None:
    for attempts in (0, 3):
        add_ref(delete_attempts=attempts)
    scene.answer(SecretStoreError("made-up"))
    with scene.history.watching():
        assert erase(scene.cleanup) == {Outcome.RETRY: 2}


def erasure_parked(scene: Scene) -> None:
    add_ref(delete_attempts=25)
    scene.answer(SecretStoreError("made-up"))
    with scene.history.watching():
        assert erase(scene.cleanup) == {Outcome.PARKED: 1}


def parked_by_crashes(scene: Scene) -> None:
    scene.settings(PARK_AFTER=2)
    add_ref(situation="deleting, expired", delete_attempts=1)
    with scene.history.watching():
        scene.cleanup.claim(10)


def retained(scene: Scene) -> None:
    for _ in range(2):
        add_ref()
    scene.answer(SecretRetained())
    with scene.history.watching():
        assert erase(scene.cleanup) == {Outcome.RETAINED: 2}


def held(scene: Scene) -> None:
    for situation in ("retired, due", "deleted, due"):
        source = bare_source()
        name_ref(source, add_ref(source, situation).credential_ref)
    with scene.history.watching():
        scene.cleanup.claim(10)
        scene.cleanup.claim(10)


def held_and_let_go(scene: Scene) -> None:
    row = add_ref(situation="retired", next_delete_at=None)
    with scene.history.watching():
        assert scene.cleanup.repair(row.credential_ref) == Repair.FINE


def brought_back(scene: Scene) -> None:
    pair = rotated()
    with scene.history.watching():
        assert scene.cleanup.repair(pair.named) == Repair.REINSTATED


def rescued(scene: Scene) -> None:
    source = bare_source()
    row = add_secret(scene.store, source, "deleted")
    name_ref(source, row.credential_ref)
    with scene.history.watching():
        assert scene.cleanup.repair(row.credential_ref) == Repair.RESCUED


def registered(scene: Scene) -> None:
    source = make_source()
    in_database("DELETE FROM source_secret_lifecycle_refs")
    with scene.history.watching():
        assert scene.cleanup.repair(ref_of(source)) == Repair.REGISTERED


def found_unreadable(scene: Scene) -> None:
    pair = out_of_use(RefState.DELETED)
    scene.store.delete(scope_of(Source.objects.get(pk=pair.source)), pair.named)
    with scene.history.watching():
        assert scene.cleanup.repair(pair.named) == Repair.UNREADABLE


def asked_again(scene: Scene) -> None:
    chosen = rows(parked(), parked())
    with scene.history.watching():
        assert erase_again("default", chosen).done == 2


def abandoned(scene: Scene) -> None:
    chosen = rows(parked())
    with scene.history.watching():
        assert abandon("default", chosen, by="tests", reason="the bucket is gone").done == 1


def restored(scene: Scene) -> None:
    chosen = rows(displaced().other)
    with scene.history.watching():
        assert restore("default", chosen).done == 1


def restored_while_active(scene: Scene) -> None:
    chosen = rows(unreadable().other)
    with scene.history.watching():
        assert restore("default", chosen).done == 1


def discarded(scene: Scene) -> None:
    chosen = rows(displaced().other)
    with scene.history.watching():
        assert discard("default", chosen).done == 1


def forgotten(scene: Scene) -> None:
    scene.settings(LEDGER_RETENTION=0)
    for _ in range(2):
        add_ref(situation="final")
    patrol(scene.cleanup)
    with scene.history.watching():
        assert scene.cleanup.purge(10) == 2


def looked_at_later(scene: Scene) -> None:
    """A reservation that a live job holds is put off: nothing has become of it."""
    SourceFactory.create()
    batch = scene.put()
    in_database("UPDATE source_secret_lifecycle_refs SET recover_after = now()")
    with scene.history.watching():
        assert scene.cleanup.reconcile(10) == {"kept": 1}
    assert batch.items


STORIES: dict[Story, dict[EventKind, int]] = {
    created: {EventKind.RESERVED: 1, EventKind.ACTIVATED: 1},
    rotated_twice: {EventKind.RESERVED: 2, EventKind.ACTIVATED: 2, EventKind.RETIRED: 2},
    revoked: {EventKind.RETIRED: 1},
    revoked_while_one_waits: {EventKind.RETIRED: 2},
    revoked_and_not_known: {EventKind.ADOPTED: 1, EventKind.RETIRED: 1},
    deleted: {EventKind.RETIRED: 1},
    space_deleted: {EventKind.RETIRED: 2},
    moved: {EventKind.RESERVED: 3, EventKind.ACTIVATED: 3},
    refreshed: {EventKind.RESERVED: 4, EventKind.RETIRED: 2, EventKind.ACTIVATED: 2},
    given_up: {EventKind.RESERVED: 2, EventKind.RETIRED: 2},
    failed: {EventKind.RESERVED: 1, EventKind.RETIRED: 1, EventKind.JOB_FAILED: 1},
    failed_and_retried: {EventKind.RESERVED: 2, EventKind.JOB_RETRIED: 2},
    failed_and_over: {EventKind.RESERVED: 1, EventKind.RETIRED: 1, EventKind.JOB_FAILED: 1},
    rejected: {EventKind.RESERVED: 3, EventKind.ACTIVATED: 2, EventKind.RETIRED: 1, EventKind.JOB_FAILED: 1},
    activated_elsewhere: {EventKind.RESERVED: 1, EventKind.ACTIVATED: 1},
    released: {},
    reconciled: {EventKind.ACTIVATED: 1, EventKind.RETIRED: 1},
    swept: {EventKind.RETIRED: 2},
    erased_and_confirmed: {EventKind.ERASED: 2, EventKind.CONFIRMED: 2},
    written_late: {EventKind.LATE_WRITE: 1, EventKind.ERASED: 1},
    erasure_failed: {EventKind.ERASURE_FAILED: 2},
    erasure_parked: {EventKind.PARKED: 1},
    parked_by_crashes: {EventKind.PARKED: 1},
    retained: {EventKind.RETAINED: 2},
    held: {EventKind.HELD: 2},
    held_and_let_go: {EventKind.RETIRED: 1},
    brought_back: {EventKind.REINSTATED: 1, EventKind.DISPLACED: 1},
    rescued: {EventKind.RESERVED: 1, EventKind.RESCUED: 1},
    registered: {EventKind.ADOPTED: 1},
    found_unreadable: {EventKind.UNREADABLE: 1},
    asked_again: {EventKind.ERASE_AGAIN: 2},
    abandoned: {EventKind.ABANDONED: 1},
    restored: {EventKind.RESTORED: 1, EventKind.RETIRED: 1},
    restored_while_active: {EventKind.RESTORED: 1, EventKind.RETIRED: 1},
    discarded: {EventKind.DISCARDED: 1},
    forgotten: {EventKind.FORGOTTEN: 2},
    looked_at_later: {},
}


@pytest.fixture
def scene(
    store: EncryptedStore, kfs_settings: Any, monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> Iterator[Scene]:
    """A history that notes nothing yet, and whoever moves refs."""
    backfill = Backfill(using="default", store=store, worker="tests", lease=60.0)
    cleanup = Cleanup(using="default", worker="tests", lease=60.0)
    with noted() as history:
        yield Scene(history, store, backfill, cleanup, kfs_settings, monkeypatch)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_every_move_has_its_event_in_the_same_transaction(scene: Scene, story: Story) -> None:
    """What a trigger saw of the ledger is what the events tell: whose ref, what, and why."""
    story(scene)
    assert scene.history.problems() == []
    assert scene.history.kinds() == Counter(STORIES[story])


def test_the_stories_tell_of_every_kind() -> None:
    told = set[EventKind]().union(*STORIES.values())
    assert told >= OF_REFS
    others = {"reencrypted", "scrubbed", "acknowledged", "bound", "paused", "resumed", "key_closed", "key_opened"}
    assert {kind.value for kind in EventKind} - told == others

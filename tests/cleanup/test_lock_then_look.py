"""Lock, then look, in a second statement: what others commit while a row is waited for, or right after it, is seen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connections

from kfs_credentials import services
from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Move
from kfs_credentials.cleanup import Cleanup, Outcome
from kfs_credentials.models import Attention, RefState, SecretObject, Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.repairs import Repair
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.conftest import Other
from tests.cleanup.rows import (
    PAST,
    SECRET,
    add_ref,
    add_secret,
    bare_source,
    make_due,
    make_source,
    name_ref,
    of_ref,
    put_late,
    ref_of,
    reread,
)
from tests.cleanup.runs import Change, NewSteps, claim, delete, erase, sweep
from tests.factories import SourceFactory
from tests.management.commands import dsn
from tests.services.conftest import before_statement, elsewhere, together
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def backfill(store: EncryptedStore, transactional_db: None) -> Backfill:
    """The backfill's steps."""
    return Backfill(using="default", store=store, worker="backfill", lease=60.0)


LOCKED = 'FOR NO KEY UPDATE OF "source_secret_lifecycle_refs" SKIP LOCKED'
# A wait for a row is one for the transaction that holds it, which belongs to no database: only its session does.
SOMEBODY_WAITS = """
SELECT EXISTS (SELECT FROM pg_locks JOIN pg_stat_activity USING (pid)
  WHERE datname = current_database() AND NOT granted)
"""
WRITES_SOURCES = """
SELECT EXISTS (SELECT FROM pg_locks
  WHERE pid = pg_backend_pid() AND mode = 'RowExclusiveLock' AND relation = 'sources'::regclass)
"""


@contextmanager
def after_statement(text: str, act: Callable[[], object], number: int = 1) -> Iterator[None]:
    """Do something once, right after the nth statement of ours that has `text` in it."""
    seen = 0

    def wrapper(execute: Callable[..., Any], sql: str, parameters: Any, many: bool, context: Any) -> Any:
        nonlocal seen
        result = execute(sql, parameters, many, context)
        if text in sql:
            seen += 1
            if seen == number:
                act()
        return result

    with connections["default"].execute_wrapper(wrapper):
        yield
    assert seen >= number, f"{seen} statements have {text!r}"


def held_before_its_commit(work: Callable[[], object], meanwhile: Callable[[], object]) -> Any:
    """Do `work` elsewhere up to its last commit; do something else meanwhile; then let it commit; return its result.

    By then `work` has written and locked everything, and nobody sees it.
    """
    arrived, go_on = threading.Event(), threading.Event()

    def stopping() -> object:
        connection: Any = connections["default"]
        real = connection._commit

        def commit() -> None:
            with connection.cursor() as cursor:
                cursor.execute(WRITES_SOURCES)
                (writes_sources,) = cursor.fetchone()
            if writes_sources:
                arrived.set()
                assert go_on.wait(PATIENCE)
            real()

        connection._commit = commit
        return work()

    def watching() -> None:
        assert arrived.wait(PATIENCE)
        try:
            meanwhile()
        finally:
            go_on.set()

    result, watched = together(stopping, watching)
    for outcome in (result, watched):
        if isinstance(outcome, BaseException):
            raise outcome
    return result


def test_a_rotation_before_its_commit_keeps_both_refs_out_of_the_sweep(steps: Cleanup, new_steps: NewSteps) -> None:
    source = make_source()
    before = ref_of(source)
    rows: list[LedgerRow] = []

    def meanwhile() -> None:
        assert sweep(new_steps(worker="another")) == (0, {})
        rows.extend(LedgerRow.objects.filter(state=RefState.STAGED))

    held_before_its_commit(
        lambda: services.rotate_credentials(tenant="tenant-a", source_id=source.pk, credentials={"token": "x"}),
        meanwhile,
    )
    assert len(rows) == 1, "the sweep came before the commit"
    after = ref_of(source)
    assert after == rows[0].credential_ref
    assert sweep(steps) == (0, {})
    assert [of_ref(ref).state for ref in (before, after)] == [RefState.RETIRED, RefState.ACTIVE]


def test_a_rotation_before_its_commit_is_not_reconciled(new_steps: NewSteps, kfs_settings: Change) -> None:
    kfs_settings(RECOVER_AFTER=0)
    source = make_source()
    seen: list[Any] = []
    held_before_its_commit(
        lambda: services.rotate_credentials(tenant="tenant-a", source_id=source.pk, credentials={"token": "x"}),
        lambda: seen.append(new_steps(worker="another").reconcile(10)),
    )
    assert seen == [{}], "its row is locked, and past recover_after"
    assert of_ref(ref_of(source)).state == RefState.ACTIVE


def test_a_backfill_before_its_commit_is_not_reconciled(
    backfill: Backfill, new_steps: NewSteps, kfs_settings: Change
) -> None:
    kfs_settings(RECOVER_AFTER=0)
    source = SourceFactory.create()
    batch = backfill.discover(10)
    assert batch is not None
    backfill.start_put(batch)
    backfill.finish_put(batch)
    seen: list[Any] = []
    moves = held_before_its_commit(
        lambda: backfill.settle(batch), lambda: seen.append(new_steps(worker="another").reconcile(10))
    )
    assert (moves, seen) == ({Move.ACTIVATE: 1}, [{}])
    assert of_ref(ref_of(source)).state == RefState.ACTIVE


def test_a_source_that_names_an_orphan_right_after_its_lock_keeps_it(steps: Cleanup) -> None:
    source = bare_source()
    row = add_ref(source, "active")
    position = steps.begin_sweep(every=0)
    assert position is not None
    with after_statement(LOCKED, lambda: elsewhere(lambda: name_ref(source, row.credential_ref))):
        assert steps.sweep(position).retired == 0
    assert reread(row).state == RefState.ACTIVE


def test_a_displaced_ref_right_after_its_lock_is_kept(steps: Cleanup) -> None:
    source = bare_source()
    row = add_ref(source, "retired", next_delete_at=None)
    position = steps.begin_sweep(every=0)
    assert position is not None

    def it_is_displaced() -> None:
        SecretObject.objects.filter(pk=row.credential_ref).update(attention=Attention.DISPLACED)

    with after_statement(LOCKED, it_is_displaced):
        assert steps.sweep(position).retired == 0
    assert reread(row).next_delete_at is None


def test_a_source_that_names_a_reservation_right_after_its_lock_uses_it(steps: Cleanup) -> None:
    source = bare_source()
    row = add_ref(source, "staged, unused")
    with after_statement(LOCKED, lambda: elsewhere(lambda: name_ref(source, row.credential_ref))):
        assert steps.reconcile(10) == {"activated": 1}
    assert reread(row).state == RefState.ACTIVE


def test_what_is_used_between_reading_and_reconciling_stays(steps: Cleanup) -> None:
    """The service locks the row, names it and commits, all before this worker's lock is granted."""
    source = bare_source()
    row = add_ref(source, "staged, unused")

    def the_service_activates() -> None:
        name_ref(source, row.credential_ref)
        LedgerRow.objects.filter(pk=row.pk).update(state=RefState.ACTIVE)

    with before_statement("FOR NO KEY UPDATE", lambda: elsewhere(the_service_activates)):
        assert steps.reconcile(10) == {}
    assert reread(row).state == RefState.ACTIVE


def test_a_source_that_names_it_right_after_the_lock_is_seen(steps: Cleanup, store: EncryptedStore) -> None:
    source = bare_source()
    row = add_secret(store, source)
    with after_statement(LOCKED, lambda: elsewhere(lambda: name_ref(source, row.credential_ref)), number=2):
        erasure = claim(steps)
    assert (erasure.items, erasure.in_use) == ([], [row.credential_ref])
    assert steps.repair(row.credential_ref) is Repair.REINSTATED


def test_a_source_that_names_it_after_the_look_loses_no_secret(
    steps: Cleanup, new_steps: NewSteps, store: EncryptedStore
) -> None:
    source = bare_source()
    row = add_secret(store, source)
    claimed = "INSERT INTO kfs_credentials_secret_object"
    with before_statement(claimed, lambda: elsewhere(lambda: name_ref(source, row.credential_ref))):
        erasure = claim(steps)
    assert [item.ref for item in erasure.items] == [row.credential_ref]
    assert sweep(new_steps(worker="another")) == (0, {Repair.RESCUED: 1}), "by a copy, while the object is there"
    delete(steps, erasure)
    assert steps.settle(erasure) == {Outcome.ERASED: 1}
    assert services.resolve_credentials(tenant="tenant-a", source_id=source.pk) == SECRET


def test_the_claim_waits_for_nobody(steps: Cleanup, other: Other) -> None:
    row = add_ref()
    other.execute("UPDATE source_secret_lifecycle_refs SET row_version = row_version + 1")
    assert steps.claim(10) is None
    other.commit()
    assert claim(steps).items[0].ref == row.credential_ref


def test_the_claim_does_not_wait_for_sources(steps: Cleanup, other: Other) -> None:
    source = bare_source()
    named, free = add_ref(source), add_ref()
    name_ref(source, named.credential_ref)
    other.execute("LOCK TABLE sources IN ROW EXCLUSIVE MODE")
    other.execute("SELECT FROM sources FOR UPDATE")
    assert [item.ref for item in claim(steps).items] == [free.credential_ref]


def test_many_workers_at_once_share_the_rows(new_steps: NewSteps) -> None:
    rows = {add_ref().credential_ref for _ in range(60)}
    barrier = threading.Barrier(4, timeout=PATIENCE)

    def work(name: str) -> Callable[[], list[str]]:
        steps = new_steps(worker=name)

        def take() -> list[str]:
            barrier.wait()
            taken = []
            while (erasure := steps.claim(4)) is not None:
                taken += [item.ref for item in erasure.items]
            return taken

        return take

    taken = together(*(work(f"worker-{number}") for number in range(4)))
    # A worker may end while another one still has the last rows locked; no row is left, and none was taken twice.
    assert sorted(ref for part in taken for ref in part) == sorted(rows)
    assert not LedgerRow.objects.retired().exists()


def test_an_erasure_and_a_stale_save_at_once_lose_no_secret(
    steps: Cleanup, new_steps: NewSteps, store: EncryptedStore
) -> None:
    """Whichever comes first, the source has a secret in the end that reads back."""
    for _ in range(5):
        source = bare_source()
        row = add_secret(store, source)
        barrier = threading.Barrier(2, timeout=PATIENCE)

        def take(barrier: threading.Barrier = barrier) -> Any:
            barrier.wait()
            return new_steps(worker="another").claim(10)

        def save(source: Source = source, row: LedgerRow = row, barrier: threading.Barrier = barrier) -> None:
            with psycopg.connect(dsn(), autocommit=True) as session:
                barrier.wait()
                session.execute("UPDATE sources SET credential_ref = %s WHERE id = %s", [row.credential_ref, source.pk])

        erasure, nothing = together(take, save)
        assert nothing is None
        sweep(steps)
        if erasure is not None:
            delete(steps, erasure)
            steps.settle(erasure)
        assert services.resolve_credentials(tenant="tenant-a", source_id=source.pk) == SECRET
        Source.objects.filter(pk=source.pk).delete()


def test_a_settling_waits_for_who_holds_its_rows(steps: Cleanup, store: EncryptedStore, other: Other) -> None:
    """It is its own row: whoever holds it for a moment does not lose the worker its outcome."""
    row = add_secret(store)
    erasure = claim(steps)
    delete(steps, erasure)
    other.execute("SELECT FROM source_secret_lifecycle_refs FOR UPDATE")

    def release_once_somebody_waits() -> None:
        with psycopg.connect(dsn(), autocommit=True) as session:
            until(lambda: session.execute(SOMEBODY_WAITS).fetchone() == (True,), "the settling waits")
        other.rollback()

    settled, _ = together(lambda: steps.settle(erasure), release_once_somebody_waits)
    assert settled == {Outcome.ERASED: 1}
    assert reread(row).state == RefState.DELETED


def test_a_row_that_is_held_for_too_long_is_settled_later(
    steps: Cleanup, store: EncryptedStore, other: Other, kfs_settings: Change
) -> None:
    kfs_settings(LOCK_TIMEOUT=0.05)
    row = add_secret(store)
    erasure = claim(steps)
    delete(steps, erasure)
    other.execute("SELECT FROM source_secret_lifecycle_refs FOR UPDATE")
    with pytest.raises(OperationalError, match="lock timeout"):
        steps.settle(erasure)
    assert reread(row).state == RefState.DELETING
    other.rollback()
    assert steps.settle(erasure) == {Outcome.ERASED: 1}


def test_a_late_activation_of_a_swept_ref_is_brought_back(steps: Cleanup, store: EncryptedStore) -> None:
    """The Node service activates by raw SQL what the sweep has just retired."""
    source = bare_source()
    row = add_ref(source, "active")
    put_late(store, row)
    assert sweep(steps) == (1, {})
    name_ref(source, row.credential_ref)
    LedgerRow.objects.filter(pk=row.pk).update(next_delete_at=PAST)
    assert claim(steps).in_use == [row.credential_ref]
    assert steps.repair(row.credential_ref) is Repair.REINSTATED
    make_due()
    assert steps.claim(10) is None
    name_ref(source, None)
    assert sweep(steps) == (1, {})
    make_due()
    assert erase(steps) == {Outcome.ERASED: 1}

"""The signals: sent after the commit, once for each batch and kind, and never in the way of the work."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction
from django.dispatch import Signal

from kfs_credentials import audit, services
from kfs_credentials.backfill import Backfill
from kfs_credentials.cleanup import Cleanup
from kfs_credentials.models import (
    Event,
    EventKind,
    Refusal,
    RefusalReason,
    Source,
    SourceSecretLifecycleRef,
    Tick,
    WorkerRole,
)
from kfs_credentials.receivers import log_moves
from kfs_credentials.signals import refs_moved, worker_refused, worker_ticked
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.ticks import Ticker, refuse
from tests.cleanup.rows import add_ref, add_secret, in_database, make_source
from tests.cleanup.runs import erase
from tests.factories import SourceFactory

pytestmark = pytest.mark.django_db(transaction=True)

TENANT = "tenant-a"


class Heard(list[dict[str, Any]]):
    """What a receiver was sent, in this order."""

    def hear(self, **sent: Any) -> None:
        """Note it, and what the database says at that moment: it is committed."""
        assert not transaction.get_connection().in_atomic_block
        self.append(sent)

    @property
    def moves(self) -> list[tuple[EventKind, int, str, str | None]]:
        """What has become of how many refs, by whom, and why."""
        return [(sent["kind"], len(sent["refs"]), sent["actor"], sent["detail"]) for sent in self]


def listening(signal: Signal) -> Iterator[Heard]:
    heard = Heard()
    signal.connect(heard.hear)
    yield heard
    signal.disconnect(heard.hear)


@pytest.fixture
def heard(store: EncryptedStore) -> Iterator[Heard]:
    """What `refs_moved` has told."""
    yield from listening(refs_moved)


def revoke(source: Source) -> None:
    services.revoke_credentials(tenant=TENANT, source_id=source.pk)


def test_a_batch_is_told_once_for_each_kind(heard: Heard, store: EncryptedStore) -> None:
    SourceFactory.create_batch(5)
    steps = Backfill(using="default", store=store, worker="tests", lease=60.0)
    with audit.acting_as("a worker"):
        batch = steps.discover(10)
        assert batch is not None
        steps.start_put(batch)
        steps.finish_put(batch)
        steps.settle(batch)
    assert heard.moves == [
        (EventKind.RESERVED, 5, "a worker", None),
        (EventKind.ACTIVATED, 5, "a worker", "backfill"),
    ]
    assert all((sent["sender"], sent["using"]) == (Event, "default") for sent in heard)
    refs = set(SourceSecretLifecycleRef.objects.values_list("credential_ref", flat=True))
    assert all(set(sent["refs"]) == refs for sent in heard)


def test_an_erasure_is_told_with_its_receipts(heard: Heard, store: EncryptedStore) -> None:
    add_secret(store)
    for _ in range(2):
        add_ref()
    erase(Cleanup(using="default", worker="tests", lease=60.0))
    assert heard.moves == [
        (EventKind.ERASED, 1, "application", "erased"),
        (EventKind.ERASED, 2, "application", "absent"),
    ]


def test_what_a_statement_writes_itself_is_told_too(heard: Heard, store: EncryptedStore, kfs_settings: Any) -> None:
    """The end of a job: the candidate is retired, and the job has failed."""
    kfs_settings(MAX_SECRET_BYTES=10)
    SourceFactory.create(credentials={"token": "made-up, and too large"})
    steps = Backfill(using="default", store=store, worker="tests", lease=60.0)
    batch = steps.discover(10)
    assert batch is not None
    steps.start_put(batch)
    steps.finish_put(batch)
    steps.settle(batch)
    code = "SOURCE_SECRET_TOO_LARGE"
    assert heard.moves[1:] == [
        (EventKind.RETIRED, 1, "application", code),
        (EventKind.JOB_FAILED, 1, "application", code),
    ]


def test_rows_that_the_database_refuses_are_not_told_of(heard: Heard, store: EncryptedStore) -> None:
    """They are found by halves, in savepoints that are rolled back."""
    sources = SourceFactory.create_batch(4)
    steps = Backfill(using="default", store=store, worker="tests", lease=60.0)
    batch = steps.discover(10)
    assert batch is not None
    steps.start_put(batch)
    steps.finish_put(batch)
    in_database(f"ALTER TABLE sources ADD CONSTRAINT kfs_tests CHECK (version < 2 OR id <> '{sources[2].pk}')")
    try:
        steps.settle(batch)
    finally:
        in_database("ALTER TABLE sources DROP CONSTRAINT kfs_tests")
    told = [ref for sent in heard if sent["kind"] == EventKind.ACTIVATED for ref in sent["refs"]]
    moved = Source.objects.filter(credential_ref__isnull=False).values_list("credential_ref", flat=True)
    assert sorted(told) == sorted(filter(None, moved))
    assert len(told) == 3


def test_it_is_sent_after_the_commit_of_a_joined_transaction(heard: Heard) -> None:
    source = make_source()
    heard.clear()
    with transaction.atomic():
        revoke(source)
        assert heard == []
    assert heard.moves == [(EventKind.RETIRED, 1, "application", None)]


def test_what_is_rolled_back_sends_nothing(heard: Heard) -> None:
    source = make_source()
    heard.clear()
    with transaction.atomic():
        revoke(source)
        transaction.set_rollback(True)
    assert heard == []
    assert SourceSecretLifecycleRef.objects.get().state == "active"


def test_the_actor_is_who_acted_and_not_who_commits(heard: Heard) -> None:
    source = make_source()
    heard.clear()
    with transaction.atomic(), audit.acting_as("user:ada"):
        revoke(source)
    assert heard.moves == [(EventKind.RETIRED, 1, "user:ada", None)]


def test_a_receiver_that_fails_keeps_nobody_from_working(heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("made-up")

    refs_moved.connect(fail)
    try:
        source = make_source()
        revoke(source)
    finally:
        refs_moved.disconnect(fail)
    assert [kind for kind, *_ in heard.moves] == [EventKind.RESERVED, EventKind.ACTIVATED, EventKind.RETIRED]
    assert any(record.name == "django.dispatch" for record in caplog.records)


def test_the_log_names_a_few_refs_by_their_start(caplog: pytest.LogCaptureFixture) -> None:
    refs = tuple(f"source-secret:v1:{number:08d}-0000-4000-8000-000000000000" for number in range(1200))
    with caplog.at_level(logging.INFO, logger="kfs_credentials"):
        log_moves(kind=EventKind.PARKED, refs=refs, actor="tests", detail="A_CODE")
    (record,) = caplog.records
    assert record.getMessage().startswith("parked (A_CODE) by tests: 1,200 refs: source-secret:v1:00000000")
    assert record.getMessage().endswith("and more")
    assert refs[0] not in record.getMessage()


def test_a_tick_is_told_at_most_once_a_second() -> None:
    for heard in listening(worker_ticked):
        ticker = Ticker("default", WorkerRole.CLEANUP, "a worker")
        for _ in range(3):
            ticker.tick()
        (sent,) = heard
    assert (sent["sender"], sent["using"], sent["role"], sent["worker"]) == (Tick, "default", "cleanup", "a worker")


def test_a_refusal_is_told() -> None:
    for heard in listening(worker_refused):
        refuse("default", WorkerRole.BACKFILL, RefusalReason.STORE_DENIED)
        (sent,) = heard
    assert (sent["sender"], sent["role"], sent["reason"]) == (Refusal, "backfill", "store_denied")

"""The events: who acts, that nothing changes them, how long they are kept, and what they cost."""

from __future__ import annotations

import getpass
from typing import Any

import psycopg
import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext

from kfs_credentials import audit, services
from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillWorker
from kfs_credentials.cleanup import Cleanup
from kfs_credentials.errors import SecretStoreError
from kfs_credentials.leases import new_worker_name, seconds_from_now
from kfs_credentials.models import Event, EventKind
from kfs_credentials.operations import acknowledge, unsettled
from kfs_credentials.status import read_left
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import add_ref, add_secret, in_database, make_source
from tests.cleanup.runs import erase
from tests.cleanup.workers import new_worker
from tests.factories import SourceFactory
from tests.management.commands import dsn, runner
from tests.management.rows import JobFactory
from tests.ref_scenes import parked, row_of

pytestmark = pytest.mark.django_db(transaction=True)

DAY = 86400.0
TENANT = "tenant-a"
CANARY = "made-up-canary-of-an-event"


@pytest.fixture
def steps(store: EncryptedStore) -> Cleanup:
    """The cleanup's steps, for one worker."""
    return Cleanup(using="default", worker="tests", lease=60.0)


def actors(*kinds: EventKind) -> set[str]:
    """Return who has acted, in events of these kinds or of all."""
    events = Event.objects.filter(kind__in=kinds) if kinds else Event.objects.all()
    return set(events.values_list("actor", flat=True))


def add_event(age: float = 0.0, kind: EventKind = EventKind.RETIRED) -> Event:
    """Add an event that is so many seconds old."""
    return Event.objects.create(created_at=seconds_from_now(-age), kind=kind, actor="tests")


# Who acts.


@pytest.mark.usefixtures("store")
def test_the_application_acts_unless_it_says_who_does() -> None:
    source = make_source()
    assert actors() == {"application"}
    with audit.acting_as("user:ada"):
        with audit.acting_as("service:importer"):
            services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials={"token": "made-up-new"})
        services.revoke_credentials(tenant=TENANT, source_id=source.pk)
    assert list(Event.objects.order_by("id").values_list("kind", "actor"))[2:] == [
        ("reserved", "service:importer"),
        ("activated", "service:importer"),
        ("retired", "service:importer"),
        ("retired", "user:ada"),
    ]


def test_workers_act_in_their_own_name(store: EncryptedStore) -> None:
    SourceFactory.create()
    name = new_worker_name()
    steps = Backfill(using="default", store=store, worker=name, lease=60.0)
    BackfillWorker(steps, remaining=lambda: read_left("default"), batch_size=10).run()
    assert actors(EventKind.RESERVED, EventKind.ACTIVATED) == {name}
    add_secret(store)
    other = new_worker_name()
    new_worker(Cleanup(using="default", worker=other, lease=60.0), due_only=True).run()
    assert actors(EventKind.ERASED) == {other}


@pytest.mark.usefixtures("secrets_directory")
def test_commands_act_for_the_user_who_runs_them_or_for_whom_they_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = runner(capsys)
    JobFactory.create()
    assert run("retry_credential_backfill", "--all").code == 0
    SourceFactory.create(credentials="a string")
    assert run("settle_unsupported_credentials", "--all").code == 0
    assert actors(EventKind.JOB_RETRIED, EventKind.ACKNOWLEDGED) == {f"command:{getpass.getuser()}"}
    SourceFactory.create(credentials=[1])
    assert run("settle_unsupported_credentials", "--all", "--by", "ticket 7").code == 0
    assert "ticket 7" in actors(EventKind.ACKNOWLEDGED)


@pytest.mark.usefixtures("store")
def test_decisions_in_the_admin_are_those_of_the_user(admin_client: Client, admin_user: User) -> None:
    ref = parked()
    page = "/admin/kfs_credentials/sourcesecretlifecycleref/"
    chosen = {"action": "abandon", "index": "0", "_selected_action": str(row_of(ref).pk)}
    context: Any = admin_client.post(page, chosen).context
    answers = {"rows": context["rows"], "reason": f"the bucket is gone: {CANARY}"}
    assert admin_client.post(f"{page}abandon/", answers).status_code == 302
    event = Event.objects.get(kind=EventKind.ABANDONED)
    assert event.actor == f"user:{admin_user.get_username()}"
    assert event.detail == "SOURCE_SECRET_ABANDONED", "the reason stays where only those who may see it find it"


# What is written.


@pytest.mark.usefixtures("secrets_directory")
def test_an_acknowledgement_says_whose_source_and_which_shape() -> None:
    source = SourceFactory.create(credentials="a string")
    acknowledge("default", list(unsettled("default")), by="tests")
    event = Event.objects.get()
    assert (event.kind, event.credential_ref, event.detail) == ("acknowledged", None, "string")
    scope = (event.tenant_id, event.knowledge_space_id, event.source_id)
    assert scope == (TENANT, source.knowledge_space_id, source.pk)


def test_an_erasure_says_whether_there_was_anything_to_erase(steps: Cleanup, store: EncryptedStore) -> None:
    there, absent = add_secret(store), add_ref()
    erase(steps)
    receipts = dict(Event.objects.values_list("credential_ref", "detail"))
    assert receipts == {there.credential_ref: "erased", absent.credential_ref: "absent"}


def test_what_the_store_said_is_in_no_event(
    steps: Cleanup, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_ref()
    add_ref(delete_attempts=25)
    answer = SecretStoreError(f"https://user:{CANARY}@host")
    monkeypatch.setattr(store, "_delete_many", lambda addresses, deadline: [answer for _ in addresses])
    erase(steps)
    details = dict(Event.objects.values_list("kind", "detail"))
    assert details == {"erasure_failed": "SOURCE_SECRET_DELETE_FAILED", "parked": "SOURCE_SECRET_NEEDS_ATTENTION"}
    with connection.cursor() as cursor:
        cursor.execute("SELECT string_agg(event::text, '') FROM kfs_credentials_event event")
        assert CANARY not in cursor.fetchone()[0]


def test_an_act_about_no_ref_is_in_the_callers_transaction() -> None:
    with transaction.atomic():
        audit.record_act("default", EventKind.RESUMED, detail="resumed")
        transaction.set_rollback(True)
    assert not Event.objects.exists()
    with audit.acting_as("user:ada"):
        audit.record_act("default", EventKind.PAUSED)
    assert Event.objects.values_list("kind", "actor", "credential_ref").get() == ("paused", "user:ada", None)


def test_a_move_that_is_rolled_back_leaves_no_event(store: EncryptedStore) -> None:
    source = make_source()
    before = Event.objects.count()
    with transaction.atomic():
        services.revoke_credentials(tenant=TENANT, source_id=source.pk)
        assert Event.objects.count() == before + 1
        transaction.set_rollback(True)
    assert Event.objects.count() == before


@pytest.mark.parametrize("number", [1, 20])
def test_a_batch_writes_its_events_in_one_statement(store: EncryptedStore, steps: Cleanup, number: int) -> None:
    """However many rows there are, there are as many statements."""
    SourceFactory.create_batch(number)
    backfill = Backfill(using="default", store=store, worker="tests", lease=60.0)
    with CaptureQueriesContext(connection) as moving:
        batch = backfill.discover(100)
        assert batch is not None
        backfill.start_put(batch)
        backfill.finish_put(batch)
        backfill.settle(batch)
    in_database("UPDATE sources SET credential_ref = NULL")
    with CaptureQueriesContext(connection) as retiring:
        position = steps.begin_sweep(every=0)
        assert position is not None
        assert steps.sweep(position).retired == number
    writes = [query["sql"] for query in (*moving, *retiring) if "INSERT INTO kfs_credentials_event" in query["sql"]]
    assert len(writes) == 3, "reserved and activated with what they are about, retired beside it"
    assert Event.objects.count() == 3 * number


# Nothing changes them.


def test_nothing_in_the_application_changes_or_deletes_an_event() -> None:
    event = add_event()
    event.actor = "somebody else"
    everything = Event.objects.all()
    for change in (
        event.save,
        event.delete,
        everything.delete,
        lambda: everything.update(actor="somebody else"),
        lambda: everything.bulk_update([event], ["actor"]),
    ):
        with pytest.raises(TypeError, match="events are never changed, and only deleted when EVENT_RETENTION is over"):
            change()
    assert Event.objects.get().actor == "tests"


# Retention.


def test_old_events_are_purged_in_batches_and_the_others_stay(steps: Cleanup, kfs_settings: Any) -> None:
    kfs_settings(EVENT_RETENTION=30 * DAY)
    for _ in range(5):
        add_event(31 * DAY)
    young = add_event(29 * DAY)
    assert [steps.purge_events(2) for _ in range(4)] == [2, 2, 1, 0]
    assert Event.objects.get() == young


def test_by_default_they_are_kept_for_400_days(steps: Cleanup) -> None:
    add_event(401 * DAY)
    kept = add_event(399 * DAY)
    assert steps.purge_events(10) == 1
    assert Event.objects.get() == kept


def test_a_retention_of_0_keeps_none(steps: Cleanup, kfs_settings: Any) -> None:
    kfs_settings(EVENT_RETENTION=0)
    add_event()
    assert steps.purge_events(10) == 1


def test_what_somebody_holds_is_left_to_the_next_purge(steps: Cleanup, kfs_settings: Any) -> None:
    kfs_settings(EVENT_RETENTION=0)
    held = add_event()
    add_event()
    with psycopg.connect(dsn()) as other:
        other.execute("SELECT FROM kfs_credentials_event WHERE id = %s FOR UPDATE", [held.pk])
        assert steps.purge_events(10) == 1
    assert Event.objects.get() == held


def test_the_cleanup_purges_them_and_counts_them(steps: Cleanup, kfs_settings: Any) -> None:
    for _ in range(25):
        add_event(500 * DAY)
    add_event()
    assert new_worker(steps).run().events_purged == 25
    assert Event.objects.count() == 1


def test_a_cleanup_of_one_tenant_leaves_them_alone(store: EncryptedStore) -> None:
    add_event(500 * DAY)
    steps = Cleanup(using="default", worker="tests", lease=60.0, tenant=TENANT)
    assert new_worker(steps).run().events_purged == 0
    assert Event.objects.exists()


def test_a_purge_reads_a_page_and_not_the_table(steps: Cleanup) -> None:
    """Also where nothing is old enough."""
    Event.objects.bulk_create([Event(created_at=Now(), kind="retired", actor="tests") for _ in range(3000)])
    in_database("VACUUM ANALYZE kfs_credentials_event")
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush(), pg_stat_reset()")
    steps.purge_events(10)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute(
            "SELECT seq_scan, idx_tup_read FROM pg_stat_user_tables t JOIN pg_stat_user_indexes i USING (relid) "
            "WHERE t.relname = 'kfs_credentials_event' AND i.indexrelname = 'kfs_credentials_event_pkey'"
        )
        scans, read = cursor.fetchone()
    assert scans == 0
    assert read <= 30

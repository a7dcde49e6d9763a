"""Closed keys, one at a time: what is refused, what is put right, and what each key is said to hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.core.checks import CheckMessage
from django.db import connection

from kfs_credentials import services
from kfs_credentials.audit import acting_as
from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillWorker
from kfs_credentials.batch import Move
from kfs_credentials.cleanup import Cleanup
from kfs_credentials.errors import ImproperlyPrepared, KeyClosed
from kfs_credentials.keys import close_keys, held_keys
from kfs_credentials.models import (
    ClosedKey,
    Event,
    EventKind,
    RefState,
    RunState,
    SecretObject,
    Source,
    SourceCredentialBackfill,
)
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.operations import retry_failed_jobs
from kfs_credentials.status import read_left, read_status
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.bound import seal_anew
from tests.cleanup.rows import add_ref, add_secret, make_source, name_ref, put_late, ref_of
from tests.factories import SourceFactory
from tests.invariants import check_invariants
from tests.keys import NEW, NEW_ID, OLD, OLD_ID, Change, noted, sealed
from tests.management.rows import JobFactory, RefFactory, table_contents
from tests.services.conftest import after_put, before_statement, create, elsewhere, put, resolve, rotate

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

Files = Callable[[], list[Path]]
SAYS = (
    f"Key {OLD_ID} is closed: `manage.py reencrypt_secrets` moves all secrets to another one, and nothing comes into "
    "use under this one any more. Put the new key first in this process's KFS_CREDENTIALS['KEYS'], and restart it."
)


@pytest.fixture
def steps(store: EncryptedStore, transactional_db: None) -> Backfill:
    """The steps of a backfill."""
    return Backfill(using="default", store=store, worker="tests", lease=60.0)


@pytest.fixture(autouse=True)
def _old_ring(bound: None, request: pytest.FixtureRequest, kfs_settings: Change) -> None:
    """What a test does not change has the old key first."""
    kfs_settings(KEYS=[OLD, NEW])
    if "store" in request.fixturenames:
        seal_anew("default", request.getfixturevalue("store"))


def close(key_id: str = OLD_ID, primary: str = NEW_ID) -> None:
    with acting_as("somebody"):
        close_keys("default", [key_id], by="tests", primary=primary)


def refused(work: Callable[[], object]) -> None:
    """Assert that it is refused, since the key is closed, and that nothing is written by it."""
    before = table_contents()
    with pytest.raises(KeyClosed) as caught:
        work()
    assert str(caught.value) == SAYS
    assert (caught.value.key_id, caught.value.code) == (OLD_ID, "SOURCE_SECRET_KEY_CLOSED")
    assert isinstance(caught.value, ImproperlyPrepared)
    assert table_contents() == before


# Closing.


def test_closing_is_noted_with_who_did_it_and_once() -> None:
    """Closing it again changes nothing, and a key that is opened again is not closed any more."""
    close()
    close()
    assert ClosedKey.objects.values_list("key_id", "closed_by").get() == (OLD_ID, "tests")
    close(NEW_ID, OLD_ID)
    assert ClosedKey.objects.values_list("key_id", flat=True).get() == NEW_ID
    events = Event.objects.order_by("id").values_list("kind", "actor", "detail", "credential_ref")
    assert list(events) == [
        (EventKind.KEY_CLOSED, "somebody", OLD_ID, None),
        (EventKind.KEY_CLOSED, "somebody", NEW_ID, None),
        (EventKind.KEY_OPENED, "somebody", OLD_ID, None),
    ]


def test_the_first_key_is_never_closed() -> None:
    """Whatever is asked for."""
    close_keys("default", [OLD_ID, NEW_ID], by="tests", primary=NEW_ID)
    assert ClosedKey.objects.values_list("key_id", flat=True).get() == OLD_ID


# A process whose own first key is closed.


def test_create_and_rotate_refuse_before_they_put_anything(files: Files) -> None:
    """Nothing is reserved either."""
    source = make_source()
    close()
    before = files()
    refused(lambda: create(source.knowledge_space))
    refused(lambda: rotate(source))
    assert files() == before


def test_what_is_no_activation_goes_on() -> None:
    """Resolve, revoke, delete, and a create without credentials need no key to encrypt."""
    source, other = make_source(), make_source()
    close()
    assert resolve(source) == {"token": "made-up"}
    assert create(source.knowledge_space, None).credential_ref is None
    services.revoke_credentials(tenant="tenant-a", source_id=source.pk)
    services.delete_source(tenant="tenant-a", source_id=other.pk)
    assert LedgerRow.objects.filter(state=RefState.ACTIVE).count() == 0


def test_a_call_whose_commit_took_place_before_is_answered() -> None:
    """It is over: nothing of it comes into use now."""
    source = make_source()
    first = rotate(source, operation_id="once")
    close()
    assert rotate(source, operation_id="once").version == first.version


@pytest.mark.parametrize("what", ["create", "rotate"])
def test_create_and_rotate_that_have_put_already_refuse_to_activate(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The source stays as it was; what they have put is taken back by the cleanup."""
    source = make_source()
    after_put(store, monkeypatch, close)
    with pytest.raises(KeyClosed):
        create(source.knowledge_space) if what == "create" else rotate(source)
    assert Source.objects.get().version == 1
    assert resolve(source) == {"token": "made-up"}
    assert sorted(LedgerRow.objects.values_list("state", flat=True)) == ["active", "staged"]


def test_the_backfill_refuses_to_discover_and_to_claim(steps: Backfill) -> None:
    """No job is made, and none is leased."""
    SourceFactory.create()
    batch = steps.discover(1)
    assert batch is not None
    steps.release(batch)
    SourceFactory.create()
    close()
    refused(lambda: steps.discover(10))
    refused(lambda: steps.claim(10))


def test_the_backfill_refuses_to_activate(steps: Backfill) -> None:
    """Also where it reserved and put before the key was closed."""
    SourceFactory.create_batch(3)
    batch = put(steps)
    close()
    refused(lambda: steps.settle(batch))


def test_a_retry_refuses_to_reserve() -> None:
    """The job stays failed."""
    job = JobFactory.create()
    RefFactory.create(job=job)
    close()
    refused(lambda: retry_failed_jobs("default", [(job.pk, None)]))


def test_a_worker_ends_and_gives_its_jobs_back_without_an_attempt(
    store: EncryptedStore, steps: Backfill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others, with the new key first, go on with them."""
    SourceFactory.create_batch(4)
    after_put(store, monkeypatch, close)
    with pytest.raises(KeyClosed):
        BackfillWorker(steps, remaining=lambda: read_left("default"), batch_size=2).run()
    jobs = SourceCredentialBackfill.objects.values_list("run_state", "retry_count", "last_error_code")
    assert set(jobs) == {(RunState.QUEUED, 0, None)}
    assert Source.objects.filter(credential_ref__isnull=False).count() == 0


def test_a_rescue_refuses(store: EncryptedStore) -> None:
    """The source keeps naming what it names, and the next sweep of another worker finds it."""
    source = make_source()
    row = add_secret(store, source, "deleting")
    name_ref(source, row.credential_ref)
    close()
    steps = Cleanup(using="default", worker="tests", lease=60.0)
    refused(lambda: steps.repair(row.credential_ref))


# What a dead process with an old key ring has left behind, and one with a new ring finds.


def test_the_backfill_takes_a_fresh_candidate_for_what_is_there_under_a_closed_key(
    store: EncryptedStore, steps: Backfill, kfs_settings: Change
) -> None:
    """The old candidate is retired, with its object."""
    source = SourceFactory.create()
    batch = put(steps)
    steps.release(batch)
    kfs_settings(KEYS=[NEW, OLD], RETRY_BASE=0)
    close()
    again = steps.claim(10)
    assert again is not None
    steps.start_put(again)
    steps.finish_put(again)
    assert steps.settle(again) == {Move.REFRESH: 1}
    BackfillWorker(steps, remaining=lambda: read_left("default"), batch_size=10).run()

    assert ref_of(source) != batch.items[0].ref
    states = dict(LedgerRow.objects.values_list("credential_ref", "state"))
    assert states == {batch.items[0].ref: RefState.RETIRED, ref_of(source): RefState.ACTIVE}
    assert SecretObject.objects.get(pk=ref_of(source)).key_id == NEW_ID
    assert check_invariants("default", store) == []


def test_a_repeated_call_seals_anew_what_is_there_under_a_closed_key(
    store: EncryptedStore, kfs_settings: Change, files: Files
) -> None:
    """The first one was made by a process with an old key ring, which died after its put."""
    source = make_source()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "point", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rotate(source, operation_id="again")
    kfs_settings(KEYS=[NEW, OLD])
    close()
    rotate(source, operation_id="again")
    assert SecretObject.objects.get(pk=ref_of(source)).key_id == NEW_ID
    kfs_settings(KEYS=[NEW])
    assert resolve(source) == {"token": "made-up-new"}
    assert sealed(files()) == {NEW_ID: 1, OLD_ID: 1}


@pytest.mark.parametrize("what", ["create", "rotate"])
def test_a_key_that_is_closed_right_before_a_repeated_call_activates(
    store: EncryptedStore, kfs_settings: Change, files: Files, what: str
) -> None:
    """It was open when the call looked: what lies there is sealed anew then, and comes into use."""
    source = make_source()
    space = source.knowledge_space

    def call() -> Source:
        return create(space, operation_id="again") if what == "create" else rotate(source, operation_id="again")

    last_step = "_Insertion" if what == "create" else "point"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, last_step, lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call()
    kfs_settings(KEYS=[NEW, OLD])
    with before_statement("pg_advisory_xact_lock_shared", lambda: elsewhere(close)):
        made = call()
    assert SecretObject.objects.get(pk=ref_of(made)).key_id == NEW_ID
    assert sealed(files()) == {NEW_ID: 1, OLD_ID: 1}
    kfs_settings(KEYS=[NEW])
    assert resolve(made) == {"token": "made-up-old" if what == "create" else "made-up-new"}


def test_a_repeated_call_notes_under_which_key_it_found_the_secret(store: EncryptedStore, kfs_settings: Change) -> None:
    """The key is not closed: the object stays as it is, and what is noted is the truth."""
    source = make_source()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "point", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rotate(source, operation_id="again")
    kfs_settings(KEYS=[NEW, OLD])
    SecretObject.objects.update(key_id=NEW_ID)
    rotate(source, operation_id="again")
    assert SecretObject.objects.get(pk=ref_of(source)).key_id == OLD_ID


def test_a_rescue_notes_the_key_of_the_copy(store: EncryptedStore, kfs_settings: Change) -> None:
    """The keys may have changed between its reservation and its put."""
    source = make_source()
    row = add_secret(store, source, "deleting")
    name_ref(source, row.credential_ref)
    real = store._put_many

    def put_many(entries: Any, *, deadline: Any) -> Any:
        kfs_settings(KEYS=[NEW, OLD])
        return real(entries, deadline=deadline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_put_many", put_many)
        Cleanup(using="default", worker="tests", lease=60.0).repair(row.credential_ref)
    assert SecretObject.objects.get(pk=ref_of(source)).key_id == NEW_ID


# What each key holds.


def test_each_key_holds_what_is_not_erased(store: EncryptedStore, kfs_settings: Change) -> None:
    """Those of the ring come first, in its order, and what is unknown last; what is abandoned is left out."""
    make_source()
    situations = ("retired", "deleting", "staged", "candidate", "deleted", "final")
    for key_id, count in ((OLD_ID, 2), ("0" * 16, 1)):
        for situation in situations:
            for _ in range(count):
                SecretObject.objects.filter(pk=add_ref(None, situation).credential_ref).update(key_id=key_id)
    add_ref(None, "retired")
    abandoned = add_ref(None, "retired")
    SecretObject.objects.filter(pk=abandoned.credential_ref).update(key_id=OLD_ID, abandoned_at="2026-01-01T00:00Z")
    close("1" * 16, OLD_ID)

    def key(key_id: str | None, counts: tuple[int, int, int], **more: bool) -> dict[str, Any]:
        live, retired, candidate = counts
        flags = {"in_ring": False, "first": False, "closed": False, **more}
        return {"key_id": key_id, "live": live, "retired": retired, "candidate": candidate, **flags}

    assert held_keys("default") == [
        key(OLD_ID, (1, 4, 4), in_ring=True, first=True),
        key(NEW_ID, (0, 0, 0), in_ring=True),
        key("0" * 16, (0, 2, 2)),
        key("1" * 16, (0, 0, 0), closed=True),
        key(None, (0, 1, 0)),
    ]
    status = read_status("default")
    assert status.keys == held_keys("default")
    assert status.ref_findings["keyless"] == 4
    assert not status.clean
    kfs_settings(KEYS=[])
    assert [one["key_id"] for one in held_keys("default")] == [*sorted(["0" * 16, "1" * 16, OLD_ID]), None]


def test_a_tenant_has_only_its_own() -> None:
    """So has a space."""
    source = make_source()
    assert held_keys("default", tenant="tenant-b")[0]["live"] == 0
    assert held_keys("default", tenant="tenant-a", space=source.knowledge_space_id)[0]["live"] == 1


def test_a_ref_that_the_node_service_reserved_is_under_a_key_that_is_not_known(store: EncryptedStore) -> None:
    """Nothing of ours is known about it."""
    row = add_secret(store, None, "retired")
    SecretObject.objects.filter(pk=row.credential_ref).delete()
    assert held_keys("default")[-1]["key_id"] is None
    assert held_keys("default")[-1]["retired"] == 1


# The check of a deployment.


def deployed() -> list[CheckMessage]:
    found = checks.run_checks(tags=["kfs_credentials"], include_deployment_checks=True, databases=[])
    return [message for message in found if str(message.id).startswith("kfs_credentials.")]


def test_a_key_that_still_holds_something_may_not_go(store: EncryptedStore, kfs_settings: Change) -> None:
    """The check says which, and how many; retired refs and candidates count."""
    make_source()
    for situation in ("retired", "candidate", "deleted"):
        put_late(store, row := add_ref(None, situation))
        SecretObject.objects.filter(pk=row.credential_ref).update(key_id=OLD_ID)
    assert deployed() == []
    kfs_settings(KEYS=[NEW])
    (message,) = (message for message in deployed() if message.id != "kfs_credentials.E012")
    assert (message.id, message.level) == ("kfs_credentials.E011", checks.ERROR)
    assert message.msg == (
        f"KFS_CREDENTIALS['KEYS'] lacks key {OLD_ID}, and 3 ref(s) in DATABASES['default'] that are not erased are "
        "sealed under it: 1 in use, 1 to be erased, 1 reserved."
    )
    assert message.hint == (
        "Put the key back, behind the others. `manage.py reencrypt_secrets` moves what it holds to the first one; then "
        "it can go."
    )
    kfs_settings(KEYS=[])
    assert [message.id for message in deployed()] == ["kfs_credentials.E002"]
    # Not without --deploy: a web process starts nevertheless.
    kfs_settings(KEYS=[NEW])
    assert checks.run_checks(tags=["kfs_credentials"]) == []


def test_refs_in_use_under_unknown_keys_are_a_warning(store: EncryptedStore) -> None:
    """What the Node service has put; what is to be erased can wait."""
    for situation in ("active", "retired"):
        add_secret(store, None, situation)
    (message,) = deployed()
    assert (message.id, message.level) == ("kfs_credentials.W015", checks.WARNING)
    assert message.msg == "Of 1 ref(s) in use in DATABASES['default'] it is not known under which key they are sealed."
    assert message.hint == (
        "`manage.py reencrypt_secrets` finds out, and moves them to the first key. Until then, remove no key from "
        "KFS_CREDENTIALS['KEYS']."
    )


def test_a_database_that_is_not_migrated_is_a_warning() -> None:
    """No traceback: this is what a first deployment looks like."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE kfs_credentials_closed_key RENAME TO elsewhere")
        try:
            (message,) = deployed()
        finally:
            cursor.execute("ALTER TABLE elsewhere RENAME TO kfs_credentials_closed_key")
    assert (message.id, message.level) == ("kfs_credentials.W012", checks.WARNING)
    assert message.msg == (
        "DATABASES['default'] could not be asked which keys its secrets are sealed under (ProgrammingError)."
    )
    assert message.hint == "Check again once it can be reached, and is migrated."


def test_the_status_is_json() -> None:
    """What is counted can be read by a program."""
    make_source()
    assert json.loads(json.dumps(read_status("default").as_json()))["keys"][0]["live"] == 1
    assert noted() == {OLD_ID: 1}

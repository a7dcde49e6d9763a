"""The counts of refs, and of the rounds that look after them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from kfs_credentials.conf import key_ring
from kfs_credentials.models import Attention, RefState, Round, Source, SourceSecretLifecycleRef
from kfs_credentials.status import Status, read_cleanup_left, read_status
from tests.factories import SourceFactory, SpaceFactory
from tests.management.rows import JobFactory, RefFactory, give_ref, ledger_row, object_row

pytestmark = pytest.mark.django_db


def ago(**span: float) -> datetime:
    return timezone.now() - timedelta(**span)


def leased(until: datetime) -> dict[str, Any]:
    return {
        "state": RefState.DELETING.value,
        "worker_id": "tests",
        "lease_token": uuid.uuid4(),
        "heartbeat_at": ago(minutes=1),
        "lease_expires_at": until,
    }


def bare(**values: Any) -> Source:
    made: Source = SourceFactory.create(bare=True, **values)
    return made


EARLIER, LATER = ago(minutes=1), ago(days=-1)
WAITING, OVERDUE, NEITHER = "waiting", "overdue", "neither"

# What the row is, and whether its next move is due, comes later, or is nobody's.
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "reserved a moment ago": ({"state": "staged", "recover_after": LATER}, WAITING),
    "reserved and never used": ({"state": "staged", "recover_after": EARLIER}, OVERDUE),
    "a candidate without a job": ({"state": "candidate", "recover_after": LATER}, WAITING),
    "a candidate without a job for long": ({"state": "candidate", "recover_after": EARLIER}, OVERDUE),
    "active": ({"state": "active", "recover_after": EARLIER}, NEITHER),
    "retired, in its grace": ({"next_delete_at": LATER}, WAITING),
    "retired, due": ({"next_delete_at": EARLIER}, OVERDUE),
    "retired, kept for a person": ({"next_delete_at": None}, NEITHER),
    "being erased": (leased(LATER), WAITING),
    "its eraser died": (leased(EARLIER), OVERDUE),
    "erased, to be confirmed": ({"state": "deleted", "deleted_at": EARLIER, "next_delete_at": LATER}, WAITING),
    "erased, confirmation due": ({"state": "deleted", "deleted_at": EARLIER, "next_delete_at": EARLIER}, OVERDUE),
    "final": ({"state": "deleted", "deleted_at": EARLIER, "next_delete_at": None}, NEITHER),
}


@pytest.mark.parametrize(("values", "move"), ROWS.values(), ids=ROWS)
def test_whose_next_move_is_due(values: dict[str, Any], move: str) -> None:
    row = ledger_row(bare(), **values)
    object_row(row.credential_ref, key_id=key_ring().primary.id)
    status = read_status("default")
    assert status.ledger[row.state] == 1
    assert sum(status.ledger[state.value] for state in RefState) == 1
    assert (status.ledger["waiting"], status.ledger["overdue"]) == (int(move == WAITING), int(move == OVERDUE))
    assert status.clean == (move != OVERDUE)
    left, seconds = read_cleanup_left("default")
    assert left == int(move != NEITHER)
    assert (seconds is None, seconds is not None and seconds <= 0) == (move == NEITHER, move == OVERDUE)


@pytest.mark.parametrize("job", [{"queued": True}, {"running": True}], ids=str)
def test_a_candidate_that_a_live_job_holds_is_the_jobs(job: dict[str, bool]) -> None:
    RefFactory.create(job=JobFactory.create(source=bare(), **job), state="candidate", next_delete_at=None)
    status = read_status("default")
    assert (status.ledger["candidate"], status.ledger["waiting"], status.ledger["overdue"]) == (1, 0, 0)
    assert read_cleanup_left("default") == (0, None)


def test_the_age_of_what_is_overdue_is_that_of_the_oldest() -> None:
    ledger_row(bare(), next_delete_at=LATER)
    assert read_status("default").ledger["oldest_overdue_seconds"] == 0
    for hours in (1, 3, 2):
        ledger_row(bare(), next_delete_at=ago(hours=hours))
    age = read_status("default").ledger["oldest_overdue_seconds"]
    assert 3 * 3600 <= age < 4 * 3600
    ledger_row(bare(), state="staged", recover_after=ago(hours=5))
    assert 5 * 3600 <= read_status("default").ledger["oldest_overdue_seconds"] < 6 * 3600
    ledger_row(bare(), **leased(ago(hours=7)))
    assert 7 * 3600 <= read_status("default").ledger["oldest_overdue_seconds"] < 8 * 3600


def test_the_next_of_those_that_wait() -> None:
    ledger_row(bare(), next_delete_at=ago(hours=-3))
    ledger_row(bare(), state="deleted", deleted_at=EARLIER, next_delete_at=ago(hours=-1))
    ledger_row(bare(), next_delete_at=None)
    left, seconds = read_cleanup_left("default")
    assert left == 2
    assert seconds is not None
    assert 0 < seconds <= 3600


@pytest.mark.parametrize(
    ("attention", "counted"),
    [
        (Attention.ERASURE_FAILS, "parked"),
        (Attention.RETAINED, "parked"),
        (Attention.DISPLACED, "displaced"),
        (Attention.UNREADABLE, None),  # its source is dangling: counted there
    ],
)
def test_refs_that_need_a_person(attention: Attention, counted: str | None) -> None:
    row = ledger_row(bare(), next_delete_at=LATER)
    object_row(row.credential_ref, attention=attention)
    status = read_status("default")
    assert [name for name in ("parked", "displaced", "abandoned") if status.ledger[name]] == [counted][: bool(counted)]
    assert {name for name, count in status.ref_findings.items() if count} == {counted} - {None}
    assert status.clean == (counted is None)
    assert status.moved


def test_the_abandoned_are_counted_and_are_settled() -> None:
    row = ledger_row(bare(), next_delete_at=None)
    object_row(row.credential_ref, abandoned_at=EARLIER, abandoned_by="tests", abandoned_reason="a test")
    status = read_status("default")
    assert status.ledger["abandoned"] == 1
    assert (status.ledger["retired"], status.ledger["waiting"], status.ledger["overdue"]) == (1, 0, 0)
    assert status.clean


def test_how_many_were_erased_in_the_last_hour() -> None:
    for minutes in (1, 59, 61, 600):
        ledger_row(bare(), state="deleted", deleted_at=ago(minutes=minutes))
    assert read_status("default").ledger["erased_last_hour"] == 2


# Sources whose ref is not as it should be.


def unknown_to_the_ledger(source: Source) -> None:
    give_ref(source, in_ledger=False)


def named_and_in_state(state: str, **values: Any) -> Callable[[Source], None]:
    def give(source: Source) -> None:
        ref = give_ref(source, in_ledger=False)
        ledger_row(source, ref, state=state, **values)

    return give


def of_another_source(source: Source) -> None:
    ref = give_ref(source, in_ledger=False)
    ledger_row(bare(), ref, state="active")


def of_another_space(source: Source) -> None:
    ref = give_ref(source, in_ledger=False)
    ledger_row(source, ref, state="active", knowledge_space_id=uuid.uuid4())


def of_another_tenant(source: Source) -> None:
    ref = give_ref(source, in_ledger=False)
    ledger_row(source, ref, state="active", tenant_id="tenant-b")


@pytest.mark.parametrize(
    "give",
    [
        unknown_to_the_ledger,
        named_and_in_state("staged", recover_after=LATER),
        named_and_in_state("candidate", recover_after=LATER),
        named_and_in_state("retired", next_delete_at=LATER),
        named_and_in_state(**leased(LATER)),
        named_and_in_state("deleted", deleted_at=EARLIER),
        of_another_source,
        of_another_space,
        of_another_tenant,
    ],
)
def test_a_source_whose_ref_is_not_its_own_and_active_dangles(give: Callable[[Source], None]) -> None:
    give_ref(bare())
    assert read_status("default").clean
    made = bare()
    give(made)
    status = read_status("default")
    assert status.sources["dangling"] == status.ref_findings["dangling"] == 1
    assert status.moved
    assert not status.clean
    # What is being deleted is nobody's worry any more.
    Source.objects.filter(pk=made.pk).update(status="deleting")
    assert read_status("default").sources["dangling"] == 0


# Rounds.


def test_rounds_that_nobody_has_made() -> None:
    assert read_status("default").rounds == {
        "unknown_objects": 0,
        "last_sweep_seconds": None,
        "last_patrol_seconds": None,
    }
    Round.objects.create(name=Round.SWEEP, found=0, started_at=EARLIER)
    assert read_status("default").rounds["last_sweep_seconds"] is None


def test_when_rounds_were_made_and_what_they_found() -> None:
    Round.objects.create(name=Round.SWEEP, found=7, completed_at=ago(minutes=5))
    Round.objects.create(name=Round.patrol("default"), found=3, completed_at=ago(hours=2))
    Round.objects.create(name=Round.patrol("other"), found=1, completed_at=ago(hours=1))
    status = read_status("default")
    sweep, patrol = status.rounds["last_sweep_seconds"], status.rounds["last_patrol_seconds"]
    assert sweep is not None
    assert patrol is not None
    assert 300 <= sweep < 400
    assert 7200 <= patrol < 7300  # of the store that was looked at longest ago
    assert status.rounds["unknown_objects"] == status.ref_findings["unknown_objects"] == 4
    assert not status.clean


# One tenant, one space.


def test_each_count_of_one_tenant_and_one_space() -> None:
    spaces = [SpaceFactory.create(tenant_id=tenant) for tenant in ("one", "one", "two")]
    for space in spaces:
        for attention in (Attention.RETAINED, Attention.DISPLACED):
            row = ledger_row(bare(knowledge_space=space), next_delete_at=LATER)
            object_row(row.credential_ref, attention=attention)
        gone = ledger_row(bare(knowledge_space=space), next_delete_at=None)
        object_row(gone.credential_ref, abandoned_at=EARLIER)
        ledger_row(bare(knowledge_space=space), next_delete_at=EARLIER)
        ledger_row(bare(knowledge_space=space), state="deleted", deleted_at=EARLIER)
        give_ref(bare(knowledge_space=space), in_ledger=False)
    Round.objects.create(name=Round.patrol("default"), found=5, completed_at=EARLIER)

    def counts(status: Status) -> list[int]:
        names = ("retired", "deleted", "overdue", "waiting", "parked", "displaced", "abandoned", "erased_last_hour")
        return [*(status.ledger[name] for name in names), status.sources["dangling"]]

    one = counts(read_status("default", space=spaces[0].pk))
    assert one == [4, 1, 1, 2, 1, 1, 1, 1, 1]
    assert counts(read_status("default", tenant="one")) == [2 * count for count in one]
    assert counts(read_status("default")) == [3 * count for count in one]
    assert counts(read_status("default", tenant="two", space=spaces[0].pk)) == [0] * len(one)
    assert read_status("default", tenant="one").ledger["oldest_overdue_seconds"] >= 60
    assert read_status("default", tenant="nobody").ledger["oldest_overdue_seconds"] == 0
    # Objects are nobody's, as seen from outside.
    assert read_status("default").rounds["unknown_objects"] == 5
    assert read_status("default", tenant="one").rounds["unknown_objects"] == 0
    assert read_cleanup_left("default", tenant="one")[0] == 6
    assert read_cleanup_left("default", space=spaces[2].pk)[0] == 3
    assert read_cleanup_left("default", tenant="nobody") == (0, None)


def test_refs_outlive_their_space() -> None:
    row = ledger_row(bare(knowledge_space__tenant_id="gone"), next_delete_at=EARLIER)
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM knowledge_spaces")
    assert read_status("default", tenant="gone").ledger["overdue"] == 1
    assert read_status("default", space=row.knowledge_space_id).ledger["overdue"] == 1
    assert SourceSecretLifecycleRef.objects.count() == 1

"""A sweep or a patrol is made by one worker at a time; one whose worker died is begun anew."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kfs_credentials.cleanup import Cleanup, PatrolPosition, SweepPosition
from kfs_credentials.errors import LeaseLost
from kfs_credentials.models import Round
from tests.cleanup.conftest import Other
from tests.cleanup.rows import HOUR, PAST, add_ref, in_database
from tests.cleanup.runs import NewSteps, patrol, sweep
from tests.management.rows import table_contents
from tests.services.conftest import together
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)

KINDS = ["sweep", "patrol"]


def begin(steps: Cleanup, kind: str, every: float = 0) -> SweepPosition | PatrolPosition | None:
    """Begin a round of this kind."""
    return steps.begin_sweep(every=every) if kind == "sweep" else steps.begin_patrol("default", every=every)


def look(steps: Cleanup, position: Any) -> None:
    """Look at the next page of a round."""
    steps.sweep(position) if isinstance(position, SweepPosition) else steps.patrol(position)


def make(steps: Cleanup, kind: str) -> None:
    """Make a whole round."""
    sweep(steps) if kind == "sweep" else patrol(steps)


@pytest.fixture
def another(new_steps: NewSteps) -> Cleanup:
    """The steps of another worker."""
    return new_steps(worker="another")


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_at_a_time(steps: Cleanup, another: Cleanup, kind: str) -> None:
    assert begin(steps, kind) is not None
    assert begin(another, kind) is None
    assert begin(steps, kind) is None, "nor the same one twice"
    assert Round.objects.get().worker_id == "tests#1"


def test_a_sweep_and_a_patrol_do_not_exclude_each_other(steps: Cleanup, another: Cleanup) -> None:
    assert begin(steps, "sweep") is not None
    assert begin(another, "patrol") is not None


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_that_begin_at_once_one_does(new_steps: NewSteps, kind: str) -> None:
    barrier = threading.Barrier(2, timeout=PATIENCE)

    def start(worker: str) -> object:
        steps = new_steps(worker=worker)
        barrier.wait()
        return begin(steps, kind)

    positions = together(lambda: start("one"), lambda: start("two"))
    assert [type(position) for position in positions if position is not None] == [
        SweepPosition if kind == "sweep" else PatrolPosition
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_whose_worker_died_is_begun_anew_and_the_loser_writes_nothing(
    steps: Cleanup, another: Cleanup, kind: str
) -> None:
    row = add_ref(situation="active")
    lost = begin(steps, kind)
    assert lost is not None
    Round.objects.update(lease_expires_at=PAST)
    taken = begin(another, kind)
    assert taken is not None
    before = table_contents()
    for step in (look, Cleanup.renew_round, Cleanup.complete):
        with pytest.raises(LeaseLost, match="another worker has begun this round anew"):
            step(steps, lost)
    steps.give_up(lost)
    assert table_contents() == before
    assert Round.objects.get().lease_token == taken.lease.token
    assert row.state == "active"


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_renews_the_lease_even_one_that_ran_out_if_nobody_has_begun_anew(
    steps: Cleanup, another: Cleanup, kind: str
) -> None:
    position = begin(steps, kind)
    Round.objects.update(lease_expires_at=PAST)
    look(steps, position)
    assert begin(another, kind) is None


@pytest.mark.parametrize("kind", KINDS)
def test_its_end_notes_that_what_came_before_its_start_was_seen(steps: Cleanup, kind: str) -> None:
    position = begin(steps, kind)
    assert position is not None
    started = Round.objects.get().started_at
    position.found = 3
    steps.complete(position)
    after = Round.objects.get()
    assert (after.covers_until, after.found) == (started, 3)
    assert after.completed_at is not None
    assert started is not None
    assert after.completed_at > started
    assert (after.worker_id, after.lease_token, after.lease_expires_at) == (None, None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_was_given_up_covers_nothing_and_is_begun_anew_at_once(
    steps: Cleanup, another: Cleanup, kind: str
) -> None:
    position = begin(steps, kind)
    assert position is not None
    steps.give_up(position)
    assert Round.objects.get().covers_until is None
    assert begin(another, kind, every=HOUR) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_not_more_often_than_every_so_many_seconds(steps: Cleanup, kind: str) -> None:
    make(steps, kind)
    assert begin(steps, kind, every=HOUR) is None
    in_database("UPDATE kfs_credentials_round SET covers_until = now() - interval '61 minutes'")
    assert begin(steps, kind, every=HOUR) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_whose_row_somebody_holds_is_not_waited_for(steps: Cleanup, other: Other, kind: str) -> None:
    make(steps, kind)
    other.execute("SELECT FROM kfs_credentials_round FOR UPDATE")
    assert begin(steps, kind) is None

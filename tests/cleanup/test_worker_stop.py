"""A run that is stopped, or ends otherwise than it should: what it held is given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from kfs_credentials.cleanup import Outcome
from kfs_credentials.models import RefState, Round
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.worker import End
from tests.cleanup.rows import (
    FUTURE,
    add_secret,
    in_database,
    make_source,
    ref_of,
)
from tests.cleanup.workers import (
    leased,
    new_worker,
    spy,
)
from tests.invariants import check_invariants

pytestmark = pytest.mark.django_db(transaction=True)

Change = Callable[..., None]
Files = Callable[[], list[Path]]
Other = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def _at_once(store: EncryptedStore, kfs_settings: Change) -> None:
    kfs_settings(ERASE_GRACE=0, LATE_WRITE_HORIZON=0)


def states() -> dict[str, int]:
    found: dict[str, int] = {}
    for state, due in LedgerRow.objects.values_list("state", "next_delete_at"):
        name = "final" if state == RefState.DELETED and due is None else state
        found[name] = found.get(name, 0) + 1
    return found


def everything(store: EncryptedStore) -> None:
    """Something to do for each step."""
    for _ in range(5):
        add_secret(store)
    add_secret(store, None, "staged, unused")
    in_database("DELETE FROM sources WHERE id = %s", make_source().pk)
    broken = make_source()
    LedgerRow.objects.filter(credential_ref=ref_of(broken)).update(state=RefState.RETIRED, next_delete_at=FUTURE)


STEPS = (
    *("claim", "start_delete", "finish_delete", "settle", "reconcile", "begin_sweep", "sweep", "repair"),
    *("begin_patrol", "patrol", "complete", "purge"),
)


@pytest.mark.parametrize("step", STEPS)
def test_a_stop_at_any_step_leaves_nothing_behind(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    everything(store)
    worker = new_worker(batch_size=3)
    asked: list[str] = []

    def ask() -> None:
        asked.append(step)
        worker.stop.ask()

    spy(monkeypatch, worker.steps, step, ask)
    summary = worker.run()
    assert (bool(asked), summary.end, leased()) == (True, End.INTERRUPTED, 0)
    assert set(LedgerRow.objects.values_list("delete_attempts", flat=True)) == {0}
    # Whoever comes next does the rest.
    assert new_worker().run().end is End.DRAINED
    assert states() == {"final": 7, "active": 1}
    assert check_invariants("default", store) == []


def test_a_stop_does_not_wait_for_all_repairs_of_a_page(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        make_source()
    LedgerRow.objects.update(state=RefState.RETIRED, next_delete_at=FUTURE)
    worker = new_worker()
    repaired: list[int] = []

    def ask() -> None:
        repaired.append(1)
        worker.stop.ask()

    spy(monkeypatch, worker.steps, "repair", ask)
    assert worker.run().end is End.INTERRUPTED
    assert (len(repaired), leased()) == (1, 0)
    assert not Round.objects.filter(completed_at__isnull=False).exists()


def test_a_stop_finishes_the_batches_at_hand(store: EncryptedStore, kfs_settings: Change) -> None:
    kfs_settings(LATE_WRITE_HORIZON=600)
    for _ in range(9):
        add_secret(store)
    worker = new_worker(batch_size=3)
    worker.progress = lambda _: worker.stop.ask()
    summary = worker.run()
    # The one that was settled, and the one that the store was at work on meanwhile.
    assert (summary.outcomes, summary.end) == ({Outcome.ERASED: 6}, End.INTERRUPTED)
    assert (states(), leased()) == ({"deleted": 6, "retired": 3}, 0)


def test_whatever_ends_a_run_gives_back_what_it_had(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        add_secret(store)
    worker = new_worker()

    def refuse() -> None:
        raise RuntimeError("made up")

    spy(monkeypatch, worker.steps, "settle", refuse)
    with pytest.raises(RuntimeError, match="made up"):
        worker.run()
    assert leased() == 0
    assert set(LedgerRow.objects.values_list("state", "delete_attempts")) == {("retired", 0)}
    assert worker.summary.outcomes == {Outcome.RELEASED: 5}


def test_who_is_stopped_before_it_begins_takes_nothing(store: EncryptedStore) -> None:
    add_secret(store)
    worker = new_worker()
    worker.stop.ask()
    assert worker.run().end is End.INTERRUPTED
    assert states() == {"retired": 1}

"""Every row that can come about ends, moves at a known time, or waits for a person: none is out of sight."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from django.db import IntegrityError
from django.db.models.functions import Now

from kfs_credentials.cleanup import Cleanup
from kfs_credentials.models import Attention, RefState, SecretObject, Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import (
    FUTURE,
    IN_STATE,
    PAST,
    SECRET,
    add_ref,
    bare_source,
    name_ref,
    pass_horizon,
    put_late,
    ref_of,
    scope_of,
)
from tests.cleanup.runs import erase_all, patrol, sweep
from tests.factories import SourceFactory, SpaceFactory
from tests.invariants import check_invariants
from tests.management.rows import JobFactory

pytestmark = pytest.mark.django_db(transaction=True)

NOBODY, IDLE, NAMES, JOB = "no source", "a source that names nothing", "a source that names it", "a live job"
MAY_BE = (
    "a job is not over",  # its candidate was retired under it: the backfill gives it a fresh one
    "a source has a ref without a ledger row that is active",  # a finding, where its object is gone
)


@dataclass
class Case:
    """One row, who is there for it, and what lies in the store."""

    situation: str
    owner: str
    has_object: bool
    claimed: bool = False
    attempts: int = 0
    attention: Attention | None = None
    abandoned: bool = False
    timeless: bool = False
    worker: str | None = None

    row: uuid.UUID = field(default_factory=uuid.uuid4)
    source: Source | None = None

    @property
    def can_be(self) -> bool:
        """Whether our own moves, the Node service's or an old writer's lead to it."""
        retired = self.situation.startswith("retired")
        # What the Node service claims shows by the row's state, and not in our own table before the sweep.
        shows_claim = self.situation.startswith(("deleting", "deleted", "final"))
        if not retired and not shows_claim and (self.claimed or self.attempts):
            return False
        if (self.attention or self.abandoned or self.timeless) and not retired:
            return False
        if (self.attention and self.abandoned) or (self.abandoned and not self.timeless):
            return False
        if self.attention in (Attention.DISPLACED, Attention.UNREADABLE) and not self.timeless:
            return False
        if self.attention == Attention.DISPLACED and not self.has_object:
            return False  # nobody erases it
        if self.attention == Attention.UNREADABLE and not self.claimed:
            return False
        # What was never claimed is in the store, once a source names it.
        never_claimed = not (self.claimed or self.attempts or shows_claim)
        return not (self.owner == NAMES and never_claimed and not self.has_object)


def cases() -> Iterator[Case]:
    """Yield every combination that can be."""
    for situation, owner, has_object, claimed, attempts in product(
        IN_STATE, (NOBODY, IDLE, NAMES, JOB), (True, False), (True, False), (0, 25)
    ):
        for attention, abandoned, timeless in product((None, *Attention), (False, True), (False, True)):
            workers = ("another#1", "another#7", "node") if situation.startswith("deleting") else (None,)
            for worker in workers:
                case = Case(situation, owner, has_object, claimed, attempts, attention, abandoned, timeless, worker)
                if case.can_be:
                    yield case


def build(case: Case, store: EncryptedStore, space: Any) -> None:
    """Insert what the case is about."""
    if case.owner != NOBODY:
        case.source = (
            SourceFactory.create(knowledge_space=space) if case.owner == JOB else bare_source(knowledge_space=space)
        )
    columns: dict[str, Any] = {"delete_attempts": case.attempts}
    if case.timeless:
        columns["next_delete_at"] = None
    if case.worker is not None:
        columns |= {"worker_id": case.worker, "lease_token": uuid.uuid4()}
    row = add_ref(case.source, case.situation, **columns)
    case.row = row.pk
    SecretObject.objects.filter(pk=row.credential_ref).update(
        first_claimed_at=PAST if case.claimed else None,
        attention=case.attention,
        abandoned_at=PAST if case.abandoned else None,
    )
    if case.owner == NAMES:
        assert case.source is not None
        name_ref(case.source, row.credential_ref)
    if case.owner == JOB:
        JobFactory.create(source=case.source, candidate_credential_ref=row.credential_ref, queued=True)
    if case.has_object:
        put_late(store, row)


def time_passes() -> None:
    """Let everything that waits for a moment have waited for it."""
    LedgerRow.objects.filter(lease_expires_at__isnull=False).update(lease_expires_at=PAST)
    LedgerRow.objects.update(recover_after=PAST)
    pass_horizon()


def is_settled(row: uuid.UUID) -> bool:
    """Whether the row is in use, kept for a live job, final, or parked with a reason."""
    ledger = LedgerRow.objects.get(pk=row)
    known = SecretObject.objects.get(pk=ledger.credential_ref)
    if ledger.state == RefState.ACTIVE:
        return Source.objects.filter(credential_ref=ledger.credential_ref, pk=ledger.source_id).exists()
    if ledger.state == RefState.RETIRED and ledger.next_delete_at is None:
        return known.attention is not None or known.abandoned_at is not None
    final = ledger.state == RefState.DELETED and ledger.next_delete_at is None
    return final or LedgerRow.objects.filter(pk=row).with_live_job().exists()


def test_every_row_comes_to_an_end_or_waits_for_a_person(steps: Cleanup, store: EncryptedStore) -> None:
    space = SpaceFactory.create()
    every = list(cases())
    assert len(every) > 500
    for case in every:
        build(case, store, space)
    for _ in range(3):
        time_passes()
        steps.reconcile(10_000)
        sweep(steps, 1000)
        erase_all(steps, 500)
        patrol(steps, 1000)
    time_passes()
    erase_all(steps, 500)
    assert [case for case in every if not is_settled(case.row)] == []
    lost = [
        case
        for case in every
        if case.owner == NAMES and case.has_object and store.get(scope_of(case.source), ref_of(case.source)) != SECRET  # type: ignore[arg-type]
    ]
    assert lost == []
    displaced = [case for case in every if case.attention == Attention.DISPLACED and case.owner in (IDLE, JOB)]
    assert displaced
    for case in displaced:
        row = LedgerRow.objects.get(pk=case.row)
        assert store.get(scope_of(case.source), row.credential_ref) == SECRET, case  # type: ignore[arg-type]
    assert [finding for finding in check_invariants("default", store) if not finding.startswith(MAY_BE)] == []


def test_every_moment_that_a_row_waits_for_is_known(steps: Cleanup) -> None:
    """What can be claimed now, or at a known time, is what counts as unfinished."""
    for situation in IN_STATE:
        add_ref(situation=situation)
    unfinished = {LedgerRow.objects.get(pk=row.pk).pk for row in LedgerRow.objects.unfinished()}
    ended = LedgerRow.objects.exclude(pk__in=unfinished)
    assert {(row.state, row.next_delete_at) for row in ended} == {(RefState.ACTIVE, None), (RefState.DELETED, None)}
    overdue = LedgerRow.objects.overdue().count()
    assert overdue == len([situation for situation in IN_STATE if situation.endswith(("due", "expired", "unused"))])
    _, soonest = LedgerRow.objects.all().ahead()
    assert soonest is not None
    assert soonest.total_seconds() < 0


LEASE = {"worker_id": "w", "lease_token": uuid.uuid4(), "lease_expires_at": FUTURE, "heartbeat_at": Now()}
FORBIDDEN: list[tuple[str, dict[str, Any]]] = [
    *((situation, {name: value}) for situation in ("retired", "deleted", "active") for name, value in LEASE.items()),
    *(("deleting", {name: None}) for name in LEASE),
    ("deleting", {"deleted_at": Now()}),
    ("deleted", {"deleted_at": None}),
    ("retired", {"deleted_at": Now()}),
    ("active", {"state": "unknown"}),
    ("retired", {"delete_attempts": -1}),
    ("active", {"source_version": 0}),
]


@pytest.mark.parametrize(("situation", "columns"), FORBIDDEN)
def test_the_database_refuses_the_other_combinations(situation: str, columns: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match="violates check constraint"):
        add_ref(situation=situation, **columns)

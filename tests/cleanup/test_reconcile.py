"""What was reserved and never used is taken back: in use, kept for a live job, or retired."""

from __future__ import annotations

from typing import Any

import pytest

from kfs_credentials.cleanup import Cleanup, Outcome
from kfs_credentials.keys import CLOSING, close_keys
from kfs_credentials.models import RefState, SecretObject, Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.repairs import Repair
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.conftest import Other
from tests.cleanup.rows import (
    PAST,
    add_ref,
    add_secret,
    bare_source,
    due_between,
    is_due,
    make_due,
    make_source,
    name_ref,
    ref_of,
    reread,
)
from tests.cleanup.runs import Change, Files, NewSteps, erase_all, sweep
from tests.factories import SourceFactory
from tests.management.rows import JobFactory
from tests.services.conftest import before_statement

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("situation", ["staged, unused", "candidate, unused"])
def test_a_reservation_that_nobody_used_is_retired_with_a_grace(
    steps: Cleanup, kfs_settings: Change, situation: str
) -> None:
    kfs_settings(ERASE_GRACE=100)
    row = add_ref(situation=situation)
    assert steps.reconcile(10) == {"retired": 1}
    after = reread(row)
    assert (after.state, after.row_version) == (RefState.RETIRED, row.row_version + 1)
    assert due_between(row, 99, 101)
    assert steps.reconcile(10) == {}


@pytest.mark.parametrize("situation", ["staged", "candidate"])
def test_a_reservation_that_may_still_be_used_is_left_alone(steps: Cleanup, situation: str) -> None:
    row = add_ref(situation=situation)
    assert steps.reconcile(10) == {}
    assert reread(row).state == row.state


def test_a_reservation_that_its_source_names_is_in_use(steps: Cleanup) -> None:
    source = bare_source(version=4)
    row = add_ref(source, "staged, unused")
    name_ref(source, row.credential_ref)
    assert steps.reconcile(10) == {"activated": 1}
    after = reread(row)
    assert (after.state, after.source_version, after.next_delete_at) == (RefState.ACTIVE, 4, None)


def test_a_version_that_the_ledger_forbids_is_left_out(steps: Cleanup) -> None:
    source = bare_source(version=0)
    row = add_ref(source, "staged, unused")
    name_ref(source, row.credential_ref)
    assert steps.reconcile(10) == {"activated": 1}
    assert reread(row).source_version is None


def test_a_reservation_that_another_source_names_is_neither_used_nor_retired(steps: Cleanup) -> None:
    source, stranger = bare_source(), bare_source()
    row = add_ref(source, "staged, unused")
    name_ref(stranger, row.credential_ref)
    assert steps.reconcile(10) == {"kept": 1}
    assert reread(row).state == RefState.STAGED
    assert sweep(steps) == (0, {Repair.MISPLACED: 1})


def test_a_reservation_under_a_closed_key_comes_into_use_once_it_was_moved(steps: Cleanup) -> None:
    source = bare_source()
    row = add_ref(source, "staged, unused")
    name_ref(source, row.credential_ref)
    SecretObject.objects.filter(pk=row.credential_ref).update(key_id="old")
    close_keys("default", ["old"], by="tests", primary="new")
    assert steps.reconcile(10) == {"kept": 1}
    assert reread(row).state == RefState.STAGED
    assert steps.reconcile(10) == {}, "it is not due again at once"
    LedgerRow.objects.filter(pk=row.pk).update(recover_after=PAST)
    SecretObject.objects.filter(pk=row.credential_ref).update(key_id="new")
    assert steps.reconcile(10) == {"activated": 1}


def test_a_key_cannot_be_closed_while_a_reservation_comes_into_use(steps: Cleanup, other: Other) -> None:
    """Whoever closes it waits, and then sees the ref in use."""
    source = bare_source()
    row = add_ref(source, "staged, unused")
    name_ref(source, row.credential_ref)
    closing = "SELECT pg_try_advisory_xact_lock(%s, 0)"
    tried: list[Any] = []
    with before_statement("UPDATE", lambda: tried.append(other.execute(closing, [CLOSING]).fetchone())):
        assert steps.reconcile(10) == {"activated": 1}
    assert tried == [(False,)]


@pytest.mark.parametrize("job", ["queued", "running"])
def test_a_candidate_of_a_live_job_is_looked_at_again_later(steps: Cleanup, kfs_settings: Change, job: str) -> None:
    kfs_settings(RECOVER_AFTER=200)
    source = SourceFactory.create()
    row = add_ref(source, "candidate, unused")
    JobFactory.create(source=source, candidate_credential_ref=row.credential_ref, **{job: True})
    assert steps.reconcile(10) == {"kept": 1}
    after = reread(row)
    assert after.state == RefState.CANDIDATE
    assert 199 <= (after.recover_after - after.updated_at).total_seconds() <= 201
    assert steps.reconcile(10) == {}, "it is not due again at once"


@pytest.mark.parametrize("job", ["succeeded", "failed"])
def test_a_candidate_of_a_job_that_is_over_is_retired(steps: Cleanup, job: str) -> None:
    source = SourceFactory.create()
    row = add_ref(source, "candidate, unused")
    JobFactory.create(source=source, candidate_credential_ref=row.credential_ref, run_state=job)
    assert steps.reconcile(10) == {"retired": 1}
    assert reread(row).state == RefState.RETIRED


def test_a_put_whose_writer_died_is_erased(
    steps: Cleanup, store: EncryptedStore, files: Files, kfs_settings: Change
) -> None:
    kfs_settings(ERASE_GRACE=0)
    row = add_secret(store, bare_source(), "staged, unused")
    assert len(files()) == 1
    assert steps.reconcile(10) == {"retired": 1}
    assert erase_all(steps) == {Outcome.ERASED: 1}
    assert files() == []
    assert reread(row).state == RefState.DELETED


def test_not_more_than_the_limit_and_oldest_first(steps: Cleanup) -> None:
    late, early = add_ref(situation="staged, unused"), add_ref(situation="staged, unused")
    LedgerRow.objects.filter(pk=late.pk).update(recover_after=PAST)
    assert steps.reconcile(1) == {"retired": 1}
    assert [reread(row).state for row in (early, late)] == [RefState.RETIRED, RefState.STAGED]


def test_a_row_that_somebody_holds_is_passed_over(steps: Cleanup, other: Other) -> None:
    held, free = add_ref(situation="staged, unused"), add_ref(situation="staged, unused")
    other.execute("SELECT FROM source_secret_lifecycle_refs WHERE id = %s FOR NO KEY UPDATE", [held.pk])
    assert steps.reconcile(10) == {"retired": 1}
    assert [reread(row).state for row in (held, free)] == [RefState.STAGED, RefState.RETIRED]


def test_only_the_tenant_and_the_space_that_were_asked_for(new_steps: NewSteps) -> None:
    ours, theirs = add_ref(situation="staged, unused"), add_ref(situation="staged, unused", tenant_id="tenant-b")
    assert new_steps(tenant="tenant-b").reconcile(10) == {"retired": 1}
    assert [reread(row).state for row in (ours, theirs)] == [RefState.STAGED, RefState.RETIRED]
    assert new_steps(space=ours.knowledge_space_id).reconcile(10) == {"retired": 1}


def test_active_refs_and_live_candidates_are_never_erased(steps: Cleanup, store: EncryptedStore, files: Files) -> None:
    source, waiting = make_source(), SourceFactory.create()
    candidate = add_secret(store, waiting, "candidate, unused")
    JobFactory.create(source=waiting, candidate_credential_ref=candidate.credential_ref, queued=True)
    assert steps.reconcile(10) == {"kept": 1}
    assert sweep(steps) == (0, {})
    assert steps.claim(10) is None
    assert len(files()) == 2
    assert Source.objects.filter(credential_ref=ref_of(source)).exists()


def test_the_grace_counts_before_the_erasure(steps: Cleanup, store: EncryptedStore, kfs_settings: Change) -> None:
    kfs_settings(ERASE_GRACE=600)
    row = add_secret(store, None, "staged, unused")
    steps.reconcile(10)
    assert not is_due(row)
    assert steps.claim(10) is None
    make_due(row.credential_ref)
    assert erase_all(steps) == {Outcome.ERASED: 1}

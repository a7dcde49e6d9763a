"""What becomes of the ref that a source named before, whatever state it is in, and of its jobs."""

from __future__ import annotations

import pytest
from django.utils import timezone

from kfs_credentials.backfill import Backfill
from kfs_credentials.models import (
    KnowledgeSpace,
    RefError,
    RefState,
    RunState,
    SecretObject,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from kfs_credentials.models.secret_object import Attention
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory
from tests.invariants import check_invariants
from tests.services.conftest import (
    NEW,
    OLD,
    TENANT,
    Files,
    execute,
    put,
    resolve,
    rotate,
    row_of,
    set_state,
    states,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    ("state", "after"),
    [
        ("staged", "retired"),
        ("candidate", "retired"),
        ("retired", "retired"),
        ("deleting", "deleting"),
        ("deleted", "deleted"),
    ],
)
def test_a_source_is_repaired_whatever_state_its_ref_is_in(source: Source, state: str, after: str) -> None:
    """What nobody may use any more stays on its way to erasure, as it was."""
    set_state(source.credential_ref, state)
    before = row_of(source.credential_ref)
    assert rotate(source).version == 2
    old = row_of(source.credential_ref)
    assert (old.state, old.row_version) == (after, before.row_version + (state in ("staged", "candidate")))
    assert old.next_delete_at is not None or state == after
    assert resolve(source) == NEW


def test_a_ref_that_the_ledger_does_not_know_is_erased_too(source: Source, store: EncryptedStore, files: Files) -> None:
    SourceSecretLifecycleRef.objects.all().delete()
    SecretObject.objects.all().delete()
    rotate(source)
    old, held = row_of(source.credential_ref), SecretObject.objects.get(pk=source.credential_ref)
    assert (old.state, old.tenant_id, old.source_id) == (RefState.RETIRED, TENANT, source.pk)
    assert old.next_delete_at is not None
    assert (held.store, held.key_id, held.size) == ("default", None, None)
    assert check_invariants("default", store) == []


def test_what_is_no_ref_has_no_object_and_needs_no_row(source: Source) -> None:
    SourceSecretLifecycleRef.objects.all().delete()
    execute("UPDATE sources SET credential_ref = 'nonsense'")
    rotate(source)
    assert (states(), resolve(source)) == (["active"], NEW)


def test_a_ref_of_somebody_else_is_left_alone(source: Source, store: EncryptedStore, space: KnowledgeSpace) -> None:
    """A mistake somewhere let a source name another's ref."""
    thief = SourceFactory.create(knowledge_space=space, bare=True)
    execute("UPDATE sources SET credential_ref = NULL WHERE id = %s", source.pk)
    execute("UPDATE sources SET credential_ref = %s WHERE id = %s", source.credential_ref, thief.pk)
    rotate(thief)
    execute("UPDATE sources SET credential_ref = %s WHERE id = %s", source.credential_ref, source.pk)
    assert (row_of(source.credential_ref).state, resolve(source)) == (RefState.ACTIVE, OLD)


def test_a_displaced_ref_that_waited_for_a_person_is_let_go(source: Source) -> None:
    SourceSecretLifecycleRef.objects.all().keep(RefError.DISPLACED)
    SecretObject.objects.all().mark([str(source.credential_ref)], Attention.DISPLACED)
    rotate(source)
    old = row_of(source.credential_ref)
    assert (old.state, old.last_error_code) == (RefState.RETIRED, None)
    assert old.next_delete_at is not None
    assert SecretObject.objects.needing_attention().count() == 0


def test_an_abandoned_ref_is_not_erased_after_all(source: Source) -> None:
    """A person said that it is not to be tried again."""
    SourceSecretLifecycleRef.objects.all().keep(RefError.ABANDONED)
    SecretObject.objects.update(abandoned_at=timezone.now(), abandoned_by="somebody", abandoned_reason="store is gone")
    rotate(source)
    old = row_of(source.credential_ref)
    assert (old.next_delete_at, old.last_error_code) == (None, RefError.ABANDONED)


# Jobs of the backfill.


def test_a_failed_job_is_over(space: KnowledgeSpace, steps: Backfill) -> None:
    """There is nothing left that it could move, and nobody has to retry it."""
    source = SourceFactory.create(knowledge_space=space)
    put(steps)
    SourceCredentialBackfill.objects.update(
        run_state=RunState.FAILED,
        completed_at=timezone.now(),
        last_error_code="SOURCE_SECRET_TOO_LARGE",
        last_error_message="x",
        **dict.fromkeys(("worker_id", "lease_token", "lease_expires_at", "heartbeat_at")),
    )
    execute("UPDATE source_secret_lifecycle_refs SET state = 'retired', next_delete_at = now()")
    rotate(source)
    job = SourceCredentialBackfill.objects.get()
    assert (job.run_state, job.last_error_code, job.last_error_message) == (RunState.SUCCEEDED, None, None)

"""A ref that no source names any more is retired, by whatever way that came about; one that is named never is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import connection

from kfs_credentials import services
from kfs_credentials.cleanup import Cleanup, Outcome
from kfs_credentials.models import Attention, KnowledgeSpace, RefError, RefState, SecretObject, Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.repairs import Repair
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.conftest import Other
from tests.cleanup.rows import (
    IN_STATE,
    PAST,
    add_ref,
    add_secret,
    due_between,
    in_database,
    known,
    make_due,
    make_source,
    name_ref,
    of_ref,
    ref_of,
    reread,
    scope_of,
)
from tests.cleanup.runs import Change, Files, NewSteps, erase_all, sweep
from tests.factories import SourceFactory, SpaceFactory
from tests.invariants import check_invariants
from tests.management.rows import JobFactory

pytestmark = pytest.mark.django_db(transaction=True)


def made_anew(source: Source) -> None:
    """Delete a source, and make another one of the same id, without a ref."""
    in_database("DELETE FROM sources WHERE id = %s", source.pk)
    SourceFactory.create(pk=source.pk, knowledge_space=source.knowledge_space, bare=True)


def cascade(source: Source) -> None:
    """Delete the source's space, past the package."""
    in_database("DELETE FROM knowledge_spaces WHERE id = %s", source.knowledge_space_id)


WAYS: dict[str, Callable[[Source], object]] = {
    "the service": lambda source: services.delete_source(tenant="tenant-a", source_id=source.pk),
    "the service, its space": lambda source: services.delete_knowledge_space(
        tenant="tenant-a", space_id=source.knowledge_space_id
    ),
    "model.delete()": lambda source: source.delete(),
    "queryset.delete()": lambda source: Source.objects.filter(pk=source.pk).delete(),
    "raw SQL": lambda source: in_database("DELETE FROM sources WHERE id = %s", source.pk),
    "a cascade": cascade,
    "queryset.delete(), its space": lambda source: (
        Source.objects.filter(knowledge_space=source.knowledge_space_id).delete(),
        KnowledgeSpace.objects.filter(pk=source.knowledge_space_id).delete(),
    ),
    "TRUNCATE": lambda _: in_database("TRUNCATE knowledge_spaces CASCADE"),
    "its tenant": lambda source: in_database(
        "DELETE FROM knowledge_spaces WHERE tenant_id = %s", source.knowledge_space.tenant_id
    ),
    "set to NULL": lambda source: name_ref(source, None),
    "made anew": made_anew,
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_way_a_source_went_its_secret_is_erased_and_no_other(
    steps: Cleanup, store: EncryptedStore, files: Files, kfs_settings: Change, way: str
) -> None:
    kfs_settings(ERASE_GRACE=0, LATE_WRITE_HORIZON=0)
    other_tenant = SpaceFactory.create(tenant_id="tenant-b")
    gone = make_source()
    kept = [] if way == "TRUNCATE" else [make_source(other_tenant)]
    ref = ref_of(gone)
    WAYS[way](gone)
    sweep(steps)
    assert of_ref(ref).state == RefState.RETIRED
    assert erase_all(steps) == {Outcome.ERASED: 1, Outcome.CONFIRMED: 1}
    assert len(files()) == len(kept)
    assert check_invariants("default", store) == []
    for source in kept:
        assert services.resolve_credentials(tenant="tenant-b", source_id=source.pk) == {"token": "made-up"}


def test_what_was_swept_is_erased_after_the_grace(steps: Cleanup, kfs_settings: Change) -> None:
    source = make_source()
    kfs_settings(ERASE_GRACE=100)
    ref = ref_of(source)
    source.delete()
    assert sweep(steps) == (1, {})
    assert due_between(of_ref(ref), 99, 101)
    assert sweep(steps) == (0, {}), "it is retired once"


def test_a_candidate_whose_job_went_by_cascade_is_erased_too(
    steps: Cleanup, store: EncryptedStore, files: Files, kfs_settings: Change
) -> None:
    kfs_settings(ERASE_GRACE=0, LATE_WRITE_HORIZON=0)
    source = SourceFactory.create()
    row = add_secret(store, source, "candidate, unused")
    JobFactory.create(source=source, candidate_credential_ref=row.credential_ref, queued=True)
    cascade(source)
    assert sweep(steps) == (0, {}), "a reservation is reconciled, not swept"
    assert steps.reconcile(10) == {"retired": 1}
    assert erase_all(steps) == {Outcome.ERASED: 1, Outcome.CONFIRMED: 1}
    assert files() == []


def test_a_source_that_is_locked_is_no_source_that_is_gone(steps: Cleanup, other: Other) -> None:
    source = make_source()
    other.execute("SELECT FROM sources WHERE id = %s FOR UPDATE", [source.pk])
    assert sweep(steps) == (0, {})
    assert of_ref(ref_of(source)).state == RefState.ACTIVE


def test_a_ledger_row_that_somebody_holds_is_passed_over(steps: Cleanup, other: Other) -> None:
    sources = [make_source(), make_source()]
    held, free = map(ref_of, sources)
    in_database("DELETE FROM sources")
    other.execute("SELECT FROM source_secret_lifecycle_refs WHERE credential_ref = %s FOR NO KEY UPDATE", [held])
    assert sweep(steps)[0] == 1
    assert [of_ref(ref).state for ref in (held, free)] == [RefState.ACTIVE, RefState.RETIRED]
    other.rollback()
    assert sweep(steps)[0] == 1


def test_not_while_its_source_names_a_ref_that_is_not_active(steps: Cleanup, store: EncryptedStore) -> None:
    source = make_source()
    newer = ref_of(source)
    older = add_ref(source, "deleted, due")
    name_ref(source, older.credential_ref)
    assert sweep(steps) == (0, {Repair.UNREADABLE: 1})
    assert of_ref(newer).state == RefState.ACTIVE, "it may be the only secret that the source has"
    assert store.get(scope_of(source), newer) == {"token": "made-up"}


def test_not_while_its_source_names_a_ref_that_nobody_knows(steps: Cleanup) -> None:
    source = make_source()
    newer = ref_of(source)
    name_ref(source, "source-secret:v1:00000000-0000-4000-8000-000000000000")
    assert sweep(steps) == (0, {Repair.UNREADABLE: 1})
    assert of_ref(newer).state == RefState.ACTIVE


def test_not_while_its_source_names_a_ref_of_another_source(steps: Cleanup) -> None:
    source, stranger = make_source(), make_source()
    own, foreign = ref_of(source), ref_of(stranger)
    name_ref(stranger, None)
    name_ref(source, foreign)
    assert sweep(steps) == (0, {Repair.MISPLACED: 1})
    assert {of_ref(ref).state for ref in (own, foreign)} == {RefState.ACTIVE}
    name_ref(source, own)
    assert sweep(steps) == (1, {}), "put right, the foreign one is nobody's"
    assert of_ref(foreign).state == RefState.RETIRED


def test_a_newer_ref_is_kept_though_the_older_one_was_never_retired(steps: Cleanup, store: EncryptedStore) -> None:
    """Set to NULL, rotated, and saved from a stale copy, all before a sweep: both refs are active."""
    source = make_source()
    older = ref_of(source)
    name_ref(source, None)
    rotated = services.rotate_credentials(tenant="tenant-a", source_id=source.pk, credentials={"token": "newer"})
    newer = rotated.credential_ref or ""
    name_ref(source, older)
    assert sweep(steps) == (1, {})
    assert (of_ref(older).state, of_ref(newer).state) == (RefState.ACTIVE, RefState.RETIRED)
    assert (of_ref(newer).next_delete_at, of_ref(newer).last_error_code) == (None, RefError.DISPLACED)
    assert known(newer).attention == Attention.DISPLACED
    assert store.get(scope_of(source), newer) == {"token": "newer"}
    assert sweep(steps) == (0, {}), "it waits for a person"
    assert check_invariants("default", store) == []


def test_a_newer_ref_is_kept_though_the_older_one_was_activated_last(steps: Cleanup, store: EncryptedStore) -> None:
    """It was named when the ledger had only reserved it: by a writer that died, and later by a stale save."""
    source = make_source()
    older = ref_of(source)
    LedgerRow.objects.update(state=RefState.STAGED, source_version=None, recover_after=PAST)
    name_ref(source, None)
    rotated = services.rotate_credentials(tenant="tenant-a", source_id=source.pk, credentials={"token": "newer"})
    newer = rotated.credential_ref or ""
    name_ref(source, older)
    assert steps.reconcile(10) == {"activated": 1}
    assert of_ref(older).updated_at > of_ref(newer).updated_at
    assert sweep(steps) == (1, {})
    assert (of_ref(newer).state, of_ref(newer).last_error_code) == (RefState.RETIRED, RefError.DISPLACED)
    assert store.get(scope_of(source), newer) == {"token": "newer"}
    assert check_invariants("default", store) == []


def test_an_older_ref_is_not_kept_for_a_person(steps: Cleanup) -> None:
    """Set to NULL and rotated before a sweep: the ref that is named came into use last."""
    source = make_source()
    older = ref_of(source)
    name_ref(source, None)
    rotated = services.rotate_credentials(tenant="tenant-a", source_id=source.pk, credentials={"token": "newer"})
    assert sweep(steps) == (1, {})
    assert of_ref(older).next_delete_at is not None
    assert known(older).attention is None
    assert of_ref(rotated.credential_ref or "").state == RefState.ACTIVE


def test_a_space_that_moved_to_another_tenant_is_reported_and_nothing_is_erased(
    steps: Cleanup, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_source()
    in_database("UPDATE knowledge_spaces SET tenant_id = 'tenant-b'")
    assert sweep(steps) == (0, {Repair.MISPLACED: 1})
    assert of_ref(ref_of(source)).state == RefState.ACTIVE
    assert len(files()) == 1
    assert f"source {source.pk} of tenant tenant-b names ref" in caplog.text


def test_pages_of_one_see_every_row(steps: Cleanup) -> None:
    sources = [make_source() for _ in range(4)]
    in_database("DELETE FROM sources WHERE id = ANY (%s)", [source.pk for source in sources[:3]])
    name_ref(sources[3], "source-secret:v1:00000000-0000-4000-8000-000000000000")
    assert sweep(steps, limit=1) == (3, {Repair.UNREADABLE: 1})


def test_only_the_tenant_and_the_space_that_were_asked_for(new_steps: NewSteps) -> None:
    ours, theirs = make_source(), make_source(SpaceFactory.create(tenant_id="tenant-b"))
    refs = [ref_of(ours), ref_of(theirs)]
    in_database("DELETE FROM sources")
    assert sweep(new_steps(tenant="tenant-b"))[0] == 1
    assert [of_ref(ref).state for ref in refs] == [RefState.ACTIVE, RefState.RETIRED]
    assert sweep(new_steps(space=ours.knowledge_space_id))[0] == 1


def test_what_the_node_service_reserved_becomes_known(steps: Cleanup) -> None:
    row = add_ref(make_source(), "staged")
    SecretObject.objects.filter(pk=row.credential_ref).delete()
    sweep(steps)
    assert known(row.credential_ref).store == "default"


def test_a_retired_ref_without_a_time_gets_one(steps: Cleanup) -> None:
    row = add_ref(situation="retired", next_delete_at=None)
    assert sweep(steps) == (1, {})
    assert reread(row).next_delete_at is not None


def test_one_that_waits_for_a_person_gets_none(steps: Cleanup) -> None:
    source = make_source()
    displaced = add_ref(source, "retired", next_delete_at=None)
    SecretObject.objects.filter(pk=displaced.credential_ref).update(attention=Attention.DISPLACED)
    abandoned = add_ref(source, "retired", next_delete_at=None)
    SecretObject.objects.filter(pk=abandoned.credential_ref).update(
        abandoned_at=abandoned.created_at, abandoned_by="somebody", abandoned_reason="the bucket is gone"
    )
    assert sweep(steps) == (0, {})
    assert {reread(row).next_delete_at for row in (displaced, abandoned)} == {None}


@pytest.mark.parametrize("attention", [Attention.DISPLACED, Attention.UNREADABLE])
def test_where_there_is_nothing_to_choose_any_more_it_is_erased(
    steps: Cleanup, store: EncryptedStore, files: Files, kfs_settings: Change, attention: Attention
) -> None:
    kfs_settings(ERASE_GRACE=0)
    row = add_secret(store, situation="retired", next_delete_at=None, last_error_code=RefError.DISPLACED)
    SecretObject.objects.filter(pk=row.credential_ref).update(attention=attention)
    assert sweep(steps) == (1, {}), "its source is gone"
    assert known(row.credential_ref).attention is None
    assert erase_all(steps) == {Outcome.ERASED: 1}
    assert files() == []


def test_a_ref_that_nobody_can_have_made_is_swept_like_any_other(steps: Cleanup) -> None:
    odd = [add_ref(situation="active", credential_ref=ref) for ref in ("C:\\x\\y", "\\x4", "é", "", " ")]
    SecretObject.objects.all().delete()
    assert sweep(steps) == (len(odd), {})
    assert SecretObject.objects.count() == len(odd)


def test_a_source_that_names_an_empty_text_is_found(steps: Cleanup, caplog: pytest.LogCaptureFixture) -> None:
    source = make_source()
    name_ref(source, "")
    assert sweep(steps, limit=1) == (0, {Repair.UNREADABLE: 1})
    assert "names ref (not a ref: it is not shown), which is unreadable" in caplog.text


def test_a_page_locks_nothing_that_is_as_it_should_be(steps: Cleanup, other: Other) -> None:
    source = make_source()
    with connection.cursor() as cursor:
        cursor.execute("SELECT xmin::text, xmax::text FROM source_secret_lifecycle_refs")
        before = cursor.fetchall()
        sweep(steps)
        cursor.execute("SELECT xmin::text, xmax::text FROM source_secret_lifecycle_refs")
        assert cursor.fetchall() == before
    assert of_ref(ref_of(source)).state == RefState.ACTIVE


def test_a_secret_that_comes_back_before_its_erasure_is_not_erased(steps: Cleanup, store: EncryptedStore) -> None:
    source = make_source()
    ref = ref_of(source)
    name_ref(source, None)
    assert sweep(steps)[0] == 1
    name_ref(source, ref)
    make_due(ref)
    erasure = steps.claim(10)
    assert erasure is not None
    assert (erasure.items, erasure.in_use) == ([], [ref])
    assert steps.repair(ref) == Repair.REINSTATED
    assert of_ref(ref).state == RefState.ACTIVE


@pytest.mark.parametrize("situation", [situation for situation in IN_STATE if situation != "active"])
def test_only_what_is_in_use_is_retired(steps: Cleanup, situation: str) -> None:
    row = add_ref(situation=situation)
    assert sweep(steps) == (0, {})
    assert (reread(row).state, reread(row).row_version) == (row.state, row.row_version)

"""A ref that was ever claimed for erasure never becomes active again: who names it gets a copy, or is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kfs_credentials import services
from kfs_credentials.cleanup import Cleanup, Erasure, Outcome
from kfs_credentials.errors import SecretNotFound
from kfs_credentials.models import Attention, RefError, RefState, SecretObject, Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.repairs import Repair
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.conftest import Other
from tests.cleanup.rows import (
    IN_STATE,
    PAST,
    SECRET,
    add_ref,
    add_secret,
    bare_source,
    in_database,
    known,
    make_due,
    make_source,
    name_ref,
    of_ref,
    pass_horizon,
    put_late,
    ref_of,
    reread,
    scope_of,
)
from tests.cleanup.runs import Change, Files, NewSteps, claim, delete, erase, erase_all, sweep
from tests.invariants import check_invariants
from tests.services.conftest import before_statement, elsewhere

pytestmark = pytest.mark.django_db(transaction=True)

CLAIMED = {
    "retired, claimed before": "retired, due",
    "deleting, with a live lease": "deleting",
    "deleting, its lease expired": "deleting, expired",
    "deleted": "deleted",
    "deleted, due": "deleted, due",
    "final": "final",
}


def claimed_ref(source: Source, store: EncryptedStore, situation: str) -> LedgerRow:
    """Insert a ref that was claimed for erasure, with an object that can still be read, and let the source name it."""
    row = add_secret(store, source, CLAIMED[situation])
    SecretObject.objects.filter(pk=row.credential_ref).update(first_claimed_at=PAST)
    name_ref(source, row.credential_ref)
    return row


@pytest.mark.parametrize("situation", CLAIMED)
def test_a_source_gets_a_copy_under_a_fresh_ref(steps: Cleanup, store: EncryptedStore, situation: str) -> None:
    source = bare_source()
    row = claimed_ref(source, store, situation)
    assert sweep(steps)[1] == {Repair.RESCUED: 1}
    fresh = ref_of(source)
    assert fresh != row.credential_ref
    assert of_ref(fresh).state == RefState.ACTIVE
    assert of_ref(fresh).source_version == source.version + 1
    assert known(fresh).size == len('{"token":"made-up"}')
    assert store.get(scope_of(source), fresh) == SECRET
    assert reread(row).state == row.state, "the claimed one stays what it was"
    assert sweep(steps)[1] == {}


@pytest.mark.parametrize("situation", CLAIMED)
def test_it_is_reported_if_its_object_is_gone(
    steps: Cleanup, store: EncryptedStore, situation: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = bare_source()
    row = claimed_ref(source, store, situation)
    store.delete(scope_of(source), row.credential_ref)
    assert sweep(steps)[1] == {Repair.UNREADABLE: 1}
    assert ref_of(source) == row.credential_ref
    assert reread(row).state != RefState.ACTIVE
    assert f"source {source.pk} of tenant tenant-a names ref source-secret:v1:" in caplog.text
    assert row.credential_ref not in caplog.text, "the log has only its start"
    assert "which is unreadable: rotate its credentials, or choose the newer ref in the admin" in caplog.text
    with pytest.raises(SecretNotFound):
        services.resolve_credentials(tenant="tenant-a", source_id=source.pk)


@pytest.mark.parametrize("situation", [name for name in CLAIMED if "deleting" not in name])
def test_what_is_reported_waits_for_a_person_and_is_not_due(
    steps: Cleanup, store: EncryptedStore, situation: str, kfs_settings: Change
) -> None:
    kfs_settings(ERASE_GRACE=0, LATE_WRITE_HORIZON=0)
    source = bare_source()
    row = claimed_ref(source, store, situation)
    store.delete(scope_of(source), row.credential_ref)
    sweep(steps)
    after = reread(row)
    assert (after.state, after.next_delete_at, after.deleted_at) == (RefState.RETIRED, None, None)
    assert after.last_error_code == RefError.UNREADABLE
    assert known(row.credential_ref).attention == Attention.UNREADABLE
    assert sweep(steps) == (0, {Repair.UNREADABLE: 1}), "it is reported as long as it is so"
    assert reread(row).row_version == after.row_version, "and not written again"
    services.rotate_credentials(tenant="tenant-a", source_id=source.pk, credentials=SECRET)
    sweep(steps)
    assert known(row.credential_ref).attention is None
    erase_all(steps)
    assert reread(row).state == RefState.DELETED
    assert check_invariants("default", store) == []


@pytest.mark.parametrize("situation", ["deleting, expired", "deleted, due"])
def test_what_the_node_service_is_erasing_stays_known_when_its_claim_is_taken_from_it(
    steps: Cleanup, store: EncryptedStore, situation: str
) -> None:
    source = bare_source()
    row = add_secret(store, source, situation, **({"worker_id": "node-worker"} if "deleting" in situation else {}))
    SecretObject.objects.all().delete()  # it writes no such row
    name_ref(source, row.credential_ref)
    assert claim(steps).items == []
    assert known(row.credential_ref).first_claimed_at is not None
    assert steps.repair(row.credential_ref) is Repair.RESCUED, "it may still be at it"


def test_what_the_node_service_has_erased_is_not_in_use_again_after_a_report(
    steps: Cleanup, store: EncryptedStore
) -> None:
    source = bare_source()
    row = add_ref(source, "deleted")
    SecretObject.objects.all().delete()
    name_ref(source, row.credential_ref)
    for _ in range(2):
        assert sweep(steps) == (0, {Repair.UNREADABLE: 1})
        assert reread(row).state == RefState.RETIRED


@pytest.mark.parametrize("attempts", [0, 3])
def test_what_the_node_service_claimed_is_known_by_its_attempts(
    steps: Cleanup, store: EncryptedStore, attempts: int
) -> None:
    source = bare_source()
    row = add_secret(store, source, "retired, due", delete_attempts=attempts)
    name_ref(source, row.credential_ref)
    assert steps.repair(row.credential_ref) is (Repair.RESCUED if attempts else Repair.REINSTATED)


def test_the_newer_ref_is_kept_beside_the_copy(steps: Cleanup, store: EncryptedStore) -> None:
    source = make_source(secret={"token": "made-up, newer"})
    newer = ref_of(source)
    row = claimed_ref(source, store, "retired, claimed before")
    assert sweep(steps) == (0, {Repair.RESCUED: 1})
    kept = of_ref(newer)
    assert (kept.state, kept.next_delete_at, kept.last_error_code) == (RefState.RETIRED, None, RefError.DISPLACED)
    assert store.get(scope_of(source), newer) == {"token": "made-up, newer"}
    assert store.get(scope_of(source), ref_of(source)) == SECRET
    assert erase(steps) == {Outcome.ERASED: 1}
    assert reread(row).state == RefState.DELETED
    assert check_invariants("default", store) == []


def test_what_lies_in_clear_beside_it_is_left_alone(steps: Cleanup, store: EncryptedStore) -> None:
    source = bare_source()
    row = claimed_ref(source, store, "deleted")
    in_database("""UPDATE sources SET metadata = '{"credentials": {"token": "made-up, in clear"}}'""")
    assert steps.repair(row.credential_ref) is Repair.RESCUED
    assert Source.objects.values_list("metadata", flat=True).get() == {"credentials": {"token": "made-up, in clear"}}


def test_a_late_write_that_its_source_names_is_rescued_and_not_erased(
    steps: Cleanup, store: EncryptedStore, kfs_settings: Change
) -> None:
    kfs_settings(ERASE_GRACE=0, LATE_WRITE_HORIZON=0)
    source = bare_source()
    row = claimed_ref(source, store, "deleted")
    make_due()
    erasure = claim(steps)
    assert (erasure.items, erasure.in_use) == ([], [row.credential_ref])
    assert steps.repair(row.credential_ref) is Repair.RESCUED
    make_due()
    assert erase_all(steps)[Outcome.ERASED] == 1
    assert services.resolve_credentials(tenant="tenant-a", source_id=source.pk) == SECRET


def test_an_expired_claim_of_a_ref_in_use_is_given_back(steps: Cleanup, store: EncryptedStore) -> None:
    source = bare_source()
    row = claimed_ref(source, store, "deleting, its lease expired")
    erasure = claim(steps)
    assert (erasure.items, erasure.in_use) == ([], [row.credential_ref])
    after = reread(row)
    assert (after.state, after.worker_id, after.lease_token) == (RefState.RETIRED, None, None)
    assert steps.claim(10) is None


def test_a_rescue_between_the_claim_and_a_late_delete_keeps_the_secret(
    steps: Cleanup, new_steps: NewSteps, store: EncryptedStore, files: Files
) -> None:
    source = bare_source()
    row = add_secret(store, source, "retired, due")
    late = claim(steps)
    name_ref(source, row.credential_ref)  # an old writer, after the eraser has looked
    assert sweep(new_steps(worker="another")) == (0, {Repair.RESCUED: 1})
    delete(steps, late)
    assert steps.settle(late) == {Outcome.ERASED: 1}
    assert len(files()) == 1
    assert services.resolve_credentials(tenant="tenant-a", source_id=source.pk) == SECRET
    assert sweep(steps) == (0, {})


def test_a_ref_that_is_erased_under_the_rescue_is_reported(
    steps: Cleanup, new_steps: NewSteps, store: EncryptedStore
) -> None:
    source = bare_source()
    row = add_secret(store, source, "retired, due")
    late = claim(steps)
    name_ref(source, row.credential_ref)
    delete(steps, late)
    assert new_steps(worker="another").repair(row.credential_ref) is Repair.UNREADABLE
    assert steps.settle(late) == {Outcome.ERASED: 1}, "the eraser's row is its own until it has settled"
    assert steps.repair(row.credential_ref) is Repair.UNREADABLE
    assert known(row.credential_ref).attention == Attention.UNREADABLE


def test_an_erasure_that_is_claimed_meanwhile_is_not_disturbed_by_a_report(
    steps: Cleanup, new_steps: NewSteps, store: EncryptedStore
) -> None:
    source = bare_source()
    row = claimed_ref(source, store, "retired, claimed before")
    store.delete(scope_of(source), row.credential_ref)

    def another_worker_claims() -> None:
        LedgerRow.objects.filter(pk=row.pk).update(**IN_STATE["deleting"])

    with before_statement("FOR NO KEY UPDATE", lambda: elsewhere(another_worker_claims)):
        assert steps.repair(row.credential_ref) is Repair.UNREADABLE
    assert reread(row).state == RefState.DELETING
    assert known(row.credential_ref).attention is None


CHANGES: dict[str, Callable[[Source], object]] = {
    "rotated": lambda source: services.rotate_credentials(
        tenant="tenant-a", source_id=source.pk, credentials={"token": "made-up, newest"}
    ),
    "revoked": lambda source: services.revoke_credentials(tenant="tenant-a", source_id=source.pk),
    "deleted": lambda source: services.delete_source(tenant="tenant-a", source_id=source.pk),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_user_changes_during_the_copy_stands(
    steps: Cleanup, store: EncryptedStore, kfs_settings: Change, change: str
) -> None:
    kfs_settings(RECOVER_AFTER=0, ERASE_GRACE=0)
    source = bare_source()
    row = claimed_ref(source, store, "deleted")
    with before_statement("src.credential_ref, src.status\n", lambda: elsewhere(lambda: CHANGES[change](source))):
        assert steps.repair(row.credential_ref) is Repair.LATER
    named = Source.objects.filter(pk=source.pk).values_list("credential_ref", flat=True).first()
    if change == "rotated":
        assert named is not None
        assert store.get(scope_of(source), named) == {"token": "made-up, newest"}
    else:
        assert named is None
    steps.reconcile(10)
    copy = LedgerRow.objects.exclude(credential_ref__in=[row.credential_ref, named or ""])
    assert [one.state for one in copy] == [RefState.RETIRED], "it is taken back"


def test_a_source_whose_rows_are_held_is_left_for_later(steps: Cleanup, store: EncryptedStore, other: Other) -> None:
    source = bare_source()
    row = claimed_ref(source, store, "deleted")
    other.execute("SELECT FROM sources FOR UPDATE")
    assert steps.repair(row.credential_ref) is Repair.LATER
    other.rollback()
    assert steps.repair(row.credential_ref) is Repair.RESCUED


@pytest.fixture
def deletions(transactional_db: None) -> Iterator[None]:
    """The table in which later versions of knowledge-fs note their deletions."""
    in_database("CREATE TABLE deletion_jobs (target_id uuid, active_slot int)")
    yield
    in_database("DROP TABLE deletion_jobs")


@pytest.mark.parametrize("how", ["by its status", "by a deletion job of it", "by one of its space"])
@pytest.mark.usefixtures("deletions")
def test_a_source_that_is_being_deleted_gets_no_new_secret(
    steps: Cleanup, store: EncryptedStore, files: Files, how: str
) -> None:
    source = bare_source(status=Source.DELETING if how == "by its status" else "active")
    row = claimed_ref(source, store, "deleted")
    if "job" in how or "space" in how:
        target = source.knowledge_space_id if "space" in how else source.pk
        in_database("INSERT INTO deletion_jobs VALUES (%s, 1)", target)
    assert steps.repair(row.credential_ref) is Repair.LATER
    assert len(files()) == 1
    assert LedgerRow.objects.count() == 1, "nothing was reserved"


def test_a_secret_above_the_limit_of_now_is_reported_and_stays(
    steps: Cleanup, store: EncryptedStore, kfs_settings: Change
) -> None:
    source = bare_source()
    row = claimed_ref(source, store, "retired, claimed before")
    kfs_settings(MAX_SECRET_BYTES=10)
    assert steps.repair(row.credential_ref) is Repair.UNREADABLE
    assert store.get(scope_of(source), row.credential_ref) == SECRET
    make_due()
    assert steps.claim(10) is None


def test_a_scope_or_ref_that_cannot_be_is_reported(steps: Cleanup) -> None:
    malformed = bare_source()
    add_ref(malformed, "deleted", credential_ref="no-ref")
    name_ref(malformed, "no-ref")
    blank = bare_source(knowledge_space__tenant_id=" ")
    row = add_ref(blank, "deleted")
    name_ref(blank, row.credential_ref)
    assert steps.repair("no-ref") is Repair.UNREADABLE
    assert steps.repair(row.credential_ref) is Repair.UNREADABLE
    assert {one.state for one in LedgerRow.objects.all()} == {RefState.RETIRED}


def test_a_stalled_eraser_erases_nothing_that_is_in_use(
    steps: Cleanup, new_steps: NewSteps, store: EncryptedStore
) -> None:
    """Its lease ran out; the ref was reclaimed, given back, named again and rescued; then it goes on."""
    source = bare_source()
    row = add_secret(store, source, "retired, due")
    stalled: Erasure = claim(steps)
    LedgerRow.objects.filter(pk=row.pk).update(lease_expires_at=PAST)
    another = new_steps(worker="another")
    another.release(claim(another))
    name_ref(source, row.credential_ref)
    assert sweep(another) == (0, {Repair.RESCUED: 1})
    delete(steps, stalled)
    assert steps.settle(stalled) == {}
    assert store.get(scope_of(source), ref_of(source)) == SECRET
    put_late(store, row)
    pass_horizon()
    erase_all(another)
    assert store.get(scope_of(source), ref_of(source)) == SECRET

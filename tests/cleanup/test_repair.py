"""A source that names a ref which is not active: a stale save by an old writer, as a rule. No secret is lost by it."""

from __future__ import annotations

from typing import Any

import pytest

from kfs_credentials import services
from kfs_credentials.cleanup import Cleanup
from kfs_credentials.crypto import new_ref
from kfs_credentials.errors import SecretStoreError, StoreUnavailable
from kfs_credentials.models import Attention, RefError, RefState, SecretObject, Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.repairs import Repair
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.conftest import Other
from tests.cleanup.rows import (
    PAST,
    add_ref,
    add_secret,
    bare_source,
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
from tests.cleanup.runs import Change, Files, NewSteps, sweep
from tests.invariants import check_invariants
from tests.services.conftest import before_statement, elsewhere

pytestmark = pytest.mark.django_db(transaction=True)

NEWER = {"token": "made-up, newer"}


def rotated(source: Source) -> tuple[str, str]:
    """Rotate the source's credentials; return the older ref and the newer one."""
    older = ref_of(source)
    services.rotate_credentials(tenant="tenant-a", source_id=source.pk, credentials=NEWER)
    return older, ref_of(source)


def resolve(source: Source) -> dict[str, Any]:
    """Return the credentials of a source, as an application gets them."""
    return dict(services.resolve_credentials(tenant="tenant-a", source_id=source.pk))


def test_a_stale_save_brings_back_the_older_ref_and_the_newer_one_is_kept(
    steps: Cleanup, store: EncryptedStore
) -> None:
    source = make_source()
    older, newer = rotated(source)
    name_ref(source, older)
    assert sweep(steps) == (0, {Repair.REINSTATED: 1})
    back, kept = of_ref(older), of_ref(newer)
    assert (back.state, back.next_delete_at, back.last_error_code) == (RefState.ACTIVE, None, None)
    assert back.source_version == 2
    assert (kept.state, kept.next_delete_at, kept.last_error_code) == (RefState.RETIRED, None, RefError.DISPLACED)
    assert known(newer).attention == Attention.DISPLACED
    assert resolve(source) == {"token": "made-up"}
    assert store.get(scope_of(source), newer) == NEWER
    assert check_invariants("default", store) == []


def test_a_displaced_ref_is_never_claimed_and_waits_for_a_person(steps: Cleanup, kfs_settings: Change) -> None:
    kfs_settings(ERASE_GRACE=0)
    source = make_source()
    older, newer = rotated(source)
    name_ref(source, older)
    sweep(steps)
    before = of_ref(newer).row_version
    for _ in range(2):
        make_due()
        assert steps.claim(10) is None
        assert sweep(steps) == (0, {})
    assert of_ref(newer).row_version == before


def test_a_person_who_chooses_the_newer_one_gets_it_back(steps: Cleanup, store: EncryptedStore) -> None:
    source = make_source()
    older, newer = rotated(source)
    name_ref(source, older)
    sweep(steps)
    name_ref(source, newer)
    assert sweep(steps) == (0, {Repair.REINSTATED: 1})
    assert known(newer).attention is None
    assert of_ref(older).last_error_code == RefError.DISPLACED
    assert resolve(source) == NEWER
    assert check_invariants("default", store) == []


def test_every_newer_ref_is_kept_however_often_it_was_saved(steps: Cleanup) -> None:
    source = make_source()
    oldest, middle = rotated(source)
    _, newest = rotated(source)
    name_ref(source, oldest)
    sweep(steps)
    name_ref(source, middle)
    sweep(steps)
    states = {ref: of_ref(ref).state for ref in (oldest, middle, newest)}
    assert states == {oldest: RefState.RETIRED, middle: RefState.ACTIVE, newest: RefState.RETIRED}
    assert {of_ref(ref).next_delete_at for ref in (oldest, newest)} == {None}


@pytest.mark.parametrize(
    ("claimed", "repair"), [(False, Repair.REINSTATED), (True, Repair.RESCUED)], ids=["never claimed", "claimed"]
)
def test_one_that_came_while_it_was_repaired_is_kept_too(
    steps: Cleanup, store: EncryptedStore, claimed: bool, repair: Repair
) -> None:
    """The repair has seen what is displaced, and has locked nothing yet: a rotation, and one more stale save."""
    source = make_source()
    refs = [*rotated(source)]
    older = refs[0]
    if claimed:
        SecretObject.objects.filter(pk=older).update(first_claimed_at=PAST)
    name_ref(source, older)

    def rotate_and_save() -> None:
        refs.append(rotated(source)[1])
        name_ref(source, older)

    with before_statement('UPDATE OF "source_secret_lifecycle_refs" NOWAIT', lambda: elsewhere(rotate_and_save)):
        assert steps.repair(older) is Repair.LATER
    assert steps.repair(older) is repair
    for ref in refs[1:]:
        row = of_ref(ref)
        assert (row.state, row.next_delete_at, row.last_error_code) == (RefState.RETIRED, None, RefError.DISPLACED)
        assert store.get(scope_of(source), ref) == NEWER
    assert check_invariants("default", store) == []


def test_the_erasure_finds_it_too_and_puts_it_off(steps: Cleanup) -> None:
    source = make_source()
    older, newer = rotated(source)
    name_ref(source, older)
    make_due(older)
    erasure = steps.claim(10)
    assert erasure is not None
    assert (erasure.items, erasure.in_use) == ([], [older])
    assert known(older).first_claimed_at is None, "it was not claimed"
    assert steps.claim(10) is None, "it does not stand before others"
    assert steps.repair(older) is Repair.REINSTATED
    assert of_ref(newer).last_error_code == RefError.DISPLACED


def test_a_version_that_the_ledger_forbids_is_left_out(steps: Cleanup) -> None:
    source = make_source()
    older, _ = rotated(source)
    name_ref(source, older)
    in_database("UPDATE sources SET version = 0")
    assert steps.repair(older) is Repair.REINSTATED
    assert of_ref(older).source_version is None


def test_what_is_right_by_now_is_left_alone(steps: Cleanup) -> None:
    source = make_source()
    ref = ref_of(source)
    before = of_ref(ref).row_version
    assert steps.repair(ref) is Repair.FINE
    assert steps.repair(new_ref()) is Repair.FINE, "no source names it"
    assert of_ref(ref).row_version == before


@pytest.mark.parametrize("table", ["sources", "source_secret_lifecycle_refs"])
def test_rows_that_somebody_holds_are_left_for_later(steps: Cleanup, other: Other, table: str) -> None:
    source = make_source()
    older, newer = rotated(source)
    name_ref(source, older)
    other.execute(f"SELECT FROM {table} FOR UPDATE")
    assert steps.repair(older) is Repair.LATER
    assert [of_ref(ref).state for ref in (older, newer)] == [RefState.RETIRED, RefState.ACTIVE]
    other.rollback()
    assert steps.repair(older) is Repair.REINSTATED


def test_a_ref_that_is_only_just_reserved_is_left_to_its_operation(steps: Cleanup) -> None:
    source = bare_source()
    row = add_ref(source, "staged")
    name_ref(source, row.credential_ref)
    assert sweep(steps) == (0, {Repair.LATER: 1})
    assert reread(row).state == RefState.STAGED


def test_a_ref_without_a_ledger_row_is_registered_if_it_can_be_read(steps: Cleanup, store: EncryptedStore) -> None:
    source = bare_source(version=3)
    ref = new_ref()
    store.put(scope_of(source), ref, NEWER)
    name_ref(source, ref)
    assert sweep(steps) == (0, {Repair.REGISTERED: 1})
    row = of_ref(ref)
    assert (row.pk, row.state, row.source_id, row.source_version) == (source.pk, RefState.ACTIVE, source.pk, 3)
    assert known(ref).store == "default"
    assert resolve(source) == NEWER
    assert sweep(steps) == (0, {})
    assert check_invariants("default", store) == []


def test_the_ref_that_an_unknown_one_has_displaced_is_kept(steps: Cleanup, store: EncryptedStore) -> None:
    source = make_source()
    own, unknown = ref_of(source), new_ref()
    store.put(scope_of(source), unknown, NEWER)
    name_ref(source, unknown)
    assert sweep(steps) == (0, {Repair.REGISTERED: 1})
    assert sweep(steps) == (0, {})
    assert (of_ref(own).next_delete_at, known(own).attention) == (None, Attention.DISPLACED)
    assert resolve(source) == NEWER
    assert check_invariants("default", store) == []


def test_what_is_registered_by_somebody_else_meanwhile_is_left_alone(steps: Cleanup, store: EncryptedStore) -> None:
    source = make_source()
    own, unknown = ref_of(source), new_ref()
    store.put(scope_of(source), unknown, NEWER)
    name_ref(source, unknown)

    def somebody_registers_it() -> None:
        add_ref(source, "active", credential_ref=unknown)

    with before_statement("WITH ledger AS", lambda: elsewhere(somebody_registers_it)):
        assert steps.repair(unknown) is Repair.LATER
    assert of_ref(own).state == RefState.ACTIVE
    assert steps.repair(unknown) is Repair.FINE


def test_a_taken_id_gets_a_random_one_and_a_forbidden_version_none(steps: Cleanup, store: EncryptedStore) -> None:
    source = bare_source(version=0)
    add_ref(source, "final", id=source.pk)
    ref = new_ref()
    store.put(scope_of(source), ref, NEWER)
    name_ref(source, ref)
    assert steps.repair(ref) is Repair.REGISTERED
    row = of_ref(ref)
    assert row.pk != source.pk
    assert row.source_version is None


REF = "source-secret:v1:5f0d6c1e-2f3b-4f6d-9a3b-0d4c8a7e6b21"


@pytest.mark.parametrize("ref", [REF, REF.upper(), "hunter2", "C:\\x"])
def test_a_ref_without_a_ledger_row_is_reported_if_it_cannot_be_read(
    steps: Cleanup, caplog: pytest.LogCaptureFixture, ref: str
) -> None:
    source = bare_source()
    name_ref(source, ref)
    assert sweep(steps) == (0, {Repair.UNREADABLE: 1})
    assert not LedgerRow.objects.exists()
    assert f"source {source.pk} of tenant tenant-a names ref" in caplog.text
    assert "rotate its credentials" in caplog.text
    assert "hunter2" not in caplog.text, "what is no ref may be a secret"


def test_an_object_of_another_scope_is_not_registered(steps: Cleanup, store: EncryptedStore) -> None:
    source, stranger = bare_source(), bare_source()
    ref = new_ref()
    store.put(scope_of(stranger), ref, NEWER)
    name_ref(source, ref)
    assert steps.repair(ref) is Repair.UNREADABLE
    assert not LedgerRow.objects.exists()


@pytest.mark.parametrize("situation", ["staged", "active", "retired, due", "deleted, due", "final"])
def test_a_ref_of_another_source_is_reported_and_never_erased(
    steps: Cleanup, store: EncryptedStore, files: Files, caplog: pytest.LogCaptureFixture, situation: str
) -> None:
    owner, thief = bare_source(), bare_source()
    row = add_secret(store, owner, situation)
    name_ref(thief, row.credential_ref)
    assert sweep(steps) == (0, {Repair.MISPLACED: 1})
    erasure = steps.claim(10)
    assert erasure is None or not erasure.items
    make_due()
    assert steps.claim(10) is None, "reported, it is not looked at again and again"
    assert len(files()) == 1
    assert f"source {thief.pk} of tenant tenant-a names ref" in caplog.text
    assert "which is of another source" in caplog.text


def test_a_ref_of_another_source_is_erased_once_nobody_names_it(
    steps: Cleanup, store: EncryptedStore, kfs_settings: Change
) -> None:
    kfs_settings(ERASE_GRACE=0)
    owner, thief = bare_source(), bare_source()
    row = add_secret(store, owner, "retired, due")
    name_ref(thief, row.credential_ref)
    assert steps.repair(row.credential_ref) is Repair.MISPLACED
    assert known(row.credential_ref).attention == Attention.UNREADABLE
    name_ref(thief, None)
    assert sweep(steps) == (1, {})
    assert known(row.credential_ref).attention is None
    assert steps.claim(10) is not None


def test_a_store_that_does_not_answer_is_no_finding(
    steps: Cleanup, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = bare_source()
    name_ref(source, new_ref())

    def down(*_: object, **__: object) -> None:
        raise StoreUnavailable("down")

    monkeypatch.setattr(store, "_get_many", down)
    with pytest.raises(StoreUnavailable):
        steps.repair(ref_of(source))


def test_a_store_that_fails_at_one_ref_stops_nobody(
    steps: Cleanup, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = bare_source()
    name_ref(source, new_ref())

    def fail(*_: object, **__: object) -> None:
        raise ValueError("made-up")

    monkeypatch.setattr(store, "_get_many", fail)
    with pytest.raises(SecretStoreError):
        store.get(scope_of(source), ref_of(source))
    assert steps.repair(ref_of(source)) is Repair.LATER


def test_a_sweep_of_one_tenant_repairs_only_its_sources(new_steps: NewSteps) -> None:
    source = make_source()
    older, _ = rotated(source)
    name_ref(source, older)
    assert sweep(new_steps(tenant="tenant-b")) == (0, {})
    assert sweep(new_steps(tenant="tenant-a")) == (0, {Repair.REINSTATED: 1})


def test_a_newer_ref_that_was_retired_by_hand_keeps_its_time(steps: Cleanup) -> None:
    source = make_source()
    older, newer = rotated(source)
    LedgerRow.objects.filter(credential_ref=newer).update(state=RefState.RETIRED, next_delete_at=PAST)
    name_ref(source, older)
    assert steps.repair(older) is Repair.REINSTATED
    assert of_ref(newer).next_delete_at is not None, "only what was in use is displaced"
    assert SecretObject.objects.needing_attention().count() == 0


def test_a_ref_that_was_brought_back_does_not_stand_for_an_erasure(steps: Cleanup, store: EncryptedStore) -> None:
    source = make_source()
    older, newer = rotated(source)
    make_due(older)
    name_ref(source, older)
    assert sweep(steps) == (0, {Repair.REINSTATED: 1})
    assert steps.claim(10) is None
    assert {of_ref(ref).deleted_at for ref in (older, newer)} == {None}
    assert len(list(store.list())) == 2

"""What the store lists: objects that nobody knows, and objects of refs that count as erased for good."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials.crypto import Scope, new_ref, object_name
from kfs_credentials.errors import BindingBroken, BindingProblem, SecretNotFound, WorkersPaused
from kfs_credentials.models import Binding, Event, SecretObject
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.pause import pause_workers
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.verification import objects
from kfs_credentials.verification.findings import FindingClass
from kfs_credentials.verification.objects import Listing
from tests.cleanup.rows import add_ref, add_secret, make_source, name_ref, put_late, ref_of
from tests.management.rows import ledger_row
from tests.verification.looks import elsewhere

pytestmark = pytest.mark.django_db(transaction=True)

NOBODY = Scope("tenant-a", "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002")


def unknown(store: EncryptedStore, directory: Path, age: float = 3_600.0) -> str:
    """Put an object that nobody knows, as old as that; return its name."""
    ref = new_ref()
    store.put(NOBODY, ref, {"token": "made-up"})
    name = object_name(ref, prefix=store.prefix)
    written = time.time() - age
    os.utime(directory / name, (written, written))
    return name


def look(**options: Any) -> Listing:
    listing = Listing("default", **options)
    listing.run()
    return listing


def details(listing: Listing) -> list[tuple[str, str]]:
    return sorted((one.what.value, one.detail) for one in listing.findings.listed())


def test_all_are_known(store: EncryptedStore) -> None:
    make_source()
    add_secret(store, None, "retired")
    listing = look()
    assert (listing.seen, details(listing)) == (2, [])


def test_an_object_that_no_row_accounts_for(store: EncryptedStore, secrets_directory: Path) -> None:
    make_source()
    name = unknown(store, secrets_directory)
    assert details(look()) == [("object_unknown", f"default: {name}")]
    assert details(look(classes=[FindingClass.OBJECT_OF_FINAL])) == []
    assert list(store.list()).count(name) == 1


def test_an_object_of_a_ref_that_the_node_service_has_reserved_is_known(store: EncryptedStore) -> None:
    source = make_source()
    row = ledger_row(source, state="staged")
    put_late(store, row)
    assert details(look()) == []


def test_an_object_whose_row_is_final(store: EncryptedStore) -> None:
    row = add_secret(store, None, "final")
    listing = look()
    assert [(one.what, one.ref) for one in listing.findings.listed()] == [
        (FindingClass.OBJECT_OF_FINAL, row.credential_ref)
    ]


def test_a_damaged_object_whose_row_is_final_is_there_too(store: EncryptedStore, secrets_directory: Path) -> None:
    row = add_secret(store, None, "final")
    (secrets_directory / object_name(row.credential_ref, prefix=store.prefix)).write_bytes(b"")
    assert [what for what, _ in details(look())] == ["object_of_final"]


def test_what_is_erased_after_it_was_listed_is_no_finding(
    store: EncryptedStore, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_secret(store, None, "final")
    unknown(store, secrets_directory)
    real = Listing._patrolled

    def then_erased(self: Listing, digests: Any) -> Any:
        answer = real(self, digests)
        for path in secrets_directory.rglob("*.enc"):
            path.unlink()
        return answer

    monkeypatch.setattr(Listing, "_patrolled", then_erased)
    assert details(look()) == []


def test_erased_on_request(store: EncryptedStore, secrets_directory: Path) -> None:
    kept = make_source()
    old = [unknown(store, secrets_directory) for _ in range(3)]
    listing = look(erase=True)
    assert (listing.erased, details(listing)) == (3, [])
    assert list(store.list()) == [object_name(ref_of(kept), prefix=store.prefix)]
    (event,) = Event.objects.filter(kind="erased", credential_ref=None)
    assert event.detail == "3 objects without a ledger row, in store default"
    assert len(old) == 3


def test_never_one_that_is_younger_than_the_grace(store: EncryptedStore, secrets_directory: Path) -> None:
    young = unknown(store, secrets_directory, age=590)
    ahead = unknown(store, secrets_directory, age=-100)
    unknown(store, secrets_directory, age=700)
    listing = look(erase=True)
    assert listing.erased == 1
    why = "not erased: younger than ERASE_GRACE"
    assert details(listing) == sorted(("object_unknown", f"default: {name} ({why})") for name in (young, ahead))
    assert sorted(store.list()) == sorted([young, ahead])


def test_never_one_whose_age_cannot_be_told(
    store: EncryptedStore, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = unknown(store, secrets_directory)
    monkeypatch.setattr(EncryptedStore, "_modified_at", lambda self, name: None)
    listing = look(erase=True)
    assert (listing.erased, list(store.list())) == (0, [name])
    assert details(listing) == [("object_unknown", f"default: {name} (not erased: its age cannot be told)")]


def test_never_one_that_gets_its_row_right_before(
    store: EncryptedStore, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger that was restored, or a source that the cleanup registers."""
    row = add_secret(store, make_source(), "retired")
    SecretObject.objects.filter(pk=row.credential_ref).delete()
    values = {name: value for name, value in vars(row).items() if not name.startswith("_")}
    row.delete()
    name = object_name(row.credential_ref, prefix=store.prefix)
    os.utime(secrets_directory / name, (0, 0))
    real = Listing._age

    def then_known(self: Listing, store: Any, name: str) -> Any:
        type(row).objects.get_or_create(**values)
        return real(self, store, name)

    monkeypatch.setattr(Listing, "_age", then_known)
    listing = look(erase=True)
    assert (listing.erased, name in set(store.list())) == (0, True)


def forget(ref: str) -> None:
    """Take its rows away, as a ledger that was restored from an older copy."""
    LedgerRow.objects.filter(credential_ref=ref).delete()
    SecretObject.objects.filter(pk=ref).delete()


def test_never_one_that_a_source_names(store: EncryptedStore, secrets_directory: Path) -> None:
    """The ledger does not know it yet: the cleanup would register it."""
    source = make_source()
    nobodys = unknown(store, secrets_directory)
    name = object_name(ref_of(source), prefix=store.prefix)
    os.utime(secrets_directory / name, (0, 0))
    forget(ref_of(source))
    assert details(look()) == [
        ("object_unknown", f"default: {nobodys}"),
        ("object_unregistered", f"default: {name}"),
    ]
    listing = look(erase=True)
    assert (listing.erased, list(store.list())) == (1, [name])
    why = "not erased: a source names it"
    assert details(listing) == [("object_unregistered", f"default: {name} ({why})")]


def test_never_one_that_a_source_names_right_before(
    store: EncryptedStore, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source()
    ref = ref_of(source)
    name = object_name(ref, prefix=store.prefix)
    os.utime(secrets_directory / name, (0, 0))
    forget(ref)
    name_ref(source, None)
    real = Listing._age

    def then_named(self: Listing, store: Any, name: str) -> Any:
        name_ref(source, ref)
        return real(self, store, name)

    monkeypatch.setattr(Listing, "_age", then_named)
    listing = look(erase=True)
    assert (listing.erased, list(store.list())) == (0, [name])
    why = "not erased: the store, the ledger or a source keeps it"
    assert details(listing) == [("object_unknown", f"default: {name} ({why})")]


def test_nothing_is_erased_while_the_workers_are_paused(
    store: EncryptedStore, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch, kfs_settings: Any
) -> None:
    make_source()
    for _ in range(3):
        unknown(store, secrets_directory)
    real = Listing._erase

    def then_paused(self: Listing, *arguments: Any) -> Any:
        erased = real(self, *arguments)
        pause_workers("default", by="somebody", reason="a restore is under way")
        return erased

    kfs_settings(BATCH_SIZE=1)
    monkeypatch.setattr(Listing, "_erase", then_paused)
    listing = Listing("default", erase=True)
    with pytest.raises(WorkersPaused, match=r"paused by somebody at .*: a restore is under way"):
        listing.run()
    assert listing.erased == 1
    assert len(list(store.list())) == 3


def test_each_batch_begins_a_new_epoch(store: EncryptedStore, secrets_directory: Path) -> None:
    """Of a database that is restored from an older copy, the store tells."""
    make_source()
    before = Binding.objects.get().epoch
    look(erase=True)
    assert Binding.objects.get().epoch == before
    unknown(store, secrets_directory)
    assert look(erase=True).erased == 1
    assert Binding.objects.get().epoch == before + 1


def test_a_store_that_is_exchanged_right_before_keeps_its_objects(
    store: EncryptedStore, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at through the handle by which they would be erased."""
    make_source()
    name = unknown(store, secrets_directory)
    real = EncryptedStore._delete_named

    def exchanged(self: EncryptedStore, names: Any, **options: Any) -> Any:
        (secrets_directory / self._probe_name).unlink()
        return real(self, names, **options)

    monkeypatch.setattr(EncryptedStore, "_delete_named", exchanged)
    with pytest.raises(BindingBroken) as raised:
        look(erase=True)
    assert raised.value.problem is BindingProblem.NO_PROBE
    assert name in set(store.list())


def test_what_was_erased_is_written_down_whatever_is_found_out_after_it(
    store: EncryptedStore, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_source()
    unknown(store, secrets_directory)
    real = EncryptedStore._delete_named

    def then_restored(self: EncryptedStore, names: Any, **options: Any) -> Any:
        outcomes = real(self, names, **options)
        elsewhere(("UPDATE kfs_credentials_binding SET epoch = epoch - %s", 1))
        return outcomes

    monkeypatch.setattr(EncryptedStore, "_delete_named", then_restored)
    with pytest.raises(BindingBroken) as raised:
        look(erase=True)
    assert raised.value.problem is BindingProblem.OLD_DATABASE
    assert Event.objects.get(kind="erased").detail == "1 objects without a ledger row, in store default"


@pytest.mark.parametrize("leftover", [".tmp", ".new", ".try"])
def test_what_a_writer_that_died_has_left_has_an_age_too(
    store: EncryptedStore, secrets_directory: Path, leftover: str
) -> None:
    name = unknown(store, secrets_directory)
    (secrets_directory / name).rename(secrets_directory / f"{name}{leftover}")
    assert [what for what, _ in details(look())] == ["object_unknown"]
    listing = look(erase=True)
    assert (listing.erased, list(store.list())) == (1, [])
    with pytest.raises(SecretNotFound):
        store.modified_at(name)


def test_more_than_are_looked_for_at_once(
    store: EncryptedStore, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "AT_ONCE", 2)
    monkeypatch.setattr(objects, "PAGE", 2)
    for _ in range(5):
        unknown(store, secrets_directory)
    for _ in range(3):
        add_ref(None, "active")
    assert look().findings.counts == {FindingClass.OBJECT_UNKNOWN: 5}
    assert look(erase=True).erased == 5


def test_a_store_that_cannot_list(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EncryptedStore, "can_list", False)
    assert look().not_listed == ["default"]

"""Every object is read and compared; what is wrong with some stops nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials import services
from kfs_credentials.conf import settings
from kfs_credentials.crypto import Credentials, object_name
from kfs_credentials.errors import KfsCredentialsError, StoreUnavailable
from kfs_credentials.models import Checkpoint, SecretObject, Source
from kfs_credentials.stores import Address
from kfs_credentials.stores.calls import Deadline
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.verification import deep
from kfs_credentials.verification.deep import Reading
from kfs_credentials.verification.findings import FindingClass, what_to_do
from kfs_credentials.worker import Pace
from tests.cleanup.rows import add_ref, add_secret, in_database, make_source, put_late, ref_of, scope_of
from tests.factories import SpaceFactory
from tests.keys import NEW
from tests.ref_scenes import displaced
from tests.verification.looks import classes, found

pytestmark = pytest.mark.django_db(transaction=True)


def path_of(store: EncryptedStore, directory: Path, ref: str) -> Path:
    return directory / object_name(ref, prefix=store.prefix)


def sources(count: int) -> list[Source]:
    space = SpaceFactory.create()
    return [make_source(space) for _ in range(count)]


def wrong(reading: Reading) -> list[tuple[str, str | None, str]]:
    return sorted((one.what.value, one.ref, one.detail) for one in reading.findings.listed())


def read(**options: Any) -> Reading:
    reading = Reading("default", **options)
    reading.run()
    return reading


def corrupt(store: EncryptedStore, directory: Path, refs: Sequence[str]) -> list[str]:
    """Cut one short, turn a bit in one, and put another's in the place of one; return which, in order."""
    cut, turned, other = (path_of(store, directory, ref) for ref in refs[:3])
    cut.write_bytes(cut.read_bytes()[:50])
    content = bytearray(turned.read_bytes())
    content[-20] ^= 1
    turned.write_bytes(content)
    other.write_bytes(path_of(store, directory, refs[3]).read_bytes())
    return sorted(refs[:3])


def test_three_of_many_are_corrupt(store: EncryptedStore, secrets_directory: Path) -> None:
    refs = [ref_of(source) for source in sources(40)]
    expected = corrupt(store, secrets_directory, refs)
    reading = read()
    assert [one.ref for one in sorted(reading.findings.listed(), key=lambda one: one.ref or "")] == expected
    assert reading.findings.counts == {FindingClass.OBJECT_DAMAGED: 3}
    assert reading.read == 40
    assert sorted(one.ref or "" for one in found(deep=True)) == expected


def test_nothing_there(store: EncryptedStore) -> None:
    one, other = sources(2)
    store.delete(scope_of(one), ref_of(one))
    (finding,) = read().findings.listed()
    assert (finding.what, finding.ref, finding.source) == (FindingClass.OBJECT_MISSING, ref_of(one), str(one.pk))
    assert ref_of(other) != finding.ref


def test_another_size_than_what_was_put(store: EncryptedStore) -> None:
    (one,) = sources(1)
    SecretObject.objects.filter(pk=ref_of(one)).update(size=7)
    (finding,) = read().findings.listed()
    assert (finding.what, finding.detail) == (FindingClass.OBJECT_SIZE, "19 bytes, not 7")
    # Of what knowledge-fs has put, it is not known.
    SecretObject.objects.filter(pk=ref_of(one)).update(size=None)
    assert wrong(read()) == []


def test_a_key_that_is_not_there_any_more(store: EncryptedStore, kfs_settings: Any) -> None:
    """The object is whole: nothing has to be restored but the key."""
    (one,), old = sources(1), settings.KEYS
    kfs_settings(KEYS=[NEW])
    (finding,) = read().findings.listed()
    assert (finding.what, finding.ref) == (FindingClass.OBJECT_KEY_UNKNOWN, ref_of(one))
    assert finding.detail == SecretObject.objects.get(pk=ref_of(one)).key_id
    todo = what_to_do(finding, str)
    assert todo == "put this key back into KFS_CREDENTIALS['KEYS'], behind the others"
    kfs_settings(KEYS=[NEW, *old])
    assert wrong(read()) == []


def test_a_tenant_that_can_have_no_secrets(store: EncryptedStore) -> None:
    row = add_ref(None, "active", tenant_id=" ")
    (finding,) = read().findings.listed()
    assert finding.what is FindingClass.OBJECT_UNREADABLE
    assert finding.detail == "its tenant id is blank, or longer than 255 characters"
    assert finding.ref == row.credential_ref


def test_of_what_is_retired_a_reservation_may_never_have_been_put(
    store: EncryptedStore, secrets_directory: Path
) -> None:
    add_ref(None, "retired")
    add_ref(None, "deleting")
    add_ref(None, "deleted")
    add_ref(None, "staged")
    there = add_secret(store, None, "retired")
    assert wrong(read()) == []
    path_of(store, secrets_directory, there.credential_ref).write_bytes(b"{}")
    assert [what for what, *_ in wrong(read())] == ["object_damaged"]


def test_what_waits_for_a_person_has_to_be_there(store: EncryptedStore) -> None:
    pair = displaced()
    row = SecretObject.objects.get(pk=pair.other)
    ledger = Source.objects.get(pk=pair.source)
    store.delete(scope_of(ledger), row.credential_ref)
    assert [(what, ref) for what, ref, _ in wrong(read())] == [("object_missing", pair.other)]


def test_a_retired_ref_that_a_source_names_has_to_be_there(store: EncryptedStore) -> None:
    (one,) = sources(1)
    in_database("UPDATE source_secret_lifecycle_refs SET state = 'retired'")
    store.delete(scope_of(one), ref_of(one))
    assert [what for what, *_ in wrong(read())] == ["object_missing"]


def test_what_is_erased_after_the_first_look_is_no_finding(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotated and erased, or deleted with its source, right when it was to be read."""
    (one,) = sources(1)
    real = EncryptedStore._get_many

    def erased_before(self: EncryptedStore, addresses: Sequence[Address], *, deadline: Deadline) -> Any:
        monkeypatch.setattr(EncryptedStore, "_get_many", real)
        for address in addresses:
            self.storage.remove_many([self._name(address)])
        threading.Thread(target=_erased).start()
        gone.wait()
        return real(self, addresses, deadline=deadline)

    gone = threading.Event()

    def _erased() -> None:
        from django.db import connections

        in_database("UPDATE sources SET credential_ref = NULL")
        in_database("UPDATE source_secret_lifecycle_refs SET state = 'deleted', deleted_at = now()")
        connections.close_all()
        gone.set()

    monkeypatch.setattr(EncryptedStore, "_get_many", erased_before)
    assert wrong(read()) == []
    assert gone.is_set()
    assert Source.objects.get(pk=one.pk).credential_ref is None


# Cut short, and taken up.


class Stopped(BaseException):
    """What ends a run as a kill does: nothing of it is caught."""


def stop_after(number: int) -> Any:
    """Return what ends a run after so many batches."""
    batches = 0

    def progress() -> None:
        nonlocal batches
        batches += 1
        if batches == number:
            raise Stopped

    return progress


def test_a_run_that_was_cut_short_goes_on(
    store: EncryptedStore, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "AT_A_TIME", 2)
    refs = sorted(ref_of(source) for source in sources(10))
    expected = corrupt(store, secrets_directory, [refs[0], refs[1], refs[9], refs[5]])
    with pytest.raises(Stopped):
        Reading("default", progress=stop_after(4)).run()
    seen: list[str] = []
    real = EncryptedStore._get_many

    def get_many(self: EncryptedStore, addresses: Sequence[Address], *, deadline: Deadline) -> Any:
        seen.extend(one.ref for one in addresses)
        return real(self, addresses, deadline=deadline)

    monkeypatch.setattr(EncryptedStore, "_get_many", get_many)
    cut = deep.cut_short("default")
    assert cut is not None
    assert (cut.position, cut.read) == (refs[5], 6)
    reading = read()
    assert sorted(one.ref or "" for one in reading.findings.listed()) == expected
    assert reading.findings.total == 3
    assert reading.read == 10
    # What was found is looked at again; what was right is not.
    assert [ref for ref in dict.fromkeys(seen) if ref in refs[:6]] == refs[:2]
    assert deep.cut_short("default") is None


def test_what_was_repaired_meanwhile_is_no_finding_of_the_run_that_goes_on(
    store: EncryptedStore, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "AT_A_TIME", 2)
    refs = sorted(ref_of(source) for source in sources(6))
    path = path_of(store, secrets_directory, refs[0])
    content = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(Stopped):
        Reading("default", progress=stop_after(2)).run()
    path.write_bytes(content)
    assert wrong(read()) == []


def test_more_findings_than_are_kept_are_counted_over_both_parts(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "AT_A_TIME", 2)
    monkeypatch.setattr("kfs_credentials.verification.findings.LISTED", 1)
    for source in sources(6):
        store.delete(scope_of(source), ref_of(source))
    with pytest.raises(Stopped):
        Reading("default", progress=stop_after(3)).run()
    assert Checkpoint.objects.get(pk="verify:objects").data["more"] == {"object_missing": 3}
    reading = read()
    assert reading.findings.total == 6
    assert len(list(reading.findings.listed())) == 1


def test_a_run_for_a_tenant_says_nothing_about_the_others(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "AT_A_TIME", 1)
    sources(3)
    with pytest.raises(Stopped):
        Reading("default", tenant="tenant-a", progress=stop_after(2)).run()
    assert deep.cut_short("default") is None
    assert deep.cut_short("default", tenant="tenant-a") is not None
    assert read().read == 3
    assert read(tenant="tenant-a").read == 3
    assert read(tenant="tenant-b").read == 0


def test_a_run_that_looked_for_something_else_is_not_taken_up(
    store: EncryptedStore, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has passed over what this one is to find."""
    monkeypatch.setattr(deep, "AT_A_TIME", 2)
    refs = sorted(ref_of(source) for source in sources(6))
    path_of(store, secrets_directory, refs[0]).write_bytes(b"")
    with pytest.raises(Stopped):
        Reading("default", classes=[FindingClass.OBJECT_MISSING], progress=stop_after(2)).run()
    cut = deep.cut_short("default")
    assert cut is not None
    assert cut.classes == ["object_missing"]
    reading = read()
    assert [(what, ref) for what, ref, _ in wrong(reading)] == [("object_damaged", refs[0])]
    assert reading.read == 6


# A sample, a rate, and a store that fails.


def test_a_sample_is_spread_over_all(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = sorted(ref_of(source) for source in sources(20))
    chosen = {ref for _ in range(30) for ref in Reading("default", sample=3)._choose(3)}
    assert {refs.index(ref) // 5 for ref in chosen} == {0, 1, 2, 3}
    reading = read(sample=3)
    assert reading.read == 3
    assert deep.cut_short("default") is None
    assert read(sample=100).read == 20


@pytest.mark.parametrize("rate", [0.5, 10.0, 1_000.0])
def test_the_rate_is_kept(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    sources(12)
    now = [1_000.0]
    monkeypatch.setattr("kfs_credentials.worker.time.monotonic", lambda: now[0])
    started = now[0]
    pace = Pace(rate)
    for _ in range(4):
        now[0] += 0.001  # the work itself
        pace.spend(pace.batch(100))
        now[0] += pace.delay()
    assert 4 * pace.batch(100) / (now[0] - started) == pytest.approx(rate, rel=0.1)


def test_one_object_that_holds_up_all(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that has it among others never ends in time; the others are read without it."""
    refs = sorted(ref_of(source) for source in sources(9))
    real = EncryptedStore._get_many

    def get_many(
        self: EncryptedStore, addresses: Sequence[Address], *, deadline: Deadline
    ) -> list[Credentials | KfsCredentialsError]:
        if any(one.ref == refs[4] for one in addresses):
            raise StoreUnavailable("the secret store did not answer")
        return real(self, addresses, deadline=deadline)

    monkeypatch.setattr(EncryptedStore, "_get_many", get_many)
    monkeypatch.setattr(deep, "pause_before_try", lambda _: 0.0)
    reading = read()
    assert wrong(reading) == [("object_unreadable", refs[4], "SOURCE_SECRET_STORE_UNAVAILABLE")]
    assert reading.read == 9


def test_a_store_that_is_out_of_reach(
    store: EncryptedStore, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "AT_A_TIME", 2)
    monkeypatch.setattr(deep, "pause_before_try", lambda _: 0.0)
    sources(6)
    real = EncryptedStore._get_many

    def unavailable(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("the secret store did not answer")

    reading = Reading("default", progress=lambda: monkeypatch.setattr(EncryptedStore, "_get_many", unavailable))
    monkeypatch.setattr(EncryptedStore, "_check", unavailable)
    with pytest.raises(StoreUnavailable):
        reading.run()
    assert reading.read == 2
    monkeypatch.setattr(EncryptedStore, "_get_many", real)
    assert read().read == 6


def test_it_reads_no_more_at_a_time_than_memory_has(store: EncryptedStore, kfs_settings: Any) -> None:
    sources(10)
    kfs_settings(BATCH_BYTES=100, MAX_SECRET_BYTES=50)
    page = Reading("default")._page()
    assert [len(part) for part in Reading("default")._parts(page)] == [5, 5]


def test_what_the_node_service_has_put_is_read_too(store: EncryptedStore) -> None:
    row = add_ref(None, "active")
    SecretObject.objects.all().delete()
    put_late(store, row)
    assert wrong(read()) == []
    assert "ref_unnamed" in classes(deep=True)


def test_what_rotates_meanwhile(store: EncryptedStore) -> None:
    (one,) = sources(1)
    services.rotate_credentials(tenant="tenant-a", source_id=one.pk, credentials={"token": "new"})
    assert read().read == 2  # the old one is kept for its grace

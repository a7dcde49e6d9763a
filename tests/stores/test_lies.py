"""A storage that lies, one lie after the other: what the store says then, and that no secret is lost by it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from django.conf import settings as django_settings

from kfs_credentials.crypto import Credentials, Plaintext, new_ref, object_name
from kfs_credentials.errors import (
    LeaseLost,
    NotAsSaid,
    SecretIntegrityError,
    SecretLost,
    SecretNotFound,
    SecretStoreError,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.stores import Address, Entry, Receipt, Resealed
from kfs_credentials.stores.base import TRIAL_REFS, TRIAL_SCOPE
from kfs_credentials.stores.calls import Deadline
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.stores.files import DurableFileStorage
from kfs_credentials.stores.values import Probe
from tests.bad_stores.storages import GETS, OVERWRITES, PUTS, TRIAL, LyingStorage, all_lie
from tests.stores.contract import OTHER, SCOPE, VALUE, entry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Lying:
    """A store on a storage that lies, and an honest one on the same directory."""

    def __init__(self, location: Path, honest: EncryptedStore) -> None:
        self.location = location
        self.honest = honest
        self.refs = sorted((new_ref() for _ in range(6)), key=object_name)

    def store(self, lie: str, *, about: int = 6, probe: str = "") -> EncryptedStore:
        """Return a store that lies about all objects; or about the first, so many at least, and not about the last.

        Then it does not lie about what is put to try it, either.
        """
        if about == len(self.refs):
            return EncryptedStore(LyingStorage(str(self.location), all_lie(lie), probe))
        lies = {digit(ref): lie for ref in self.refs[:about]}
        lies.pop(digit(self.refs[-1]), None)
        return EncryptedStore(LyingStorage(str(self.location), lies, probe, spared=TRIAL))

    def lied_about(self, store: EncryptedStore) -> list[bool]:
        assert isinstance(store.storage, LyingStorage)
        return [digit(ref) in store.storage.lies for ref in self.refs]

    @property
    def addresses(self) -> list[Address]:
        return [Address(SCOPE, ref) for ref in self.refs]

    def put(self) -> None:
        assert all(isinstance(one, Receipt) for one in self.honest.put_many([entry(ref) for ref in self.refs]))

    def readable(self) -> list[bool]:
        """Return for each whether an honest store gives it back."""
        return [isinstance(one, Credentials) and one == VALUE for one in self.honest.get_many(self.addresses)]


def digit(ref: str) -> str:
    return object_name(ref).rpartition("/")[2][0]


@pytest.fixture
def lying(store: EncryptedStore, secrets_directory: Path) -> Lying:
    while True:
        made = Lying(secrets_directory, store)
        if digit(made.refs[1]) != digit(made.refs[-1]):
            return made


# Put.


@pytest.mark.parametrize("lie", PUTS)
def test_a_receipt_is_given_for_nothing_but_what_reads_back(lying: Lying, lie: str) -> None:
    store = lying.store(lie, about=2)
    outcomes = store.put_many([entry(ref) for ref in lying.refs])
    # Another's object is none as long as there is no other.
    damaged, missing = ("half", "other bytes", "another's"), ("nothing", "other name", "another's", "taken")
    wrong = (SecretIntegrityError,) * (lie in damaged) + (NotAsSaid,) * (lie in missing)
    about = lying.lied_about(store)
    assert [isinstance(one, wrong) for one in outcomes] == about
    assert [isinstance(one, Receipt) for one in outcomes] == [not one for one in about]
    assert lying.readable() == [not one for one in about]


@pytest.mark.parametrize("lie", PUTS)
def test_a_store_that_keeps_nothing_is_misconfigured(lying: Lying, lie: str) -> None:
    with pytest.raises(StoreMisconfigured, match=r"has put 6 secrets, and shows none of them like that, nor one that"):
        lying.store(lie).put_many([entry(ref) for ref in lying.refs])
    assert not any(lying.readable())


def test_what_was_put_alone_and_is_not_there_is_an_error_of_its_own(lying: Lying) -> None:
    with pytest.raises(NotAsSaid, match=r"has put this secret, and holds nothing under its ref: whatever it was to"):
        lying.store("nothing", about=1).put(SCOPE, lying.refs[0], VALUE)
    with pytest.raises(
        StoreMisconfigured, match=r"has put 1 secret, and does not show it like that, nor one that was put, read and"
    ):
        lying.store("nothing").put(SCOPE, lying.refs[0], VALUE)


@pytest.mark.parametrize("lie", PUTS)
def test_no_error_of_a_lie_has_a_value_in_it(lying: Lying, lie: str) -> None:
    value = {"access_token": "canary-3f1b"}
    with pytest.raises((NotAsSaid, SecretIntegrityError)) as one:
        lying.store(lie, about=1).put(SCOPE, lying.refs[0], value)
    with pytest.raises((NotAsSaid, StoreMisconfigured, SecretIntegrityError)) as caught:
        raise next(iter(lying.store(lie).put_many([entry(ref, value) for ref in lying.refs])))  # type: ignore[misc]
    assert "canary" not in repr(caught.value) + repr(one.value)


def test_a_store_that_overwrites_is_told_by_the_one_whose_object_it_was(lying: Lying) -> None:
    """A create-once that is none: who put last reads its own; who put first does not read it back any more."""
    ref = lying.refs[0]
    lying.honest.put(SCOPE, lying.refs[-1], VALUE)
    store = lying.store(OVERWRITES)
    looks: list[Any] = []

    def look(sighting: Any) -> None:
        looks.append(sighting)
        if len(looks) == 2:  # all is written, and not read back
            store.put(SCOPE, ref, OTHER)

    with pytest.raises(SecretIntegrityError, match="not what was put"):
        store.put(SCOPE, ref, VALUE, look=look)
    assert lying.honest.get(SCOPE, ref) == OTHER


def test_what_is_sealed_anew_by_another_before_it_is_read_back_is_what_was_put(
    lying: Lying, kfs_settings: Callable[..., None]
) -> None:
    """Other bytes are no lie, if they are the same secret; the receipt says under which key it is."""
    ref, looks = lying.refs[0], list[Any]()
    lying.honest.put(SCOPE, lying.refs[-1], VALUE)
    keys: Any = django_settings.KFS_CREDENTIALS["KEYS"]
    new = os.urandom(32)

    def look(sighting: Any) -> None:
        looks.append(sighting)
        if len(looks) == 2:
            kfs_settings(KEYS=[new, *keys])
            resealed.append(lying.honest.replace(SCOPE, ref))

    resealed: list[Resealed] = []
    receipt = lying.honest.put(SCOPE, ref, VALUE, look=look)
    assert resealed[0].rewritten
    assert receipt.key_id == resealed[0].key_id


# Get.


@pytest.mark.parametrize("lie", GETS)
def test_what_is_read_is_the_secret_or_an_error(lying: Lying, lie: str, kfs_settings: Callable[..., None]) -> None:
    lying.put()
    store = lying.store(lie)
    first = store.get_many(lying.addresses)
    keys: Any = django_settings.KFS_CREDENTIALS["KEYS"]
    kfs_settings(KEYS=[os.urandom(32), *keys])
    lying.honest.replace_many(lying.addresses)
    outcomes = [*first, *store.get_many(lying.addresses)]
    if lie == "old read":
        # The same secret, as it was sealed before.
        assert all(one == VALUE for one in outcomes)
    else:
        assert all(isinstance(one, SecretIntegrityError) for one in outcomes)


# Delete.


@pytest.mark.parametrize("lie", ["kept", "kept, absent"])
def test_what_is_still_there_was_not_erased(lying: Lying, lie: str) -> None:
    lying.put()
    with pytest.raises(
        StoreMisconfigured, match=r"has erased 6 secrets, and shows none of them like that, nor one that"
    ):
        lying.store(lie).delete_many(lying.addresses)
    store = lying.store(lie, about=2)
    outcomes = store.delete_many(lying.addresses)
    about = lying.lied_about(store)
    assert [isinstance(one, NotAsSaid) for one in outcomes] == about
    assert [one is True for one in outcomes] == [not one for one in about]
    with pytest.raises(NotAsSaid, match=r"^the secret store said that it has erased this secret, and still holds it$"):
        store.delete(SCOPE, lying.refs[0])
    assert lying.readable() == about


@pytest.mark.parametrize("lie", ["kept", "kept, absent"])
def test_what_has_no_ref_is_looked_at_again_too(lying: Lying, lie: str) -> None:
    lying.put()
    store = lying.store(lie, about=2)
    outcomes = store.delete_named([object_name(ref) for ref in lying.refs])
    assert [isinstance(one, NotAsSaid) for one in outcomes] == lying.lied_about(store)


def test_what_was_not_there_was_not_there_whatever_is_said(lying: Lying) -> None:
    """Else a ref whose erasure is confirmed would get another horizon, each time."""
    lying.put()
    store = lying.store("was there")
    assert store.delete_many(lying.addresses) == [True] * 6
    assert store.delete_many(lying.addresses) == [False] * 6


def test_a_look_after_an_erasure_needs_no_key(lying: Lying, kfs_settings: Callable[..., None]) -> None:
    lying.put()
    kfs_settings(KEYS=[os.urandom(32)])
    assert lying.store("nothing").delete_many(lying.addresses) == [True] * 6


# Replace.


@pytest.fixture
def new_key(kfs_settings: Callable[..., None]) -> Callable[[], None]:
    def change() -> None:
        keys: Any = django_settings.KFS_CREDENTIALS["KEYS"]
        kfs_settings(KEYS=[os.urandom(32), *keys])

    return change


def test_what_is_still_under_the_old_key_was_not_replaced(lying: Lying, new_key: Callable[[], None]) -> None:
    lying.put()
    new_key()
    store = lying.store("old kept", about=2)
    outcomes = store.replace_many(lying.addresses)
    about = lying.lied_about(store)
    assert [isinstance(one, NotAsSaid) for one in outcomes] == about
    assert [isinstance(one, Resealed) and one.rewritten for one in outcomes] == [not one for one in about]
    assert all(lying.readable())
    outcomes = lying.store("old kept").replace_many(lying.addresses)
    assert [isinstance(one, NotAsSaid) for one in outcomes] == about  # what is under the new key already, stays


def test_what_a_replacement_loses_is_put_again(lying: Lying, new_key: Callable[[], None]) -> None:
    lying.put()
    new_key()
    outcomes = lying.store("lost").replace_many(lying.addresses)
    assert all(isinstance(one, Resealed) and one.rewritten and one.plaintext is None for one in outcomes)
    assert all(lying.readable())
    assert not any(one.rewritten for one in lying.honest.replace_many(lying.addresses) if isinstance(one, Resealed))


def test_what_a_replacement_loses_is_put_again_though_its_time_is_over(
    lying: Lying, new_key: Callable[[], None]
) -> None:
    """Nobody else has it: neither the deadline nor a lost lease keeps it out."""
    lying.put()
    new_key()
    asked: list[bool] = []
    lying.honest.start_replace_many(lying.addresses[1:2], guard=lambda: asked.append(True)).result()
    granted = list(asked)

    def guard() -> None:
        if not granted:
            raise LeaseLost("the lease ran out")
        granted.pop()

    (outcome,) = lying.store("lost").start_replace_many(lying.addresses[:1], guard=guard).result()
    assert isinstance(outcome, Resealed)
    assert granted == []
    assert lying.readable()[0]


def test_what_a_store_does_not_take_back_is_said_to_be_lost(
    lying: Lying, new_key: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Not even then is it said to be sealed anew, and a person hears of it."""
    lying.put()
    new_key()
    store = lying.store("lost for good")
    with pytest.raises(SecretLost, match=r"^the secret store does not give this secret back .* restore its object fro"):
        store.replace(SCOPE, lying.refs[0])
    assert [type(one) for one in store.replace_many(lying.addresses)] == [SecretNotFound] + [SecretLost] * 5
    assert to_restore(caplog) == lying.refs


def to_restore(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the refs of which a person is told that their objects have to be restored; no value is in that."""
    said = [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"]
    assert not any(str(value) in text for text in said for value in VALUE.values())
    return [text.removeprefix("ref ").split(": ")[0] for text in said]


def test_half_of_a_replacement_is_put_again_in_its_place(
    lying: Lying, new_key: Callable[[], None], caplog: pytest.LogCaptureFixture, kfs_settings: Callable[..., None]
) -> None:
    """Whatever its size: it was in the store already."""
    lying.put()
    new_key()
    kfs_settings(MAX_SECRET_BYTES=10)
    outcomes = lying.store("half new", about=2).replace_many(lying.addresses)
    assert all(isinstance(one, Resealed) and one.rewritten for one in outcomes)
    assert all(lying.readable())
    assert not any(one.rewritten for one in lying.honest.replace_many(lying.addresses) if isinstance(one, Resealed))
    assert to_restore(caplog) == []


def test_half_of_a_replacement_that_stays_is_said_to_be_lost(
    lying: Lying, new_key: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    lying.put()
    new_key()
    store = lying.store("half new for good", about=2)
    outcomes = store.replace_many(lying.addresses)
    about = lying.lied_about(store)
    assert [isinstance(one, SecretLost) for one in outcomes] == about
    assert lying.readable() == [not one for one in about]
    assert to_restore(caplog) == [ref for ref, lied in zip(lying.refs, about, strict=True) if lied]


def test_what_is_sealed_under_a_key_of_others_is_not_overwritten(
    lying: Lying,
    new_key: Callable[[], None],
    kfs_settings: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another run has begun, with a newer key: what it writes is no damage, though it cannot be read here."""
    lying.put()
    new_key()
    ours: Any = django_settings.KFS_CREDENTIALS["KEYS"]
    ref, real = lying.refs[0], DurableFileStorage.replace_many
    newer = [os.urandom(32), *ours]

    def replace_many(self: DurableFileStorage, *arguments: Any, **options: Any) -> Any:
        answers = real(self, *arguments, **options)
        monkeypatch.undo()
        kfs_settings(KEYS=newer)
        lying.honest.replace(SCOPE, ref)
        kfs_settings(KEYS=ours)
        return answers

    monkeypatch.setattr(DurableFileStorage, "replace_many", replace_many)
    with pytest.raises(SecretLost):
        EncryptedStore(DurableFileStorage(lying.location)).replace(SCOPE, ref)
    assert "which is not in the key ring" in caplog.text
    kfs_settings(KEYS=newer)
    assert lying.readable()[0]


@pytest.mark.parametrize("lie", ["lost", "half new"])
def test_what_is_lost_is_put_again_where_it_cannot_be_read_in_time(
    lying: Lying, new_key: Callable[[], None], monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    lying.put()
    new_key()
    store, late = lying.store(lie), StoreUnavailable("time is up")
    real = LyingStorage.read_many

    def read_many(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(LyingStorage, "read_many", real)
        raise late

    monkeypatch.setattr(LyingStorage, "read_many", read_many)
    assert all(isinstance(one, Resealed) for one in store.replace_many(lying.addresses))
    assert all(lying.readable())


def test_what_cannot_be_looked_at_at_all_is_named(
    lying: Lying, new_key: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store is gone in the middle: it says so for the whole batch, and a person knows what to look for."""
    lying.put()
    new_key()
    store = lying.store("lost", about=2)
    about = lying.lied_about(store)

    def gone(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(LyingStorage, "read_many", gone)
    monkeypatch.setattr(LyingStorage, "create_many", gone)
    with pytest.raises(StoreUnavailable, match=r"^gone$"):
        store.replace_many(lying.addresses)
    monkeypatch.undo()
    assert to_restore(caplog) == lying.refs
    assert lying.readable() == [not one for one in about]


@pytest.mark.parametrize("why", ["lease", "foreseen by nobody", "probe"])
def test_what_was_lost_before_a_replacement_was_stopped_is_put_again(
    lying: Lying, new_key: Callable[[], None], why: str
) -> None:
    """What was not rewritten by then is left alone; and what was erased since it was read stays erased."""
    lying.put()
    new_key()
    store, asked = lying.store("lost"), list[bool]()
    lying.honest.start_replace_many(lying.addresses[5:], guard=lambda: asked.append(True)).result()
    reads, looks = len(asked) - 1, list[Any]()
    error: Exception = LookupError() if why == "foreseen by nobody" else LeaseLost("the lease ran out")
    asked.clear()

    def guard() -> None:
        asked.append(True)
        if len(asked) == 5 * reads + 3 and why != "probe":
            assert lying.honest.delete(SCOPE, lying.refs[2])
            assert lying.honest.delete(SCOPE, lying.refs[3])
            raise error

    def look(sighting: Any) -> None:
        looks.append(sighting)
        if len(looks) == 2 and why == "probe":
            raise error

    call = store.start_replace_many(lying.addresses[:5], guard=guard, look=look)
    if why == "foreseen by nobody":
        outcomes = call.result()
        assert [type(one) for one in outcomes] == [*[Resealed] * 2, *[SecretNotFound] * 2, Resealed]
    else:
        with pytest.raises(LeaseLost):
            call.result()
    erased = (2, 3) if why != "probe" else ()
    assert lying.readable() == [place not in erased for place in range(6)]


# The trial.


def test_a_trial_that_is_out_of_time_is_erased_all_the_same(
    lying: Lying, monkeypatch: pytest.MonkeyPatch, files: Callable[[], list[Path]]
) -> None:
    """And whoever has no lease any more."""
    store = lying.store("nothing", about=1)
    real, calls = EncryptedStore._read_back, list[Any]()

    def late(self: EncryptedStore, *arguments: Any, deadline: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            deadline.at -= 120
            deadline.check()
        return real(self, *arguments, deadline=deadline)

    monkeypatch.setattr(EncryptedStore, "_read_back", late)
    with pytest.raises(StoreUnavailable):
        store.put(SCOPE, lying.refs[0], VALUE)
    assert len(calls) == 2
    assert files() == []


@pytest.mark.usefixtures("one_trial")
def test_what_is_left_of_a_trial_is_in_no_list_and_no_harm(
    lying: Lying, files: Callable[[], list[Path]], new_key: Callable[[], None], kfs_settings: Callable[..., None]
) -> None:
    """A process died in it: the next one erases it, though the key is gone under which it was sealed."""
    lying.honest._put_many([Entry(TRIAL_SCOPE, TRIAL_REFS[0], Plaintext.of({}))], deadline=Deadline(60))
    assert len(files()) == 1
    assert list(lying.honest.list()) == []
    kfs_settings(KEYS=[os.urandom(32)])
    with pytest.raises(NotAsSaid):
        lying.store("nothing", about=1).put(SCOPE, lying.refs[0], VALUE)
    assert files() == []


@pytest.fixture
def one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that try a store do so under the same ref."""
    monkeypatch.setattr("kfs_credentials.stores.base.TRIAL_REFS", TRIAL_REFS[:1])
    monkeypatch.setattr("kfs_credentials.stores.base.TRIALS", 1)


def test_who_tries_it_at_the_same_moment_makes_no_store_misconfigured(
    lying: Lying, monkeypatch: pytest.MonkeyPatch, files: Callable[[], list[Path]]
) -> None:
    """Another process erases what this one has put to try it, and once more under the next ref."""
    store = lying.store("nothing", about=1)
    real, tried = EncryptedStore._read_back, list[str]()

    def erased(self: EncryptedStore, entries: Any, *arguments: Any, **options: Any) -> Any:
        for one in entries:
            if one.scope == TRIAL_SCOPE and len(tried) < 2:
                tried.append(one.ref)
                self.storage.remove_many([self._name(one)])
        return real(self, entries, *arguments, **options)

    monkeypatch.setattr(EncryptedStore, "_read_back", erased)
    with pytest.raises(NotAsSaid):
        store.put(SCOPE, lying.refs[0], VALUE)
    assert len(set(tried)) == 2
    assert files() == []


def test_a_trial_that_does_not_fit_says_nothing_about_an_erasure(lying: Lying, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full store is erased from, one object after the other; what stays is that object's own error."""
    lying.put()
    store = lying.store("kept")

    def full(*_: Any, **__: Any) -> Any:
        raise StoreFull("no room")

    monkeypatch.setattr(LyingStorage, "create_many", full)
    outcomes = store.delete_many(lying.addresses)
    assert [type(one) for one in outcomes] == [NotAsSaid] * 6


# List, and what is known of an object.


def test_a_list_in_any_order_is_put_in_order(lying: Lying) -> None:
    lying.put()
    assert list(lying.store("nothing").list()) == sorted(object_name(ref) for ref in lying.refs)


def test_phantoms_are_listed_and_nothing_is_erased_for_them(lying: Lying) -> None:
    lying.put()
    store = lying.store("phantoms")
    names = list(store.list())
    assert len(names) == 6 + 16
    phantoms = [name for name in names if name not in {object_name(ref) for ref in lying.refs}]
    assert store.delete_named(phantoms) == [False] * 16
    assert all(lying.readable())


def test_a_list_without_an_end_is_over_at_its_deadline(lying: Lying, kfs_settings: Callable[..., None]) -> None:
    """And so is its thread: it goes round no longer than its caller waits."""
    lying.put()
    kfs_settings(STORE_TIMEOUT=0.1)
    store = lying.store("circles")
    with pytest.raises(StoreUnavailable, match=r"did not answer within 0\.1 s"):
        list(store.list())
    for one in store._calls._at_work:
        one.thread.join(60)
        assert not one.thread.is_alive()


class Circling(EncryptedStore):
    """Lists its first page again and again."""

    def _list(self, after: str, *, deadline: Any) -> Any:
        return super()._list("", deadline=deadline)


def test_a_store_that_lists_the_same_again_is_misconfigured(lying: Lying, secrets_directory: Path) -> None:
    lying.put()
    store = Circling(LyingStorage(str(secrets_directory)))
    with pytest.raises(
        StoreMisconfigured, match=r"^the secret store lists its objects in no order, or some of them tw"
    ):
        list(store.list())


@pytest.mark.parametrize("lie", ["year 1", "text", "overflow"])
def test_a_time_that_is_none_is_not_known_or_long_ago(lying: Lying, lie: str) -> None:
    lying.put()
    name = object_name(lying.refs[0])
    found = lying.store(lie)
    if lie == "overflow":
        with pytest.raises(SecretStoreError, match="in an unexpected way"):
            found.modified_at(name)
    else:
        at = found.modified_at(name)
        assert at is None or at.year == 1


# The probe.


def test_a_probe_that_is_not_written_is_misconfigured(lying: Lying, db: None) -> None:
    seen = lying.honest.read_probe()
    assert isinstance(seen, Probe)
    store = lying.store("nothing", probe="probe kept")
    other = replace(seen, epoch=99)
    with pytest.raises(StoreMisconfigured, match="has written its probe, and shows another one, or none"):
        store.start_replace_probe(other).result()
    assert lying.honest.read_probe() == seen

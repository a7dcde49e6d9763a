"""No error of a store takes a secret or an object's path along, and foreign errors stay behind.

The tests look at whatever an error tracker would: texts, earlier errors, the variables of every frame.
"""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kfs_credentials
from kfs_credentials.crypto import Plaintext, new_ref, object_name
from kfs_credentials.errors import KfsCredentialsError, LeaseLost, SecretStoreError
from kfs_credentials.stores import Address, Entry, Receipt, secret_stores
from kfs_credentials.stores.files import DurableFileStorage
from tests.crypto.test_leaks import frames, shown
from tests.stores.contract import OTHERS, SCOPE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfs_credentials.stores.encrypted import EncryptedStore

CANARY = "canary-93e0aa"
SECRET = {"password": CANARY}
BELOW = "__knowledge-secrets"
PACKAGE = str(Path(kfs_credentials.__file__).parent)


def bare(error: BaseException, *hidden: str) -> None:
    """Assert that none of the texts is anywhere in the error, nor CANARY in a variable of our frames."""
    assert error.__cause__ is None
    assert error.__context__ is None
    for text in (str(error), repr(error), *map(repr, error.args), *shown(vars(error))):
        for word in (CANARY, *hidden):
            assert word not in text
    below = [frame for frame in frames(error.__traceback__) if frame.f_code.co_filename.startswith(PACKAGE)]
    assert below
    for frame in below:
        for text in shown(frame.f_locals):
            assert CANARY not in text, frame.f_code


# Errors of our own.


def conflict(store: EncryptedStore, ref: str, _: Path) -> None:
    store.put(SCOPE, ref, {"password": f"{CANARY} too"})


def of_another_scope(store: EncryptedStore, ref: str, _: Path) -> None:
    store.put(OTHERS[0], ref, SECRET)


def damaged(store: EncryptedStore, ref: str, directory: Path) -> None:
    (directory / object_name(ref)).write_text(f'{{"password":"{CANARY}"}}')
    store.get(SCOPE, ref)


def too_large(store: EncryptedStore, *_: Any) -> None:
    store.put(SCOPE, new_ref(), {"password": CANARY * 10_000})


def not_json(store: EncryptedStore, *_: Any) -> None:
    store.put(SCOPE, new_ref(), {"password": CANARY, "more": [CANARY, float("nan")]})


def not_an_object(store: EncryptedStore, *_: Any) -> None:
    store.put(SCOPE, new_ref(), [CANARY])  # type: ignore[arg-type]


def no_ref(store: EncryptedStore, *_: Any) -> None:
    store.put(SCOPE, CANARY, SECRET)


def missing(store: EncryptedStore, *_: Any) -> None:
    store.get(SCOPE, new_ref())


def not_a_directory(store: EncryptedStore, ref: str, directory: Path) -> None:
    (directory / BELOW).rename(directory / "elsewhere")
    (directory / BELOW).write_text("")
    store.put(SCOPE, ref, SECRET)


def not_a_directory_to_list(store: EncryptedStore, ref: str, directory: Path) -> None:
    (directory / BELOW).rename(directory / "elsewhere")
    (directory / BELOW).write_text("")
    list(store.list())


def not_a_file_to_delete(store: EncryptedStore, ref: str, directory: Path) -> None:
    (directory / object_name(ref)).unlink()
    (directory / object_name(ref)).mkdir()
    store.delete(SCOPE, ref)


def lease_lost(store: EncryptedStore, *_: Any) -> None:
    def guard() -> None:
        raise LeaseLost("the lease ran out")

    store.start_put_many([Entry(SCOPE, new_ref(), Plaintext.of(SECRET))], guard=guard).result()


FAILURES = [
    conflict,
    of_another_scope,
    damaged,
    too_large,
    not_json,
    not_an_object,
    no_ref,
    missing,
    not_a_directory,
    not_a_directory_to_list,
    not_a_file_to_delete,
    lease_lost,
]


@pytest.mark.parametrize("fail", FAILURES)
def test_no_error_takes_a_secret_or_a_path_along(
    store: EncryptedStore, secrets_directory: Path, fail: Callable[..., None]
) -> None:
    ref = new_ref()
    store.put(SCOPE, ref, SECRET)

    with pytest.raises(KfsCredentialsError) as caught:
        fail(store, ref, secrets_directory)

    bare(caught.value, object_name(ref)[-68:], str(secrets_directory))


def test_no_outcome_of_a_batch_takes_a_secret_along(store: EncryptedStore, secrets_directory: Path) -> None:
    taken, broken = new_ref(), new_ref()
    store.put(SCOPE, taken, {"password": "other"})
    store.put(SCOPE, broken, SECRET)
    (secrets_directory / object_name(broken)).write_bytes(b"{}")
    entries = [Entry(SCOPE, ref, Plaintext.of(SECRET)) for ref in (taken, broken, CANARY)]
    large = Entry(SCOPE, new_ref(), Plaintext.of({"password": CANARY * 10_000}))

    outcomes = [
        *store.put_many([*entries, large]),
        *store.get_many([Address(SCOPE, ref) for ref in (broken, new_ref(), CANARY)]),
        *store.delete_many([Address(SCOPE, CANARY)]),
    ]

    for outcome in outcomes:
        assert isinstance(outcome, KfsCredentialsError)
        assert (outcome.__cause__, outcome.__context__) == (None, None)
        for frame in frames(outcome.__traceback__):
            assert not any(CANARY in text for text in shown(frame.f_locals)), frame.f_code
        assert CANARY not in f"{outcome} {outcome!r}"


# Errors of others.


class ForeignError(Exception):
    """As a client library may raise it: the request is in its text, its arguments and its attributes."""

    def __init__(self) -> None:
        super().__init__(f"403 for {CANARY}", {"body": CANARY})
        self.response = {"headers": {"authorization": CANARY}}
        self.add_note(CANARY)


def raise_foreign(*_: Any, **__: Any) -> Any:
    password = CANARY
    raise ForeignError from OSError(5, password, f"/{password}")


class FailingStorage(DurableFileStorage):
    """Raises what is foreign to us wherever a store calls it."""

    check = create_many = replace_many = read = read_many = remove_many = present = names = raise_foreign


class ChoosyStorage(DurableFileStorage):
    """Fails at one object, whose name is `refuses`."""

    refuses = ""

    def create_many(self, files: Any, **keywords: Any) -> list[bool | SecretStoreError]:
        if self.refuses in [name for name, _ in files]:
            raise_foreign()
        return super().create_many(files, **keywords)


@pytest.fixture
def use_storage(secrets_directory: Path, kfs_settings: Callable[..., None]) -> Callable[[type], None]:
    def use(storage: type) -> None:
        options = {
            "storage": {
                "BACKEND": f"{__name__}.{storage.__name__}",
                "OPTIONS": {"location": str(secrets_directory)},
            }
        }
        backend = "kfs_credentials.stores.encrypted.EncryptedStore"
        kfs_settings(STORES={"default": {"BACKEND": backend, "OPTIONS": options}})

    return use


UNEXPECTED = "the secret store failed in an unexpected way (ForeignError)"
CALLS: dict[str, Callable[[], object]] = {
    "put": lambda: secret_stores["default"].put(SCOPE, new_ref(), SECRET),
    "get": lambda: secret_stores["default"].get(SCOPE, new_ref()),
    "delete": lambda: secret_stores["default"].delete(SCOPE, new_ref()),
    "replace": lambda: secret_stores["default"].replace(SCOPE, new_ref()),
    "list": lambda: list(secret_stores["default"].list()),
    "check": lambda: secret_stores["default"].check(),  # noqa: PLW0108 - the store is another one by then
}


@pytest.mark.parametrize("call", CALLS)
def test_a_foreign_error_stays_behind_and_its_lines_of_code_are_logged(
    use_storage: Callable[[type], None], caplog: pytest.LogCaptureFixture, call: str
) -> None:
    use_storage(FailingStorage)
    caplog.set_level(logging.DEBUG)

    with pytest.raises(SecretStoreError) as caught:
        CALLS[call]()

    assert str(caught.value) == UNEXPECTED
    bare(caught.value)
    # Whoever looks for the fault finds where it was raised.
    assert "raise ForeignError from OSError" in "".join(traceback.format_tb(caught.value.__traceback__))
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert UNEXPECTED in record.getMessage()
    assert "raise ForeignError from OSError" in record.getMessage()
    assert not any(CANARY in text for text in (caplog.text, *shown(vars(record))))


def test_of_a_batch_only_those_fail_at_which_the_storage_fails(
    use_storage: Callable[[type], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_storage(ChoosyStorage)
    refs = [new_ref() for _ in range(9)]
    entries = [Entry(SCOPE, ref, Plaintext.of(SECRET)) for ref in refs]
    monkeypatch.setattr(ChoosyStorage, "refuses", object_name(refs[5]))

    outcomes = secret_stores["default"].put_many(entries)

    failed = outcomes.pop(5)
    assert isinstance(failed, SecretStoreError)
    assert str(failed) == UNEXPECTED
    assert all(isinstance(outcome, Receipt) for outcome in outcomes)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"1 of 9 times, {UNEXPECTED}:\n")

    monkeypatch.undo()
    assert all(isinstance(outcome, Receipt) for outcome in secret_stores["default"].put_many(entries))


def test_the_error_of_a_foreign_guard_stays_behind_too(store: EncryptedStore) -> None:
    entries = [Entry(SCOPE, new_ref(), Plaintext.of(SECRET))]
    (outcome,) = store.start_put_many(entries, guard=raise_foreign).result()

    assert isinstance(outcome, SecretStoreError)
    assert str(outcome) == UNEXPECTED

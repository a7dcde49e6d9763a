"""What every secret store has to do, whatever it is made of.

A store is tested by a subclass of `SecretStoreContract` with a fixture `backdoor`: its own way to the objects. Keep
the class out of the subclass's namespace as a bare name, or pytest collects it too:

    from tests.stores import contract

    class TestThisStore(contract.SecretStoreContract): ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest

from kfs_credentials.crypto import Plaintext, Scope, new_ref, parse_json
from kfs_credentials.errors import (
    CredentialsTooLarge,
    InvalidCredentials,
    InvalidRef,
    SecretConflict,
    SecretIntegrityError,
    SecretNotFound,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.stores import Address, Entry, Receipt, SecretStore, secret_stores
from tests.stores.contract_processes import ProcessesContract
from tests.stores.contract_replace import ReplaceContract

if TYPE_CHECKING:
    from collections.abc import Callable

CANARY = "canary-7d41b0"
SCOPE = Scope("tenant-a", "0d9bdd4c-5e0a-4d2a-9d6d-9a3a4f8c3c10", "5b0c0f0e-6a55-4f4b-8f0e-0d6a3d1f9b77")
OTHERS = [
    Scope("tenant-b", SCOPE.knowledge_space_id, SCOPE.source_id),
    Scope(SCOPE.tenant_id, "0d9bdd4c-5e0a-4d2a-9d6d-9a3a4f8c3c11", SCOPE.source_id),
    Scope(SCOPE.tenant_id, SCOPE.knowledge_space_id, "5b0c0f0e-6a55-4f4b-8f0e-0d6a3d1f9b78"),
]
VALUE: dict[str, Any] = {"access_token": "made-up-1", "scopes": ["files.read"]}
OTHER: dict[str, Any] = {"access_token": "made-up-2", "scopes": ["files.read"]}

VALUES: dict[str, str] = {
    "empty": "{}",
    "one field": '{"api_key":"made-up"}',
    "a field called credentials": '{"credentials":"{\\"type\\":\\"service_account\\"}","n":1}',
    "beyond the BMP": '{"pass😀word":"p\\u0000\\u2028\\ud83d\\ude00\\"\\\\/é"}',
    "newlines": '{"private_key":"-----BEGIN-----\\nMII\\r\\n\\t-----END-----\\n"}',
    "big integer": '{"n":123456789012345678901234567890,"m":-9007199254740993}',
    "beyond a double": '{"n":1e400,"m":-1.5e-400}',
    "digits": '{"n":0.1000000000000000055511151231257827021181583404541015625,"m":3.141592653589793238462643}',
    "plain numbers": '{"a":0,"b":-0.5,"c":1e21,"d":1e-7,"e":4.9e-324}',
    "nested": '{"a":[[{"b":[null,true,false,"",[],{}]}]],"":{"":""}}',
    "like a ref": '{"token":"source-secret:v1:5b0c0f0e-6a55-4f4b-8f0e-0d6a3d1f9b77"}',
}


class Backdoor(Protocol):
    """How the tests get at a store's objects without the store."""

    def name(self, ref: str) -> str:
        """Return the name under which the store lists the object."""

    def read(self, ref: str) -> bytes | None:
        """Return the stored bytes; None if there is no object."""

    def write(self, ref: str, blob: bytes) -> None:
        """Put these bytes at the object's place, whatever is there."""

    def state(self, ref: str) -> object:
        """Return something that changes whenever the object is written."""

    def visible(self) -> str:
        """Return whatever is to be seen of all objects but their contents: names, metadata."""

    def add_foreign(self) -> None:
        """Put things that are no objects, or no whole ones, where the objects are."""

    def take_away(self) -> None:
        """Make the store unusable, as a volume that is not mounted or a server that is down."""


def entry(ref: str, value: dict[str, Any] = VALUE, scope: Scope = SCOPE) -> Entry:
    return Entry(scope, ref, Plaintext.of(value))


class SecretStoreContract(ProcessesContract, ReplaceContract):
    """The contract. `KFS_CREDENTIALS['STORES']['default']` has to be the store, empty."""

    @pytest.fixture
    def backdoor(self) -> Backdoor:
        raise NotImplementedError

    @pytest.fixture
    def store(self, backdoor: Backdoor) -> SecretStore:
        return secret_stores["default"]

    # Put and get.

    @pytest.mark.parametrize("text", VALUES.values(), ids=VALUES)
    def test_what_goes_in_comes_out(self, store: SecretStore, text: str) -> None:
        value, ref = parse_json(text), new_ref()
        assert isinstance(value, dict)

        receipt = store.put(SCOPE, ref, value)
        got = store.get(SCOPE, ref)

        assert got == value
        assert Plaintext.of(got).exact == Plaintext.of(value).exact
        assert receipt.size == len(Plaintext.of(value).exact)

    def test_the_largest_secret_fits_and_one_byte_more_does_not(self, store: SecretStore) -> None:
        largest, larger = ({"k": "x" * (65536 - len('{"k":""}') + more)} for more in (0, 1))
        ref, refused = new_ref(), new_ref()

        assert store.put(SCOPE, ref, largest).size == 65536
        assert store.get(SCOPE, ref) == largest
        with pytest.raises(CredentialsTooLarge, match="have 65,537 bytes as canonical JSON; the limit is 65,536"):
            store.put(SCOPE, refused, larger)
        with pytest.raises(SecretNotFound):
            store.get(SCOPE, refused)

    def test_a_limit_that_was_lowered_keeps_nobody_from_reading(
        self, store: SecretStore, kfs_settings: Callable[..., None]
    ) -> None:
        ref, refused = new_ref(), new_ref()
        store.put(SCOPE, ref, VALUE)

        kfs_settings(MAX_SECRET_BYTES=10)

        assert store.get(SCOPE, ref) == VALUE
        with pytest.raises(CredentialsTooLarge, match="the limit is 10 "):
            store.put(SCOPE, refused, VALUE)
        with pytest.raises(SecretConflict):
            store.put(SCOPE, ref, {})

    def test_the_same_again_is_success_and_writes_nothing(self, store: SecretStore, backdoor: Backdoor) -> None:
        ref = new_ref()
        first = store.put(SCOPE, ref, VALUE)
        before = backdoor.state(ref)

        again = store.put(SCOPE, ref, dict(reversed(VALUE.items())))

        assert again == first
        assert backdoor.state(ref) == before

    def test_other_content_is_a_conflict_and_the_first_stands(self, store: SecretStore, backdoor: Backdoor) -> None:
        ref = new_ref()
        store.put(SCOPE, ref, VALUE)
        before = backdoor.read(ref), backdoor.state(ref)

        with pytest.raises(SecretConflict, match="already holds a different secret; the first one stands") as caught:
            store.put(SCOPE, ref, OTHER)

        assert not caught.value.rounding_only
        assert (backdoor.read(ref), backdoor.state(ref)) == before
        assert store.get(SCOPE, ref) == VALUE

    def test_a_conflict_says_if_only_digits_beyond_a_double_differ(self, store: SecretStore) -> None:
        ref = new_ref()
        store.put(SCOPE, ref, {"n": 9007199254740992})

        with pytest.raises(SecretConflict) as caught:
            store.put(SCOPE, ref, {"n": 9007199254740993})

        assert caught.value.rounding_only
        assert store.get(SCOPE, ref) == {"n": 9007199254740992}

    @pytest.mark.parametrize("other", OTHERS, ids=["tenant", "space", "source"])
    def test_another_scope_can_neither_get_nor_put(self, store: SecretStore, backdoor: Backdoor, other: Scope) -> None:
        ref = new_ref()
        store.put(SCOPE, ref, VALUE)
        before = backdoor.read(ref)

        with pytest.raises(SecretIntegrityError, match="decryption failed"):
            store.get(other, ref)
        with pytest.raises(SecretIntegrityError, match="decryption failed"):
            store.put(other, ref, VALUE)

        assert backdoor.read(ref) == before

    def test_an_object_at_another_ref_is_not_taken_for_its_secret(self, store: SecretStore, backdoor: Backdoor) -> None:
        ref, other = new_ref(), new_ref()
        store.put(SCOPE, ref, VALUE)
        backdoor.write(other, backdoor.read(ref) or b"")

        with pytest.raises(SecretIntegrityError, match="decryption failed"):
            store.get(SCOPE, other)

    @pytest.mark.parametrize("damage", ["empty", "cut short", "changed", "plaintext", "something else"])
    def test_a_damaged_object_is_an_integrity_error_and_stays(
        self, store: SecretStore, backdoor: Backdoor, damage: str
    ) -> None:
        ref = new_ref()
        store.put(SCOPE, ref, VALUE)
        blob = backdoor.read(ref) or b""
        damaged = {
            "empty": b"",
            "cut short": blob[:-40],
            "changed": blob.replace(b'"ciphertext":"', b'"ciphertext":"AAAA'),
            "plaintext": Plaintext.of(VALUE).exact,
            "something else": b"\xff\x00" * 50,
        }[damage]
        assert damaged != blob
        backdoor.write(ref, damaged)

        with pytest.raises(SecretIntegrityError, match="the stored secret cannot be trusted"):
            store.get(SCOPE, ref)
        with pytest.raises(SecretIntegrityError, match="the stored secret cannot be trusted"):
            store.put(SCOPE, ref, VALUE)

        assert backdoor.read(ref) == damaged

    def test_a_missing_secret_is_not_found(self, store: SecretStore) -> None:
        ref = new_ref()
        with pytest.raises(SecretNotFound, match=r"^the secret store holds nothing under this ref$"):
            store.get(SCOPE, ref)
        store.put(SCOPE, ref, VALUE)
        with pytest.raises(SecretNotFound):
            store.get(SCOPE, new_ref())

    def test_changing_what_was_got_changes_no_later_get(self, store: SecretStore) -> None:
        ref = new_ref()
        value = {"a": [1, {"b": "made-up"}]}
        store.put(SCOPE, ref, value)
        first = store.get(SCOPE, ref)

        first["a"].append(2)
        first.reveal()["a"][1]["b"] = "changed"
        value["a"].append(3)

        assert first == store.get(SCOPE, ref) == {"a": [1, {"b": "made-up"}]}

    # Delete.

    def test_delete_erases_and_is_idempotent(self, store: SecretStore, backdoor: Backdoor) -> None:
        ref, kept = new_ref(), new_ref()
        store.put_many([entry(ref), entry(kept)])

        assert store.delete(SCOPE, ref) is True
        assert backdoor.read(ref) is None
        assert store.delete(SCOPE, ref) is False
        assert store.delete(SCOPE, new_ref()) is False
        with pytest.raises(SecretNotFound):
            store.get(SCOPE, ref)
        assert store.get(SCOPE, kept) == VALUE

    def test_delete_neither_reads_nor_decrypts(
        self, store: SecretStore, backdoor: Backdoor, kfs_settings: Callable[..., None]
    ) -> None:
        damaged, foreign, under_another_key = new_ref(), new_ref(), new_ref()
        store.put_many([entry(damaged), entry(foreign, scope=OTHERS[0]), entry(under_another_key)])
        backdoor.write(damaged, b"\x00")
        kfs_settings(KEYS=["f" * 64])

        for ref in (damaged, foreign, under_another_key):
            assert store.delete(SCOPE, ref) is True
            assert backdoor.read(ref) is None

    def test_what_was_deleted_may_be_put_again(self, store: SecretStore) -> None:
        ref = new_ref()
        store.put(SCOPE, ref, VALUE)
        store.delete(SCOPE, ref)

        store.put(SCOPE, ref, OTHER)

        assert store.get(SCOPE, ref) == OTHER

    # What is refused before the store is touched.

    @pytest.mark.parametrize(
        "ref",
        [
            "",
            "5b0c0f0e-6a55-4f4b-8f0e-0d6a3d1f9b77",
            "source-secret:v1:5B0C0F0E-6A55-4F4B-8F0E-0D6A3D1F9B77",
            "source-secret:v1:5b0c0f0e-6a55-1f4b-8f0e-0d6a3d1f9b77",
            "source-secret:v2:5b0c0f0e-6a55-4f4b-8f0e-0d6a3d1f9b77",
            "source-secret:v1:../../5b0c0f0e-6a55-4f4b-8f0e-0d6a3d1f",
            "source-secret:v1:5b0c0f0e-6a55-4f4b-8f0e-0d6a3d1f9b77\n",
        ],
    )
    def test_what_is_no_ref_is_refused_before_the_store_is_touched(
        self, store: SecretStore, backdoor: Backdoor, ref: str
    ) -> None:
        backdoor.take_away()
        for call in (store.get, store.delete, store.replace, lambda scope, ref: store.put(scope, ref, VALUE)):
            with pytest.raises(InvalidRef, match="A ref is 'source-secret:v1:' and a version 4 UUID in lower case"):
                call(SCOPE, ref)

    def test_what_is_no_secret_is_refused_before_the_store_is_touched(
        self, store: SecretStore, backdoor: Backdoor
    ) -> None:
        backdoor.take_away()
        for value in ({"a": [float("nan")]}, {"a": [float("inf")]}, {1: "a"}, {"a": b""}, ["a"], "a", None):
            with pytest.raises(InvalidCredentials):
                store.put(SCOPE, new_ref(), value)  # type: ignore[arg-type]

    def test_a_store_that_is_away_says_so_and_takes_nothing_for_gone(
        self, store: SecretStore, backdoor: Backdoor
    ) -> None:
        ref = new_ref()
        store.put(SCOPE, ref, VALUE)
        backdoor.take_away()

        calls: list[Callable[[], object]] = [
            lambda: store.get(SCOPE, ref),
            lambda: store.put(SCOPE, ref, VALUE),
            lambda: store.delete(SCOPE, ref),
            lambda: store.replace(SCOPE, ref),
            lambda: list(store.list()),
            store.check,
        ]
        for call in calls:
            with pytest.raises((StoreMisconfigured, StoreUnavailable)):
                call()

    # Batches.

    def test_a_batch_answers_for_each_in_order(self, store: SecretStore, backdoor: Backdoor) -> None:
        same, taken, rounded, damaged, new, twice = (new_ref() for _ in range(6))
        store.put_many([entry(same), entry(taken), entry(rounded, {"n": 2**53}), entry(damaged)])
        backdoor.write(damaged, b"{}")

        outcomes = store.put_many(
            [
                entry("no ref"),
                entry(taken, OTHER),
                entry(new),
                entry(new_ref(), {"k": "x" * 65536}),
                entry(same),
                entry(rounded, {"n": 2**53 + 1}),
                entry(damaged),
                entry(same, scope=OTHERS[0]),
                entry(twice),
                entry(twice),
                entry(twice, OTHER),
            ]
        )

        assert [type(outcome) for outcome in outcomes] == [
            InvalidRef,
            SecretConflict,
            Receipt,
            CredentialsTooLarge,
            Receipt,
            SecretConflict,
            SecretIntegrityError,
            SecretIntegrityError,
            Receipt,
            Receipt,
            SecretConflict,
        ]
        assert [getattr(outcome, "rounding_only", None) for outcome in outcomes] == [
            *[None, False, None, None, None, True, None, None, None, None, False]
        ]
        addresses = [Address(SCOPE, ref) for ref in ("no ref", new, new_ref(), damaged, twice, same)]
        got = store.get_many(addresses)
        assert [got[place] for place in (1, 4, 5)] == [VALUE, VALUE, VALUE]
        assert [type(got[place]) for place in (0, 2, 3)] == [InvalidRef, SecretNotFound, SecretIntegrityError]
        gone = store.delete_many(addresses)
        assert isinstance(gone[0], InvalidRef)
        assert gone[1:] == [True, False, True, True, True]

    def test_an_empty_batch_is_nothing(self, store: SecretStore, backdoor: Backdoor) -> None:
        backdoor.take_away()
        assert store.put_many([]) == store.get_many([]) == store.delete_many([]) == store.replace_many([]) == []

    # List.

    def test_list_gives_all_objects_and_nothing_else_in_order(self, store: SecretStore, backdoor: Backdoor) -> None:
        assert list(store.list()) == []
        refs = [new_ref() for _ in range(25)]
        store.put_many([entry(ref) for ref in refs])
        backdoor.add_foreign()
        names = sorted(backdoor.name(ref) for ref in refs)

        assert list(store.list()) == names
        assert list(store.list(after=names[9])) == names[10:]
        assert list(store.list(after=names[-1])) == []
        store.delete(SCOPE, refs[0])
        assert list(store.list()) == [name for name in names if name != backdoor.name(refs[0])]

    def test_nothing_of_a_secret_is_seen_in_the_store(self, store: SecretStore, backdoor: Backdoor) -> None:
        ref = new_ref()
        store.put(Scope(f"tenant {CANARY}", "space", "source"), ref, {CANARY: CANARY})

        assert CANARY not in backdoor.visible()
        assert ref not in backdoor.visible()
        assert CANARY.encode() not in (backdoor.read(ref) or b"")

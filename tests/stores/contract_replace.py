"""The part of the contract that is about `replace`: sealed anew under the first key, the plaintext as it was."""

from __future__ import annotations

import json
import secrets
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kfs_credentials.crypto import Credentials, Plaintext, Scope, envelope_key_id, key_id, new_ref, parse_json
from kfs_credentials.errors import InvalidRef, LeaseLost, SecretIntegrityError, SecretNotFound
from kfs_credentials.stores import Address, Resealed
from tests.stores.contract_processes import KILLS, points
from tests.stores.processes import Running, count_replacing_lines, replace_and_die, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfs_credentials.stores import SecretStore
    from tests.stores.contract import Backdoor

OLD, NEW = secrets.token_bytes(32), secrets.token_bytes(32)
SCOPE = Scope("tenant-a", "space", "source")
DIGITS = '{"n":123456789012345678901234567890,"m":0.10000000000000000555,"k":1e400}'


def addresses(*refs: str) -> list[Address]:
    return [Address(SCOPE, ref) for ref in refs]


class ReplaceContract:
    """What a store has to do when its objects are sealed anew."""

    @pytest.fixture
    def under_old(self, store: SecretStore, kfs_settings: Callable[..., None]) -> Callable[[str], str]:
        """Return a function that puts a value, as JSON, under the old key; after it the new key is the first."""

        def put(value: str) -> str:
            ref, parsed = new_ref(), parse_json(value)
            assert isinstance(parsed, dict)
            kfs_settings(KEYS=[OLD])
            store.put(SCOPE, ref, parsed)
            kfs_settings(KEYS=[NEW, OLD])
            return ref

        return put

    def test_what_is_replaced_needs_the_old_key_no_more_and_keeps_every_digit(
        self, store: SecretStore, under_old: Callable[[str], str], kfs_settings: Callable[..., None]
    ) -> None:
        """The receipt says under which key it is now, and how large it is."""
        ref = under_old(DIGITS)
        size = Plaintext.of(parse_json(DIGITS)).size  # type: ignore[arg-type]
        assert store.replace(SCOPE, ref) == Resealed(key_id(NEW), size, rewritten=True)
        kfs_settings(KEYS=[NEW])
        assert store.get(SCOPE, ref) == parse_json(DIGITS)

    def test_what_is_under_the_first_key_already_is_left_as_it_is(
        self, store: SecretStore, backdoor: Backdoor, under_old: Callable[[str], str]
    ) -> None:
        """A second run writes nothing."""
        ref = under_old('{"a":1}')
        store.replace(SCOPE, ref)
        before = backdoor.read(ref), backdoor.state(ref)
        assert store.replace(SCOPE, ref) == Resealed(key_id(NEW), len('{"a":1}'), rewritten=False)
        assert (backdoor.read(ref), backdoor.state(ref)) == before

    def test_a_put_of_the_same_secret_leaves_its_key_and_says_which_it_is(
        self, store: SecretStore, backdoor: Backdoor, under_old: Callable[[str], str]
    ) -> None:
        """So that a key that is closed by now is noticed."""
        ref = under_old('{"a":1}')
        before = backdoor.read(ref)
        assert store.put(SCOPE, ref, {"a": 1}).key_id == key_id(OLD)
        assert backdoor.read(ref) == before

    def test_a_limit_that_was_lowered_keeps_nothing_from_being_replaced(
        self, store: SecretStore, under_old: Callable[[str], str], kfs_settings: Callable[..., None]
    ) -> None:
        """It is in the store already."""
        ref = under_old(json.dumps({"a": "x" * 5000}))
        kfs_settings(MAX_SECRET_BYTES=10)
        assert store.replace(SCOPE, ref).rewritten

    def test_a_batch_answers_for_each_in_order_and_nothing_spoils_the_others(
        self, store: SecretStore, backdoor: Backdoor, under_old: Callable[[str], str], kfs_settings: Callable[..., None]
    ) -> None:
        """What cannot be opened stays as it is, byte for byte."""
        whole, cut, flipped, foreign, twice = (under_old('{"a":1}') for _ in range(5))
        kfs_settings(KEYS=[secrets.token_bytes(32)])
        unknown = new_ref()
        store.put(SCOPE, unknown, {"a": 1})
        kfs_settings(KEYS=[NEW, OLD])
        blob = backdoor.read(cut) or b""
        backdoor.write(cut, blob[:-40])
        backdoor.write(flipped, blob.replace(b'"tag":"', b'"tag":"A', 1))
        asked = [
            Address(SCOPE, "no ref"),
            *addresses(whole, cut, new_ref(), flipped, unknown),
            Address(Scope("tenant-b", "space", "source"), foreign),
            *addresses(twice, twice),
        ]
        damaged = [cut, flipped, unknown, foreign]
        before = [backdoor.read(ref) for ref in damaged]

        outcomes = store.replace_many(asked)

        assert [type(outcome) for outcome in outcomes] == [
            InvalidRef,
            Resealed,
            SecretIntegrityError,
            SecretNotFound,
            SecretIntegrityError,
            type(outcomes[5]),
            SecretIntegrityError,
            Resealed,
            Resealed,
        ]
        assert isinstance(outcomes[5], SecretIntegrityError)
        assert "which is not in the key ring" in str(outcomes[5])
        assert [backdoor.read(ref) for ref in damaged] == before
        rewritten = [outcome.rewritten for outcome in outcomes[-2:] if isinstance(outcome, Resealed)]
        assert sorted(rewritten) == [False, True]

    def test_a_guard_that_raises_stops_before_the_next_object_is_replaced(
        self, store: SecretStore, under_old: Callable[[str], str], kfs_settings: Callable[..., None]
    ) -> None:
        """What was replaced by then stays replaced, and the rest is replaced by the next run."""
        refs = [under_old('{"a":1}') for _ in range(5)]
        asked: list[int] = []
        store.start_replace_many(addresses(under_old('{"a":1}')), guard=lambda: asked.append(1)).result()
        # It may be asked before each read too; the last time is right before the write.
        granted = iter([None] * ((len(asked) - 1) * len(refs) + 2))

        def guard() -> None:
            if next(granted, "lost") == "lost":
                raise LeaseLost("the lease ran out")

        with pytest.raises(LeaseLost, match=r"^the lease ran out$"):
            store.start_replace_many(addresses(*refs), guard=guard).result()

        kfs_settings(KEYS=[NEW])
        opened = [isinstance(outcome, Credentials) for outcome in store.get_many(addresses(*refs))]
        assert opened.count(True) == 2
        kfs_settings(KEYS=[NEW, OLD])
        outcomes = store.replace_many(addresses(*refs))
        assert [outcome.rewritten for outcome in outcomes if isinstance(outcome, Resealed)] == [
            not is_new for is_new in opened
        ]

    def test_a_process_that_is_killed_leaves_the_old_bytes_or_the_new_ones(
        self, store: SecretStore, backdoor: Backdoor, under_old: Callable[[str], str], kfs_settings: Callable[..., None]
    ) -> None:
        """Never less than one whole secret; and what it leaves behind is listed as this object, and erased with it."""
        value: dict[str, Any] = {"token": "x" * 20_000}
        text = json.dumps(value)
        lines = run(count_replacing_lines, SCOPE, under_old(text))
        found: Counter[str | None] = Counter()
        for line in points(lines, KILLS):
            ref = under_old(text)
            process = Running(replace_and_die, line, SCOPE, ref)
            with pytest.raises(EOFError):
                process.result()
            assert process.process.exitcode == -signal.SIGKILL

            assert store.get(SCOPE, ref) == value
            found[envelope_key_id(backdoor.read(ref) or b"")] += 1
            assert store.replace(SCOPE, ref).key_id == key_id(NEW)
            assert store.get(SCOPE, ref) == value
            assert store.delete(SCOPE, ref)
            assert backdoor.name(ref) not in store.list()
        # Some were killed before the new bytes were visible, and some after.
        assert found[key_id(OLD)]
        assert found[key_id(NEW)]

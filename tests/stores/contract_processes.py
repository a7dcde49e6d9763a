"""The part of the contract that takes several processes: races, kills, a frozen writer."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kfs_credentials.crypto import Credentials, Plaintext, Scope, new_ref
from kfs_credentials.errors import LeaseLost, SecretNotFound, StoreUnavailable
from kfs_credentials.stores import Address, Entry, Receipt
from kfs_credentials.stores.calls import Call, Deadline
from tests.stores.processes import (
    Running,
    count_lines,
    processes,
    put_and_die,
    put_and_pause,
    put_at_once,
    run,
)
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfs_credentials.stores import SecretStore
    from tests.stores.contract import Backdoor

WRITERS = 20
KILLS = 25
FREEZES = 8
SCOPE = Scope("tenant-a", "space", "source")


def let_pass(seconds: float) -> None:
    """Return when a deadline of so many seconds, which begins now, has passed."""
    end = threading.Event()
    with pytest.raises(StoreUnavailable):
        Call(end.wait, Deadline(seconds)).result()
    end.set()


def points(end: int, number: int) -> list[int]:
    """Return about so many whole numbers from 1 to `end`, the same distance apart."""
    return list(range(1, end + 1, max(1, end // number)))


class ProcessesContract:
    """What a store has to hold to when its writers race, die or freeze."""

    def test_of_racing_writers_with_different_secrets_one_wins(self, store: SecretStore) -> None:
        barrier, ref = processes.Barrier(WRITERS), new_ref()
        values = [{"writer": writer} for writer in range(WRITERS)]
        writers = [Running(put_at_once, barrier, SCOPE, ref, value) for value in values]

        answers = [writer.result() for writer in writers]

        assert Counter(error for error, _ in answers) == {"": 1, "SecretConflict": WRITERS - 1}
        assert store.get(SCOPE, ref) == values[answers.index(("", ""))]

    def test_racing_writers_of_the_same_secret_all_succeed(self, store: SecretStore) -> None:
        barrier, ref = processes.Barrier(WRITERS), new_ref()
        writers = [Running(put_at_once, barrier, SCOPE, ref, {"a": "made-up"}) for _ in range(WRITERS)]

        assert [writer.result() for writer in writers] == [("", "")] * WRITERS
        assert store.get(SCOPE, ref) == {"a": "made-up"}

    def test_a_writer_that_is_killed_leaves_all_or_nothing(self, store: SecretStore, backdoor: Backdoor) -> None:
        value = {"token": "x" * 20_000}
        store.put(SCOPE, new_ref(), value)
        _, lines = run(count_lines, SCOPE, new_ref(), value)
        found: Counter[bool] = Counter()
        for line in points(lines, KILLS):
            ref = new_ref()
            writer = Running(put_and_die, line, SCOPE, ref, value)
            with pytest.raises(EOFError):
                writer.result()
            assert writer.process.exitcode == -signal.SIGKILL

            try:
                visible = store.get(SCOPE, ref) == value
                assert visible
            except SecretNotFound:
                visible = False
            found[visible] += 1
            # What it left behind of a secret that is not visible may be listed too, so that it can be erased.
            assert not visible or backdoor.name(ref) in store.list()
            store.put(SCOPE, ref, value)
            assert store.get(SCOPE, ref) == value
        # Some were killed before the secret was visible, and some after.
        assert found[False] >= KILLS / 2
        assert found[True]

    def test_a_frozen_writer_makes_nothing_visible_after_its_deadline(
        self, store: SecretStore, kfs_settings: Callable[..., None]
    ) -> None:
        store.put(SCOPE, new_ref(), {"a": 1})
        before_guard, _ = run(count_lines, SCOPE, new_ref(), {"a": 1})
        kfs_settings(STORE_TIMEOUT=0.5)
        frozen: list[tuple[str, Any, Running[Any]]] = []

        def check(ref: str, writer: Running[Any]) -> None:
            error, _ = writer.result()
            assert error == "StoreUnavailable"
            with pytest.raises(SecretNotFound):
                store.get(SCOPE, ref)

        for line in [*points(before_guard, FREEZES), 0]:
            ref = new_ref()
            here, there = processes.Pipe()
            writer: Running[Any] = Running(put_and_pause, there, line, SCOPE, ref, {"a": 1})
            there.close()  # so that the pipe is at its end when the writer is
            assert here.poll(PATIENCE), "a writer neither came to its line nor ended"
            try:
                assert here.recv() == line
            except EOFError:  # the machine is slow: its time was over before it came there
                check(ref, writer)
                continue
            writer.send(signal.SIGSTOP)
            frozen.append((ref, here, writer))

        assert frozen
        let_pass(0.5)

        for ref, pipe, writer in frozen:
            pipe.send("go on")
            writer.send(signal.SIGCONT)
            check(ref, writer)

    def test_a_guard_that_raises_stops_before_the_next_secret_is_visible(self, store: SecretStore) -> None:
        refs = [new_ref() for _ in range(5)]
        entries = [Entry(SCOPE, ref, Plaintext.of({"ref": ref})) for ref in refs]
        granted = iter([None, None])

        def guard() -> None:
            if next(granted, "lost") == "lost":
                raise LeaseLost("the lease ran out")

        with pytest.raises(LeaseLost, match=r"^the lease ran out$"):
            store.start_put_many(entries, guard=guard).result()

        outcomes = store.get_many([Address(SCOPE, ref) for ref in refs])
        assert sum(isinstance(outcome, Credentials) for outcome in outcomes) == 2
        assert all(isinstance(outcome, Receipt) for outcome in store.put_many(entries))

    def test_a_call_that_hangs_is_over_at_its_deadline(
        self, store: SecretStore, kfs_settings: Callable[..., None]
    ) -> None:
        kfs_settings(STORE_TIMEOUT=0.2)
        ref, go_on = new_ref(), threading.Event()

        def guard() -> None:
            go_on.wait()

        call = store.start_put_many([Entry(SCOPE, ref, Plaintext.of({"a": 1}))], guard=guard)

        assert call.wait(60)
        with pytest.raises(
            StoreUnavailable, match=r"did not answer within 0\.2 s \(KFS_CREDENTIALS\['STORE_TIMEOUT'\]"
        ):
            call.result()
        # What the call does when it wakes up late changes nothing.
        go_on.set()
        call._done.wait()
        with pytest.raises(SecretNotFound):
            store.get(SCOPE, ref)

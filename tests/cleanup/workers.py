"""Workers for the tests of the cleanup's loop, and stores that answer as they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connections

from kfs_credentials.cleanup import Cleanup
from kfs_credentials.cleanup_worker import CleanupWorker
from kfs_credentials.errors import KfsCredentialsError
from kfs_credentials.models import RefState
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.status import read_cleanup_left
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import PAST, in_database
from tests.waiting import PATIENCE


def new_worker(steps: Cleanup | None = None, **options: Any) -> CleanupWorker:
    """Return a worker, which waits for others and for what comes later unless told otherwise."""
    steps = steps or Cleanup(using="default", worker="tests", lease=60.0)
    left = {"next_move_in": lambda: read_cleanup_left("default", tenant=steps.tenant, space=steps.space)}
    return CleanupWorker(steps, **{**left, "batch_size": 10, **options})


def before_each_look(worker: CleanupWorker, act: Callable[[int], None]) -> list[int]:
    """Let something happen whenever the worker asks what is left; return the list of looks so far."""
    looks: list[int] = []

    def look() -> tuple[int, float | None]:
        looks.append(len(looks) + 1)
        act(looks[-1])
        return read_cleanup_left("default")

    worker.next_move_in = look
    return looks


def time_passes(_: int = 0) -> None:
    """Let everything that has a time be due."""
    # In this order: a worker that looks in between must not find a tombstone due that is too young to be confirmed.
    in_database("UPDATE kfs_credentials_secret_object SET first_erased_at = first_erased_at - interval '2 days'")
    rows = LedgerRow.objects.filter(next_delete_at__isnull=False)
    rows.exclude(state=RefState.DELETING).update(next_delete_at=PAST)


def instead_of_waiting(worker: CleanupWorker, monkeypatch: pytest.MonkeyPatch, act: Callable[[float], None]) -> None:
    """Let a worker's waits be over at once; `act` is told how long each would have been."""

    def wait(seconds: float) -> bool:
        act(seconds)
        return bool(worker.stop)

    monkeypatch.setattr(worker.stop, "wait", wait)


def spy(monkeypatch: pytest.MonkeyPatch, steps: Cleanup, name: str, act: Callable[[], Any]) -> None:
    """Let something happen before each call of a step."""
    real = getattr(steps, name)

    def spied(*arguments: Any, **options: Any) -> Any:
        act()
        return real(*arguments, **options)

    monkeypatch.setattr(steps, name, spied)


@contextmanager
def running(*workers: CleanupWorker) -> Iterator[None]:
    """Run workers on threads of their own, and stop them at the end of the block."""
    threads = [threading.Thread(target=_in_thread, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.stop.ask()
        finish(threads)


def together(*workers: CleanupWorker) -> None:
    """Run workers on threads of their own, to their ends."""
    threads = [threading.Thread(target=_in_thread, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    finish(threads)


def finish(threads: list[threading.Thread]) -> None:
    """Wait for threads to end."""
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)


def _in_thread(worker: CleanupWorker) -> None:
    try:
        worker.run()
    finally:
        connections.close_all()


def failing_deletes(monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> list[int]:
    """Let the store's next erasures raise these errors, one a call (None: it works), before it works again.

    Returns the list of how many refs each call was for.
    """
    real, left, calls = EncryptedStore._delete_many, list(errors), list[int]()

    def delete_many(store: EncryptedStore, addresses: Any, *, deadline: Any) -> Any:
        calls.append(len(addresses))
        if left and (error := left.pop(0)) is not None:
            raise error
        return real(store, addresses, deadline=deadline)

    monkeypatch.setattr(EncryptedStore, "_delete_many", delete_many)
    return calls


def failing_reads(monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> None:
    """Let the store's next reads raise these errors, one a call (None: it works), before it works again."""
    real, left = EncryptedStore._get_many, list(errors)

    def get_many(store: EncryptedStore, addresses: Any, *, deadline: Any) -> Any:
        if left and (error := left.pop(0)) is not None:
            raise error
        return real(store, addresses, deadline=deadline)

    monkeypatch.setattr(EncryptedStore, "_get_many", get_many)


def failing_lists(monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> list[str]:
    """Let the next pages of the store's list raise these errors, one a page (None: it works); return where each began.

    A page has one object.
    """
    real, left, pages = EncryptedStore._list, list(errors), list[str]()

    def page(store: EncryptedStore, after: str, *, deadline: Any) -> Any:
        pages.append(after)
        if left and (error := left.pop(0)) is not None:
            raise error
        return real(store, after, deadline=deadline)[:1]

    monkeypatch.setattr(EncryptedStore, "_list", page)
    return pages


def failing_refs(monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[KfsCredentialsError]]) -> None:
    """Let the store answer so for single refs, one answer a call, and erase the others; then it works again."""
    real = EncryptedStore._delete_many

    def delete_many(store: EncryptedStore, addresses: Any, *, deadline: Any) -> Any:
        told = {address.ref: answers[address.ref].pop(0) for address in addresses if answers.get(address.ref)}
        asked = [address for address in addresses if address.ref not in told]
        outcomes = iter(real(store, asked, deadline=deadline))
        return [told[address.ref] if address.ref in told else next(outcomes) for address in addresses]

    monkeypatch.setattr(EncryptedStore, "_delete_many", delete_many)


def leased() -> int:
    """Return how many refs and rounds some worker has leased."""
    rounds = "SELECT count(*) FROM kfs_credentials_round WHERE lease_token IS NOT NULL"
    with connections["default"].cursor() as cursor:
        cursor.execute(rounds)
        (count,) = cursor.fetchone()
    return LedgerRow.objects.leased().count() + int(count)

"""A call to a store is over at its deadline, whatever the storage does."""

from __future__ import annotations

import fcntl
import multiprocessing
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfs_credentials.crypto import new_ref, object_name
from kfs_credentials.errors import StoreUnavailable
from kfs_credentials.stores import Address, secret_stores
from kfs_credentials.stores.calls import MOST_HANGING, MOST_HANGING_ALIKE, Call, Deadline
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.stores.files import DurableFileStorage
from kfs_credentials.stores.threads import on_threads
from tests import needs
from tests.stores.contract import SCOPE, VALUE
from tests.stores.processes import Running, Said, processes, said
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

TIMED_OUT: Said = (
    "StoreUnavailable",
    "the secret store did not answer within 0.2 s (KFS_CREDENTIALS['STORE_TIMEOUT'])",
)


# A file system that hangs: open(2) of a file waits for whoever holds a lease on it (fcntl(2), F_SETLEASE).


def hold(pipe: Connection, path: str) -> None:
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel's request to give the lease back
    with Path(path).open("rb+") as file:
        try:
            fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pipe.send(str(error))
        pipe.send("")
        pipe.recv()


@pytest.fixture
def hanging(
    store: EncryptedStore, secrets_directory: Path, kfs_settings: Callable[..., None]
) -> tuple[str, Callable[[], None]]:
    """A ref whose object cannot be opened, until the function that comes with it is called."""
    ref = new_ref()
    store.put(SCOPE, ref, VALUE)
    pipe, there = processes.Pipe()
    holder = Running(hold, there, str(secrets_directory / object_name(ref)))
    if problem := pipe.recv():
        needs.missing(f"this file system knows no leases: {problem}")
    kfs_settings(STORE_TIMEOUT=0.2)

    def give_back() -> None:
        pipe.send("give back")
        holder.result()

    return ref, give_back


def test_a_file_system_that_hangs_is_unavailable(
    store: EncryptedStore, hanging: tuple[str, Callable[[], None]], kfs_settings: Callable[..., None]
) -> None:
    ref, give_back = hanging

    assert said(store.get, SCOPE, ref) == TIMED_OUT
    assert said(store.get_many, [Address(SCOPE, name) for name in (new_ref(), ref)]) == TIMED_OUT
    assert said(store.put, SCOPE, ref, VALUE) == TIMED_OUT

    give_back()
    kfs_settings(STORE_TIMEOUT=20)
    assert store.get(SCOPE, ref) == VALUE


# A storage that hangs where the file system would not.


class HangingStorage(DurableFileStorage):
    """Hangs in every method that a store calls, for as long as `released` is not set."""

    released = threading.Event()

    def _hang(self, *_: Any, **__: Any) -> Any:
        self.released.wait()
        raise StoreUnavailable("too late")

    check = create_many = replace_many = read = read_many = remove_many = present = names = _hang


@pytest.fixture
def _hanging_storage(secrets_directory: Path, kfs_settings: Callable[..., None]) -> Iterator[None]:
    storage = {
        "BACKEND": "tests.stores.test_deadlines.HangingStorage",
        "OPTIONS": {"location": str(secrets_directory)},
    }
    store = {
        "BACKEND": "kfs_credentials.stores.encrypted.EncryptedStore",
        "OPTIONS": {"storage": storage},
    }
    kfs_settings(STORE_TIMEOUT=0.2, STORES={"default": store})
    HangingStorage.released.clear()
    yield
    HangingStorage.released.set()


CALLS: dict[str, Callable[[str], object]] = {
    "put": lambda ref: secret_stores["default"].put(SCOPE, ref, VALUE),
    "get": lambda ref: secret_stores["default"].get(SCOPE, ref),
    "get_many": lambda ref: secret_stores["default"].get_many([Address(SCOPE, ref), Address(SCOPE, ref)]),
    "delete": lambda ref: secret_stores["default"].delete(SCOPE, ref),
    "replace": lambda ref: secret_stores["default"].replace(SCOPE, ref),
    "list": lambda _: list(secret_stores["default"].list()),
    "check": lambda _: secret_stores["default"].check(),
}


@pytest.mark.usefixtures("_hanging_storage")
@pytest.mark.parametrize("call", CALLS)
def test_every_method_is_over_at_its_deadline(call: str) -> None:
    assert said(CALLS[call], new_ref()) == TIMED_OUT


def get_many(refs: list[str]) -> Said:
    return said(secret_stores["default"].get_many, [Address(SCOPE, ref) for ref in refs])


@pytest.mark.usefixtures("_hanging_storage")
def test_calls_that_hang_keep_no_process_from_ending() -> None:
    reader = Running(get_many, [new_ref() for _ in range(4)])

    assert reader.result() == TIMED_OUT
    assert reader.process.exitcode == 0


# The parts.


def test_a_call_is_waited_for_as_long_as_one_likes() -> None:
    go_on = threading.Event()
    call = Call(lambda: go_on.wait() and "result", Deadline(60))

    assert not call.wait(0)
    go_on.set()
    assert call.wait(60)
    assert call.result() == "result"
    assert call.result() == "result"


def test_what_a_call_raises_is_raised_where_its_result_is_asked_for() -> None:
    def fail() -> None:
        raise StoreUnavailable("down", retry_after=3)

    call = Call(fail, Deadline(60))
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"^down$") as caught:
            call.result()
    assert caught.value.retry_after == 3


def test_a_result_that_was_there_in_time_is_given_after_the_deadline_too() -> None:
    deadline = Deadline(60)
    call = Call(lambda: "result", deadline)
    assert call.wait(60)
    deadline.at -= 120

    assert call.wait(0)
    assert call.result() == "result"
    with pytest.raises(StoreUnavailable, match="did not answer within 60 s"):
        deadline.check()


def test_a_deadline_asks_its_guard_first_and_then_the_clock() -> None:
    asked: list[bool] = []
    deadline = Deadline(60, guard=lambda: asked.append(True))
    deadline.check()
    deadline.at -= 120

    with pytest.raises(StoreUnavailable):
        deadline.check()
    assert deadline.remaining == 0
    assert len(asked) == 2


def test_work_on_threads_keeps_its_order_and_their_number(kfs_settings: Callable[..., None]) -> None:
    kfs_settings(STORE_THREADS=3)
    together = threading.Barrier(3)
    threads = set()

    def work(number: int) -> int:
        together.wait(60)
        threads.add(threading.get_ident())
        return number * number

    assert on_threads(work, range(12)) == [number * number for number in range(12)]
    assert len(threads) == 3
    assert on_threads(work, []) == []


def test_work_on_threads_stops_at_an_error(kfs_settings: Callable[..., None]) -> None:
    kfs_settings(STORE_THREADS=1)
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 2:
            raise LookupError("at 2")

    with pytest.raises(LookupError, match="at 2"):
        on_threads(work, range(10))
    assert begun == [0, 1, 2]


def test_one_item_is_worked_on_right_here() -> None:
    assert on_threads(lambda _: threading.get_ident(), [0]) == [threading.get_ident()]


# Many that hang.


class Stuck(DurableFileStorage):
    """Hangs in each erasure until it is told to go on with one, and then with all."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.hangs = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def remove_many(self, names: Any, **options: Any) -> Any:
        self.hangs.release()
        self.go_on.acquire()
        return super().remove_many(names, **options)


@pytest.fixture
def stuck(secrets_directory: Path) -> Iterator[Stuck]:
    storage = Stuck(str(secrets_directory))
    yield storage
    storage.go_on.release(1000)


def start(store: EncryptedStore, ref: str) -> Call[Any]:
    """Start an erasure, and wait until it hangs."""
    call = store.start_delete_many([Address(SCOPE, ref)])
    assert isinstance(store.storage, Stuck)
    assert store.storage.hangs.acquire(timeout=60)
    return call


def test_no_more_calls_are_begun_than_a_process_can_bear(stuck: Stuck, kfs_settings: Callable[..., None]) -> None:
    """Those that hang are counted, not those that are waited for; each that is over makes room for another."""
    kfs_settings(STORE_TIMEOUT=60)
    store, addresses = EncryptedStore(stuck), [Address(SCOPE, new_ref())]
    others = set(threading.enumerate())  # what earlier tests began may end at any time

    def begun() -> set[threading.Thread]:
        return set(threading.enumerate()) - others

    calls = [start(store, new_ref()) for _ in range(MOST_HANGING + 2)]
    at_work = {call.thread for call in calls}
    assert begun() == at_work  # time is not up: somebody waits for each of them

    for call in calls[2:]:
        call.deadline.at -= 120
    for _ in range(50):
        refused = store.start_delete_many(addresses)
        assert refused.wait(60)
        assert said(refused.result) == (
            "StoreUnavailable",
            (
                f"{MOST_HANGING} calls of this process to the secret store hang, beyond KFS_CREDENTIALS"
                "['STORE_TIMEOUT']: no other is begun until one of them is over. If other processes reach the store, "
                "restart this one"
            ),
        )
    assert said(store.get, SCOPE, new_ref())[0] == "StoreUnavailable"
    assert said(lambda: list(store.list()))[0] == "StoreUnavailable"
    assert begun() == at_work

    stuck.go_on.release(len(calls))
    for call in calls:
        call.thread.join(60)
    assert said(store.get, SCOPE, new_ref())[0] == "SecretNotFound"
    stuck.go_on.release()
    assert store.start_delete_many(addresses).result() == [False]
    until(lambda: not begun(), "every thread of a call is over")


def test_one_that_is_over_makes_room_for_one(stuck: Stuck, kfs_settings: Callable[..., None]) -> None:
    kfs_settings(STORE_TIMEOUT=60)
    store = EncryptedStore(stuck)
    calls = [start(store, new_ref()) for _ in range(MOST_HANGING)]
    for call in calls:
        call.deadline.at -= 120
    assert said(store.delete, SCOPE, new_ref())[0] == "StoreUnavailable"
    stuck.go_on.release()
    while all(call.thread.is_alive() for call in calls):
        calls[0].thread.join(0.01)
    more = start(store, new_ref())
    assert not more.wait(0)
    more.deadline.at -= 120
    assert said(store.delete, SCOPE, new_ref())[1].startswith(f"{MOST_HANGING} calls of this process")


def test_one_secret_for_which_calls_hang_shuts_out_no_other(stuck: Stuck, kfs_settings: Callable[..., None]) -> None:
    """Whoever asks for it again is refused, but in a batch with others: which one of those hangs is not known."""
    kfs_settings(STORE_TIMEOUT=60)
    store, ref = EncryptedStore(stuck), new_ref()
    calls = [start(store, ref) for _ in range(MOST_HANGING_ALIKE + 1)]  # time is not up: somebody waits for each
    assert said(store.get, SCOPE, ref)[0] == "SecretNotFound"
    for call in calls:
        call.deadline.at -= 120
    refused = (
        f"{len(calls)} calls of this process for this secret hang, beyond KFS_CREDENTIALS['STORE_TIMEOUT']: no other "
        "for it is begun until one of them is over. If other processes reach it, restart this one"
    )
    for call_again in (store.get, store.delete, store.replace):
        assert said(call_again, SCOPE, ref) == ("StoreUnavailable", refused)
    assert said(store.put, SCOPE, ref, VALUE) == ("StoreUnavailable", refused)
    assert said(store.get, SCOPE, new_ref())[0] == "SecretNotFound"
    assert said(store.get_many, [Address(SCOPE, ref), Address(SCOPE, new_ref())]) == ("", "")

    stuck.go_on.release(len(calls))
    for call in calls:
        call.thread.join(60)
    assert said(store.get, SCOPE, ref)[0] == "SecretNotFound"


def ask(pipe: Connection, store: EncryptedStore) -> None:
    pipe.send(said(store.get, SCOPE, new_ref())[0])


def test_a_forked_process_has_no_calls_that_hang(stuck: Stuck, kfs_settings: Callable[..., None]) -> None:
    """Its parent's threads are not there: servers fork with the store made before."""
    kfs_settings(STORE_TIMEOUT=60)
    store = EncryptedStore(stuck)
    for _ in range(MOST_HANGING):
        start(store, new_ref()).deadline.at -= 120
    assert said(store.get, SCOPE, new_ref())[0] == "StoreUnavailable"
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=ask, args=(there, store))
    child.start()
    assert here.poll(60)
    assert here.recv() == "SecretNotFound"
    child.join(60)

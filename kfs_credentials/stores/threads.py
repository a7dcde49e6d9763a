"""Work on several threads at once."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, TypeVar

from kfs_credentials.conf import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
R = TypeVar("R")


def on_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `function` of each item, in order, worked out on STORE_THREADS threads at most.

    What it raises first is raised here, once no thread is at work any more; the items that nobody has begun
    are left out then. The threads are daemons: those of `concurrent.futures` would keep a process from ending
    for as long as one call hangs.
    """
    if len(items) == 1:
        return [function(items[0])]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for place in range(len(items)):
        waiting.put(place)
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                place = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results[place] = function(items[place])
            except BaseException as error:  # noqa: BLE001 - whatever it is, the waiting thread raises it
                errors.append(error)

    threads = [
        threading.Thread(target=work, name="kfs-credentials-store", daemon=True)
        for _ in range(min(settings.STORE_THREADS, len(items)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[place] for place in range(len(items))]

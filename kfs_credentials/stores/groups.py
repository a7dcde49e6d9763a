"""Groups of files that become durable together: written one after the other, synced at once, then given their names."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from kfs_credentials.stores.file_errors import OF_ONE_FILE
from kfs_credentials.stores.threads import on_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kfs_credentials.stores.directory import Directory, UnlinkedFile
    from kfs_credentials.stores.values import Beside


def look_beside(directory: Directory, beside: Beside | None) -> None:
    """Look at a file beside those that are written or removed, through the same handle."""
    if beside is not None:
        beside.look(directory.read(os.path.basename(beside.name)))  # noqa: PTH119


@contextmanager
def noting(failed: dict[int, OSError], place: int) -> Iterator[None]:
    """Add to `failed` what may be wrong with this one file alone; anything else is raised."""
    try:
        yield
    except OSError as error:
        if error.errno not in OF_ONE_FILE:
            raise
        failed[place] = error


def sync_all(syncs: Sequence[tuple[int, Callable[[], None]]], failed: dict[int, OSError]) -> None:
    """Sync the files of these places at once. What fails is not synced a second time: that would seem to work."""

    def sync(one: tuple[int, Callable[[], None]]) -> None:
        place, function = one
        with noting(failed, place):
            function()

    on_threads(sync, syncs)


def create_group(
    directory: Directory,
    files: Sequence[tuple[int, str, bytes]],
    check: Callable[[], None],
    failed: dict[int, OSError],
) -> list[int]:
    """Write all, sync all, link all, sync the directory; return the places of those that are new.

    `files`: place, name, content. Places where something may be wrong with this one file are added to `failed`, with
    what that is: they get no name. A directory that cannot be synced is never about one alone.
    """
    with ExitStack() as stack:
        written: dict[str, tuple[int, UnlinkedFile]] = {}
        for place, name, content in files:
            with noting(failed, place):
                if name not in written and not directory.has(name):
                    written[name] = place, stack.enter_context(directory.write(name, content))
        sync_all([(place, file.sync) for place, file in written.values()], failed)
        new = []
        for place, file in written.values():
            if place not in failed:
                check()
                with noting(failed, place):
                    if file.link():
                        new.append(place)
        if new:
            directory.sync()
    return new


def replace_group(
    directory: Directory,
    files: Sequence[tuple[int, str, bytes, bytes]],
    check: Callable[[], None],
    done: Callable[[int], None],
    failed: dict[int, OSError],
) -> list[int]:
    """Write all, sync all, rename all over the old ones, sync the directory; return the places of those replaced.

    `files`: place, name, content as it was read, new content. `done` is called with the place of each as soon as it is
    renamed. `failed`: as for `create_group`.
    """
    with ExitStack() as stack:
        written: dict[str, tuple[int, bytes, UnlinkedFile]] = {}
        for place, name, old, content in files:
            with noting(failed, place):
                if name not in written and directory.holds(name, old):
                    written[name] = place, old, stack.enter_context(directory.write(name, content))
        sync_all([(place, file.sync) for place, _, file in written.values()], failed)
        replaced = []
        for place, old, file in written.values():
            if place not in failed:
                with noting(failed, place):
                    if file.replace(old, check):
                        replaced.append(place)
                        done(place)
        if replaced:
            directory.sync()
    return replaced

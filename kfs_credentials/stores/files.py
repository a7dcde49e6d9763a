"""A Django storage for files that are written once and are durable when the call returns.

Django's own FileSystemStorage does not sync, writes in place and renames on a clash. Removing a plaintext
from the database must never be more durable than the secret that replaces it, so here a file is complete and
synced before it has its name, and the name is synced before anybody hears of it. A file is replaced in one step too:
whoever reads finds the old content or the new one, whole.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured, SuspiciousFileOperation
from django.core.files.storage import FileSystemStorage

from kfs_credentials.crypto import IntegrityReason
from kfs_credentials.errors import (
    SecretIntegrityError,
    SecretNotFound,
    SecretStoreError,
    StoreDenied,
    StoreMisconfigured,
)
from kfs_credentials.stores.directory import FILE_MODE, LEFTOVERS, OPEN_FILES, Directory
from kfs_credentials.stores.file_errors import NO_ROOM, NOT_FOUND, OF_ONE_FILE, reason_of, store_error, translated
from kfs_credentials.stores.groups import create_group, look_beside, replace_group, sync_all

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from datetime import datetime

    from django.core.files.base import File

    from kfs_credentials.stores.values import Beside

DIRECTORY_MODE = 0o700
GROUP = 256
"""Files that are open at the same time while a group is written: well below the usual limit of 1,024."""


class DurableFileStorage(FileSystemStorage):
    """Files of mode 0600 below `location`, in directories of mode 0700, created once; replaced by `replace_many` only.

    `location` (an absolute path) has to exist: a directory that is missing is more likely a volume that is
    not mounted than one that nobody has made yet, and secrets must not land below an empty mount point.
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        if not location or not os.path.isabs(location):  # noqa: PTH117 - it may be empty, or None
            raise ImproperlyConfigured(
                "DurableFileStorage needs OPTIONS['location'], an absolute path: the directory for secrets."
            )
        super().__init__(location=location, file_permissions_mode=FILE_MODE, directory_permissions_mode=DIRECTORY_MODE)
        # The directories, by identity, whose names this process has made durable up to `location`.
        self._durable: set[tuple[int, int]] = set()

    # What Django's callers use.

    def _save(self, name: str, content: File[bytes]) -> str:
        (created,) = self.create_many([(name, content.read())])
        if isinstance(created, SecretStoreError):
            raise created
        if not created:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        return name

    def get_available_name(self, name: str, max_length: int | None = None) -> str:
        """Return `name`: another name would be another secret's."""
        return name

    def delete(self, name: str) -> None:
        """Remove the file, durably; a missing one is no error."""
        (removed,) = self.remove_many([name])
        if isinstance(removed, SecretStoreError):
            raise removed

    def get_modified_time(self, name: str) -> datetime:
        """Return when the file was written, or the last of what writers that died have left of it; see `names`."""
        with suppress(FileNotFoundError):
            return self._modified_time(name)
        left = []
        for ending in LEFTOVERS:
            with suppress(FileNotFoundError):
                left.append(self._modified_time(name + ending))
        if not left:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return max(left)

    def _modified_time(self, name: str) -> datetime:
        try:
            return super().get_modified_time(name)
        except FileNotFoundError:
            raise
        except (OSError, SuspiciousFileOperation) as error:
            raise store_error(error) from None

    # What EncryptedStore uses: the same in batches, with the errors of this package.

    @translated
    def check(self, directory: str = "") -> None:
        """Raise `StoreMisconfigured` or `StoreDenied` unless files can be made in a directory.

        A directory that does not exist there is right too: it is made when it is needed.
        """
        self._check_location()
        for place in (str(self.location), self.path(directory)):
            try:
                mode = os.stat(place).st_mode  # noqa: PTH116
            except FileNotFoundError:
                continue
            if not stat.S_ISDIR(mode):
                raise StoreMisconfigured(f"the place for secrets is not a directory: {place}")
            if not os.access(place, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
                raise StoreDenied(
                    f"this process may not read and write the directory for secrets: {place}. Give it, with "
                    "all that is in it, to the user that runs this process, with mode 0700."
                )

    @translated
    def create_many(
        self,
        files: Sequence[tuple[str, bytes]],
        *,
        check: Callable[[], None] = lambda: None,
        beside: Beside | None = None,
    ) -> list[bool | SecretStoreError]:
        """Create the files, durable as a group; return for each whether it is new.

        A file is not new if its name was taken, and then nothing is written. For a file that cannot be written or made
        durable, though others can in its directory, that is an error in the place of the answer, and it has no name.

        `files`: pairs of name and content. `check` is called right before each file becomes visible, and may
        raise to stop there; what has been linked by then stays, and a later call finds it. `beside` is looked at in
        each directory, through the handle by which the files are made, before the first of them and after the last.
        Raises `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`, and what `check` and `beside` raise.
        """
        created: list[bool | SecretStoreError] = [False] * len(files)
        failed: dict[int, OSError] = {}
        for path, places in self._by_directory([name for name, _ in files]).items():
            with self._made_directory(path, beside) as directory:
                look_beside(directory, beside)
                for start in range(0, len(places), GROUP):
                    group = [(place, name, files[place][1]) for place, name in places[start : start + GROUP]]
                    for place in create_group(directory, group, check, failed):
                        created[place] = True
                look_beside(directory, beside)
        self._tell_apart([name for name, _ in files], failed)
        for place, problem in failed.items():
            created[place] = SecretStoreError(f"the file system does not write this object ({reason_of(problem)})")
        return created

    @translated
    def replace_many(
        self,
        files: Sequence[tuple[str, bytes, bytes]],
        *,
        check: Callable[[], None] = lambda: None,
        done: Callable[[str], None] = lambda _: None,
        beside: Beside | None = None,
    ) -> list[bool | SecretStoreError]:
        """Replace the content of files, durably as a group; return for each whether that was done.

        It is not done where the file is not there any more, or its content is not what the caller has read: what was
        erased stays erased, and of several writers at a time one wins. For a file that cannot be replaced, though
        others could be written in its directory, that is an error in the place of the answer.

        `files`: name, content as it was read, new content. `done` is called with the name of each as soon as it is
        replaced. `check`, `beside`: as for `create_many`. Raises `StoreUnavailable`, `StoreDenied`,
        `StoreMisconfigured`, and what `check`, `done` and `beside` raise.
        """
        replaced: list[bool | SecretStoreError] = [False] * len(files)
        failed: dict[int, OSError] = {}
        for path, places in self._by_directory([name for name, *_ in files]).items():
            try:
                directory = self._durable_directory(path)
            except FileNotFoundError:
                self._check_location()
                if beside is not None:
                    beside.look(None)
                continue  # nothing is in it any more
            with directory:
                look_beside(directory, beside)
                for start in range(0, len(places), GROUP):
                    group = [(place, name, *files[place][1:]) for place, name in places[start : start + GROUP]]
                    for place in replace_group(directory, group, check, lambda place: done(files[place][0]), failed):
                        replaced[place] = True
                look_beside(directory, beside)
        self._tell_apart([name for name, *_ in files], failed)
        for place, problem in failed.items():
            replaced[place] = SecretStoreError(f"the file system does not replace this object ({reason_of(problem)})")
        return replaced

    @translated
    def read(self, name: str, *, beside: str | None = None) -> bytes:
        """Return the content of a file.

        `beside`: another file, which can be read, or is missing, if the file system works. Raises `SecretNotFound`,
        `SecretIntegrityError` if it is not a regular file, `SecretStoreError` itself if this file cannot be read, and
        `beside` can; or a store error that concerns all of them.
        """
        try:
            return self._content(name)
        except OSError as error:
            if beside is None or error.errno not in OF_ONE_FILE:
                raise
            problem = error
        with os.scandir(os.path.dirname(self.path(name))) as entries:  # noqa: PTH120
            next(entries, None)
        with suppress(SecretNotFound, SecretIntegrityError):
            self._content(beside)
        raise SecretStoreError(f"the file system does not read this object ({reason_of(problem)})")

    @translated
    def read_many(self, names: Sequence[str], *, check: Callable[[], None] = lambda: None) -> list[bytes | None]:
        """Return the contents of files; None for what is not there, or not to be read: `read` says why.

        For files of which it is known that somebody has just written them: they are opened whatever they are. `check`
        is called before each. Raises a store error.
        """
        found: list[bytes | None] = [None] * len(names)
        for path, places in self._by_directory(names).items():
            try:
                directory = Directory(path)
            except FileNotFoundError:
                continue
            with directory:
                for place, name in places:
                    check()
                    with suppress(OSError):
                        found[place] = directory.read(name)
        return found

    def _content(self, name: str) -> bytes:
        path = Path(self.path(name))
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                raise SecretIntegrityError(IntegrityReason.NOT_AN_ENVELOPE)
            return path.read_bytes()
        except FileNotFoundError:
            self._check_location()
            raise SecretNotFound(NOT_FOUND) from None

    @translated
    def sync(self, names: Sequence[str]) -> list[SecretStoreError | None]:
        """Make files durable that may have been linked, but not synced, by a process that died.

        `SecretNotFound` for each that is not there. For one that cannot be synced, though others can, that is an error
        in its place too; raises a store error that concerns all.
        """
        synced: list[SecretStoreError | None] = [None] * len(names)
        failed: dict[int, OSError] = {}

        def sync(directory: Directory, place: int, name: str) -> None:
            try:
                directory.sync_file(name)
            except FileNotFoundError:
                synced[place] = SecretNotFound(NOT_FOUND)

        for path, places in self._by_directory(names).items():
            try:
                directory = self._durable_directory(path)
            except FileNotFoundError:
                self._check_location()
                for place, _ in places:
                    synced[place] = SecretNotFound(NOT_FOUND)
                continue
            with directory:
                sync_all([(place, partial(sync, directory, place, name)) for place, name in places], failed)
                directory.sync()
        self._tell_apart(names, failed, needs_room=False)
        for place, problem in failed.items():
            synced[place] = SecretStoreError(f"the file system does not sync this object ({reason_of(problem)})")
        return synced

    @translated
    def remove_many(
        self,
        names: Sequence[str],
        *,
        check: Callable[[], None] = lambda: None,
        beside: Beside | None = None,
    ) -> list[bool | SecretStoreError]:
        """Remove the files and their temporary ones, durably; return for each whether it was there.

        For a file that cannot be removed, though others can and its directory is as it should be, that is an error
        in the place of the answer: it must not keep the others. `check` is called right before each file goes, and may
        raise to stop there; a later call finds what has gone by then absent. `beside` is looked at in each directory,
        through the handle by which the files go, before the first of them and after the last. Raises
        `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`: where `location` is missing, nothing is taken to be
        gone; and what `check` and `beside` raise.
        """
        removed: list[bool | SecretStoreError] = [False] * len(names)
        failed: dict[int, OSError] = {}
        for path, places in self._by_directory(names).items():
            try:
                directory = Directory(path)
            except FileNotFoundError:
                self._check_location()
                if beside is not None:
                    beside.look(None)
                continue  # nothing was ever made in it
            with directory:
                look_beside(directory, beside)
                for place, name in places:
                    check()
                    try:
                        removed[place] = directory.remove(name)
                    except OSError as error:
                        failed[place] = error
                directory.sync()
                look_beside(directory, beside)
        self._tell_apart(names, failed, needs_room=False)
        for place, problem in failed.items():
            removed[place] = SecretStoreError(f"the file system does not remove this object ({reason_of(problem)})")
        return removed

    @translated
    def present(self, names: Sequence[str]) -> list[bool]:
        """Return for each of these names whether anything has it; nothing is opened. Raises a store error."""
        found = [False] * len(names)
        for path, places in self._by_directory(names).items():
            try:
                directory = Directory(path)
            except FileNotFoundError:
                self._check_location()
                continue
            with directory:
                for place, name in places:
                    found[place] = directory.has(name)
        return found

    def _tell_apart(self, names: Sequence[str], failed: Collection[int], *, needs_room: bool = True) -> None:
        """Raise what concerns the file system as a whole, if that is why these places of `names` have failed.

        Writes and syncs a file in the directory of each, links it and unlinks it again. `needs_room`: whether what has
        failed does; what needs none works on a full disk too.
        """
        for path, places in self._by_directory([names[place] for place in failed]).items():
            try:
                self._probe(path, places[0][1])
            except OSError as error:
                if needs_room or error.errno not in NO_ROOM:
                    raise

    def _probe(self, path: str, name: str) -> None:
        with Directory(path) as directory, directory.write(name, b"probe") as file:
            file.sync()
            file.try_link()

    def names(self, directory: str) -> Iterator[str]:
        """Yield the names of the files in `directory`, in no order.

        A file that a writer which died has left behind counts as the one that it was to be: removing that one
        removes it. So a name may come twice.

        Raises `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`.
        """
        try:
            with os.scandir(self.path(directory)) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False):
                        ending = next((one for one in LEFTOVERS if entry.name.endswith(one)), "")
                        yield entry.name.removesuffix(ending)
        except FileNotFoundError:
            self._check_location()
        except (OSError, SuspiciousFileOperation) as error:
            raise store_error(error) from None

    # The directories.

    @translated
    def _check_location(self) -> None:
        if not Path(OPEN_FILES).is_dir():
            raise StoreMisconfigured(
                "DurableFileStorage needs Linux, with /proc mounted: it links files by their handle."
            )
        try:
            mode = os.stat(self.location).st_mode  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            raise StoreMisconfigured(
                f"the directory for secrets does not exist: {self.location}. Mount the volume that holds it, "
                f"or make it with `mkdir -m 700 {self.location}` if it is new."
            ) from None
        if not stat.S_ISDIR(mode):
            raise StoreMisconfigured(f"the place for secrets is not a directory: {self.location}.")

    def _by_directory(self, names: Sequence[str]) -> dict[str, list[tuple[int, str]]]:
        """Return, by the path of each directory, the places in `names` and the names of what is in it."""
        places: dict[str, list[tuple[int, str]]] = {}
        paths: dict[str, str] = {}  # of a batch all are in one, as a rule, and looking at a path takes its time
        for place, name in enumerate(names):
            directory, base = os.path.split(name)
            if base in ("", os.curdir, os.pardir):
                raise SuspiciousFileOperation("no name of a file")
            path = paths.get(directory)
            if path is None:
                path = paths[directory] = self.path(directory)
            places.setdefault(path, []).append((place, base))
        return places

    def _made_directory(self, path: str, beside: Beside | None = None) -> Directory:
        """Open a directory, and make what is missing of it below `location`, unless `beside` misses its file then."""
        try:
            return self._durable_directory(path)
        except FileNotFoundError:
            self._check_location()
        if beside is not None:
            beside.look(None)
        level = Path(self.location)
        for name in Path(path).relative_to(level).parts:
            level /= name
            try:
                level.mkdir(DIRECTORY_MODE)
            except FileExistsError:
                continue
            level.chmod(DIRECTORY_MODE)  # whatever the umask
        return self._durable_directory(path)

    def _durable_directory(self, path: str) -> Directory:
        """Open a directory, and make its name durable: whoever made it may have died before it was."""
        directory = Directory(path)
        try:
            if directory.identity not in self._durable:
                parent = Path(path)
                while parent != Path(self.location):
                    parent = parent.parent
                    with Directory(str(parent)) as above:
                        above.sync()
                self._durable.add(directory.identity)
        except BaseException:
            directory.close()
            raise
        return directory

"""Files that are complete before they have a name, and a directory that gives them one: the system calls.

What goes wrong is an `OSError`, for `files.DurableFileStorage` to translate, or already a store error.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Self

from kfs_credentials.errors import StoreMisconfigured, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

FILE_MODE = 0o600
OPEN_FILES = "/proc/self/fd"
UNNAMED = getattr(os, "O_TMPFILE", os.O_DIRECTORY)
"""The flag for a file without a name."""

# What open(2) says where there are no such files: the kernel or the file system does not know them.
NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}
TEMPORARY = ".tmp"
REPLACEMENT = ".new"
TRIAL = ".try"
LEFTOVERS = (TEMPORARY, REPLACEMENT, TRIAL)
"""What the name of a file ends in beside its own that a writer may leave behind when it dies."""
TAKEN_OVER = "another process took over the writing of this object, or erased it"


class Directory:
    """An open directory: what is done in it goes through its handle, wherever its path leads by then."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the handle."""
        os.close(self.fd)

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode: the same directory, whatever its name."""
        status = os.fstat(self.fd)
        return status.st_dev, status.st_ino

    def has(self, name: str) -> bool:
        """Return whether the name is taken, by a file or by anything else."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str, most: int = -1) -> bytes | None:
        """Return the content of a file, `most` bytes of it at most; None if there is none of this name."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:  # noqa: PTH123 - it is open already
            return file.read(most)

    def holds(self, name: str, content: bytes) -> bool:
        """Return whether a file of this name is there and has exactly this content."""
        return self.read(name, len(content) + 1) == content

    def write(self, name: str, content: bytes) -> UnlinkedFile:
        """Write a file that is to have this name, and does not have it yet."""
        return UnlinkedFile(self, name, content)

    def remove(self, name: str) -> bool:
        """Remove the file and what a writer has left behind of it; return whether the file was there.

        Again until nothing is found: a writer that replaces it looks whether it is there once its replacement is, and
        so either it finds it gone, or this finds what it has made.
        """
        removed = False
        self.unlink(name + TRIAL)
        while True:
            self.unlink(name + TEMPORARY)
            replacing = self.unlink(name + REPLACEMENT)
            there = self.unlink(name)
            removed |= there
            if not (there or replacing):
                return removed

    def unlink(self, name: str) -> bool:
        """Remove a name; return whether it was there."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return False
        return True

    def sync_file(self, name: str) -> None:
        """Make the content of a file durable."""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Make the names in this directory durable."""
        os.fsync(self.fd)


class UnlinkedFile:
    """A file that is written but not yet under its name: an unnamed one, else one with a temporary name.

    The temporary name is derived from the file's own, so that removing the file removes it too. A leftover of
    that name is taken away and made anew: its writer, if it still lives, then holds a file without any name,
    which cannot be linked any more, and is told so.
    """

    def __init__(self, directory: Directory, name: str, content: bytes) -> None:
        self.directory = directory
        self.name = name
        self.temporary: str | None = None
        try:
            self.fd = os.open(".", UNNAMED | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE, dir_fd=directory.fd)
        except OSError as error:
            if error.errno not in NO_UNNAMED_FILES:
                raise
            self.temporary = name + TEMPORARY
            self.fd = self._open_temporary(self.temporary)
        try:
            os.fchmod(self.fd, FILE_MODE)  # an umask or a default ACL may have changed it
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(self.fd, rest) :]
        except BaseException:
            self.close()
            raise

    def _open_temporary(self, temporary: str) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        try:
            return os.open(temporary, flags, FILE_MODE, dir_fd=self.directory.fd)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=self.directory.fd)
            return os.open(temporary, flags, FILE_MODE, dir_fd=self.directory.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the file up, unless it has its name by now."""
        if self.temporary is not None and os.fstat(self.fd).st_nlink:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.temporary, dir_fd=self.directory.fd)
        os.close(self.fd)

    def sync(self) -> None:
        """Make the content durable."""
        os.fsync(self.fd)

    def link(self) -> bool:
        """Give the file its name; return False if the name is taken."""
        return self._link(self.name)

    def try_link(self) -> None:
        """Give the file another name and take it away again: raises what keeps any file here from getting one.

        A name that nobody renames: what has the one of a replacement may be moved over a secret.
        """
        trial = self.name + TRIAL
        self.directory.unlink(trial)  # whoever left it has died, or is trying the same, and can
        try:
            self._link(trial)
        finally:
            self.directory.unlink(trial)

    def replace(self, old: bytes, check: Callable[[], None]) -> bool:
        """Give the file its name in place of the one that has it; return False unless that one's content is `old`.

        `check` is called right before. By way of a second name, which each writer takes away from the one before, and
        an erasure from all of them: who was frozen in between finds it gone, or moves another writer's file, which is
        whole, in its own stead. Then this is False, too.
        """
        replacement = self.name + REPLACEMENT
        self.directory.unlink(replacement)
        try:
            if not self._link(replacement):
                return False
        except StoreUnavailable:
            return False  # another writer has taken its temporary name away
        renamed = False
        try:
            check()
            if self.directory.holds(self.name, old):
                os.rename(replacement, self.name, src_dir_fd=self.directory.fd, dst_dir_fd=self.directory.fd)
                renamed = True
        except FileNotFoundError:
            return False
        finally:
            if not renamed:
                self.directory.unlink(replacement)
        try:
            found = os.stat(self.name, dir_fd=self.directory.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False  # erased since
        return renamed and os.path.samestat(found, os.fstat(self.fd))

    def _link(self, name: str) -> bool:
        try:
            # Through the open file, never through the temporary name: that may be another writer's by now.
            os.link(f"{OPEN_FILES}/{self.fd}", name, dst_dir_fd=self.directory.fd, follow_symlinks=True)
        except FileExistsError:
            return False
        except PermissionError as error:
            if error.errno != errno.EPERM:
                raise
            # link(2): "The filesystem containing oldpath and newpath does not support the creation of hard
            # links."
            raise StoreMisconfigured(
                "the file system of the secrets knows no hard links, so that it cannot create a file once: "
                "put the directory for secrets on another one"
            ) from None
        except FileNotFoundError:
            if self.temporary is None or os.fstat(self.fd).st_nlink:
                raise
            # Its name was taken away, by another writer or by an erasure.
            raise StoreUnavailable(TAKEN_OVER) from None
        return True

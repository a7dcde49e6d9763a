"""What an operating system says about files, turned into the errors of a store, which name no object."""

from __future__ import annotations

import errno
import functools
import os
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from django.core.exceptions import SuspiciousFileOperation

from kfs_credentials.errors import (
    KfsCredentialsError,
    SecretStoreError,
    StoreDenied,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.stores.outcomes import bare

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
OF_ONE_FILE = {errno.EACCES, errno.EPERM, errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EOVERFLOW}
"""What may be wrong with a single file: its rights, a bad block, damaged metadata. Others are never about one alone."""
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
MISPLACED = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
NOT_FOUND = "the secret store holds nothing under this ref"


def translated(function: Callable[P, R]) -> Callable[P, R]:
    """Turn what the operating system raises into a store error, which names no object."""

    @functools.wraps(function)
    def translating(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except KfsCredentialsError as error:
            bare(error)
            raise
        except (OSError, SuspiciousFileOperation) as error:
            problem = store_error(error)
        # Out here, where the new error has no context: that would hold the path.
        raise problem

    return translating


def store_error(error: OSError | SuspiciousFileOperation) -> SecretStoreError:
    """Return what an error of the file system means for the store."""
    if isinstance(error, SuspiciousFileOperation):
        return StoreMisconfigured(
            "the name of a secret leads out of the directory for secrets: correct the prefix of the store"
        )
    number, reason = error.errno or 0, reason_of(error)
    if number in DENIED:
        return StoreDenied(
            f"the file system refuses access to the directory for secrets ({reason}): give it, with all that "
            "is in it, to the user that runs this process, on a file system that is mounted for writing"
        )
    if number in MISPLACED:
        return StoreMisconfigured(
            f"the directory for secrets is not where it was ({reason}): see whether its volume is mounted"
        )
    kind = StoreFull if number in NO_ROOM else StoreUnavailable
    return kind(f"the file system of the secrets does not work now ({reason})")


def reason_of(error: OSError) -> str:
    """Return the text and the name of an error's number: it has no path in it."""
    number = error.errno or 0
    return f"{os.strerror(number)}, {errno.errorcode.get(number, number)}"

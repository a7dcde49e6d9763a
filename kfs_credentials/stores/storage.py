"""What a Django storage has to be able to do, so that secrets can be kept in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from django.core.exceptions import ImproperlyConfigured
from django.core.files.storage import InvalidStorageError, Storage, StorageHandler, storages

from kfs_credentials.errors import SecretStoreError, StoreMisconfigured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kfs_credentials.stores.values import Beside


@runtime_checkable
class CreateOnceStorage(Protocol):
    """What a Django storage has to be able to do beyond Django's own interface. `DurableFileStorage` can.

    All of it raises `StoreUnavailable`, `StoreDenied` and `StoreMisconfigured`.
    """

    def check(self, directory: str = "") -> None:
        """Raise a store error if files cannot be made in `directory`."""

    def create_many(
        self, files: Sequence[tuple[str, bytes]], *, check: Callable[[], None] = ..., beside: Beside | None = ...
    ) -> list[bool | SecretStoreError]:
        """Create the files (name, content), durable as a group; False for each whose name is taken.

        Or why this one could not be written, though others can. What `check` raises right before a file becomes
        visible stops it there. `beside`: looked at before the first file and after the last, through the same handle.
        """

    def replace_many(
        self,
        files: Sequence[tuple[str, bytes, bytes]],
        *,
        check: Callable[[], None] = ...,
        done: Callable[[str], None] = ...,
        beside: Beside | None = ...,
    ) -> list[bool | SecretStoreError]:
        """Replace files (name, content as it was read, new content), durable as a group.

        False for each that is not there any more, or not with that content, or why this one could not be replaced.
        `done` is called with the name of each as soon as it is replaced. `check`, `beside`: as for `create_many`.
        """

    def read(self, name: str, *, beside: str | None = ...) -> bytes:
        """Return the content; raises `SecretNotFound`, `SecretIntegrityError` if it is no file.

        `SecretStoreError` itself if only this file cannot be read: the one of the name `beside` can, or is missing.
        """

    def read_many(self, names: Sequence[str], *, check: Callable[[], None] = ...) -> list[bytes | None]:
        """Return the contents of files that were just written; None where `read` has to say why there is none.

        `check` is called before each, and may raise to stop.
        """

    def sync(self, names: Sequence[str]) -> list[SecretStoreError | None]:
        """Make files durable that another process may have left unsynced.

        `SecretNotFound` for each that is not there, or why this one could not be made durable, though others can.
        """

    def remove_many(
        self, names: Sequence[str], *, check: Callable[[], None] = ..., beside: Beside | None = ...
    ) -> list[bool | SecretStoreError]:
        """Remove the files durably; return for each whether it was there, or why this one could not be removed.

        What `check` raises right before a file goes stops it there. `beside`: as for `create_many`.
        """

    def present(self, names: Sequence[str]) -> list[bool]:
        """Return for each of these names whether anything has it."""

    def names(self, directory: str) -> Iterator[str]:
        """Yield the names of the files in `directory`, without it, in any order, and some perhaps twice."""


def create_once(storage: str | dict[str, Any] | Storage) -> CreateOnceStorage:
    """Return a storage, or what an alias or a dictionary names; raises `StoreMisconfigured` if it is none of these."""
    try:
        if isinstance(storage, Storage):
            built: Any = storage
        elif isinstance(storage, str):
            built = storages[storage]
        else:
            built = StorageHandler({"default": dict(storage)})["default"]  # type: ignore[dict-item]
    except (InvalidStorageError, ImproperlyConfigured) as error:
        raise StoreMisconfigured(f"OPTIONS['storage'] gives no storage: {error}") from None
    except (TypeError, ValueError, LookupError):
        # The text of such an error may quote an option.
        raise StoreMisconfigured(
            "OPTIONS['storage'] gives no storage: it must be an alias of STORAGES, or a dictionary with a "
            "BACKEND and the OPTIONS that this backend takes"
        ) from None
    if not isinstance(built, CreateOnceStorage):
        raise StoreMisconfigured(
            f"{type(built).__name__} cannot create a file once and durably, and a secret that is overwritten "
            "is lost. Use kfs_credentials.stores.files.DurableFileStorage."
        )
    return built

"""Who acts: what stands in the events of whatever is done in a block."""

from __future__ import annotations

import getpass
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

APPLICATION = "application"
"""Who acts where nobody has said so: whoever calls the services."""

_actor: ContextVar[str] = ContextVar("kfs_credentials_actor", default=APPLICATION)


@contextmanager
def acting_as(actor: str) -> Iterator[None]:
    """Let this actor stand in the events of what is done in this block: a user, a service, a worker.

    Holds for this thread, or this asynchronous task, alone. The innermost block counts.
    """
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)


def current_actor() -> str:
    """Return who acts now."""
    return _actor.get()


def operating_system_user() -> str:
    """Return the name of the user who runs this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"  # a container whose user has no name

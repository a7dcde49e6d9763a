"""Who did what to which ref, and when: written in the transaction of the move, and never with a value."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from django.db.models.functions import Now

from kfs_credentials import sql
from kfs_credentials.models import Event, EventKind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

APPLICATION = "application"
"""Who acts where nobody has said so: whoever calls the services."""

_actor: ContextVar[str] = ContextVar("kfs_credentials_actor", default=APPLICATION)


@contextmanager
def acting_as(actor: str) -> Iterator[None]:
    """Let this actor stand in the events of what is done in this block: a user, a service, a worker."""
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)


def record(using: str, kind: EventKind, refs: Collection[str], *, detail: str | None = None) -> None:
    """Note that this has become of these refs, inside the caller's transaction.

    `detail`: a code, a key id, or what an operator gave as a reason; never anything from a store or a row.
    """
    if refs:
        sql.query(using, "audit/record", kind=kind.value, actor=_actor.get(), refs=list(refs), detail=detail)


def record_act(using: str, kind: EventKind, *, detail: str | None = None) -> None:
    """Note what was done that is about no ref, inside the caller's transaction."""
    Event.objects.using(using).create(created_at=Now(), kind=kind.value, actor=_actor.get(), detail=detail)

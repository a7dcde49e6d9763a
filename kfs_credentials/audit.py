"""Who did what to which ref, and when: written in the transaction of the move, and never with a value.

`acting_as` is for applications too: what their services do stands under `application` otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db.models.functions import Now

from kfs_credentials import sql
from kfs_credentials.actor import APPLICATION, acting_as, current_actor
from kfs_credentials.models import Event, EventKind
from kfs_credentials.models.event import announce

if TYPE_CHECKING:
    import uuid
    from collections.abc import Collection, Iterable, Sequence

__all__ = [
    "APPLICATION",
    "acting_as",
    "announce",
    "announce_all",
    "current_actor",
    "record",
    "record_act",
    "record_sources",
]


def record(using: str, kind: EventKind, refs: Collection[str], *, detail: str | None = None) -> None:
    """Note that this has become of these refs, inside the caller's transaction.

    `detail`: from a fixed list, a code or a key id for example; never anything from a store or a row.
    """
    Event.objects.using(using).note(kind, refs, detail=detail)


def record_act(using: str, kind: EventKind, *, detail: str | None = None) -> None:
    """Note what was done that is about no ref, inside the caller's transaction."""
    Event.objects.using(using).create(created_at=Now(), kind=kind.value, actor=current_actor(), detail=detail)


def record_sources(using: str, kind: EventKind, sources: Sequence[uuid.UUID], *, detail: str | None = None) -> None:
    """Note what was done about these sources that is about no ref, inside the caller's transaction."""
    if sources:
        parameters = {"kind": kind.value, "actor": current_actor(), "sources": list(sources), "detail": detail}
        sql.query(using, "audit/record_sources", **parameters)


def announce_all(using: str, written: Iterable[tuple[str, str, str | None]]) -> None:
    """Announce events that a statement has written itself, as it returned them: kind, ref and detail of each."""
    groups: dict[tuple[str, str | None], list[str]] = {}
    for kind, ref, detail in written:
        groups.setdefault((kind, detail), []).append(ref)
    for (kind, detail), refs in groups.items():
        announce(using, EventKind(kind), refs, detail=detail)

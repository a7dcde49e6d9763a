"""Closed keys: a key is closed before it is looked up which secrets are sealed under it, and then none can be missed.

A worker with an old key ring, or one that was frozen in the middle, could put a secret under the old key after
`reencrypt_secrets` has passed, and activate it; then the key is removed, and the secret with it. So each reservation
and each activation holds the keys (`hold`) before it locks any row, and looks in a later statement whether its key is
closed. Closing waits for those that hold, and is committed before the first ref is looked at: whatever notes a key was
committed before that, and is seen, or it finds its key closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from django.db.models.functions import Now

from kfs_credentials import sql
from kfs_credentials.audit import record_act
from kfs_credentials.conf import key_ring
from kfs_credentials.errors import InvalidKey, InvalidSetting, KeyClosed
from kfs_credentials.models import ClosedKey, EventKind
from kfs_credentials.transactions import short_transaction

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Collection, Iterable

CLOSING = 1_801_876_331
"""The class of our advisory lock (the first of its two numbers): "kfsk" in ASCII."""


def hold(using: str) -> None:
    """Keep keys from being closed until the transaction that is open is over. Call it before any row is locked.

    Takes the advisory lock shared, and waits while a key is being closed, for LOCK_TIMEOUT at most.
    """
    sql.query(using, "keys/hold", closing=CLOSING)


def closed(using: str) -> frozenset[str]:
    """Return the ids of the closed keys. After `hold` they stay the same until the transaction is over."""
    return frozenset(ClosedKey.objects.using(using).values_list("pk", flat=True))


def refuse_closed(using: str, key_id: str | None = None) -> frozenset[str]:
    """Raise `KeyClosed` if this key is closed (default: the first of the ring); return the closed ones."""
    key_id = key_id or key_ring().primary.id
    found = closed(using)
    if key_id in found:
        raise KeyClosed(key_id)
    return found


def close_keys(
    using: str, key_ids: Collection[str], *, by: str, primary: str, fence: Callable[[], None] = lambda: None
) -> None:
    """Let nothing come into use under these keys from here on, and open `primary` again if it was closed.

    `by`: who closes them. Works in a short transaction of its own, which waits, for LOCK_TIMEOUT at most, for those
    that hold the keys; raises a database error if that is not enough. `fence` is called inside of it, before anything
    is written: it locks what says that the caller may still do this, and raises if it may not.
    """
    with short_transaction(using):
        sql.query(using, "keys/close", closing=CLOSING)
        fence()
        before = closed(using)
        keys = ClosedKey.objects.using(using)
        new = [key_id for key_id in key_ids if key_id not in before and key_id != primary]
        keys.bulk_create(ClosedKey(key_id=key_id, closed_at=Now(), closed_by=by) for key_id in new)
        for key_id in new:
            record_act(using, EventKind.KEY_CLOSED, detail=key_id)
        if keys.filter(pk=primary).delete()[0]:
            record_act(using, EventKind.KEY_OPENED, detail=primary)


class HeldKey(TypedDict):
    """How many refs a key holds that are not erased, and what the key is to this process and this database."""

    key_id: str | None
    """None: of these refs it is not known under which key they are, or whether there is an object."""
    live: int
    retired: int
    """To be erased, or being erased."""
    candidate: int
    """Reserved, by whichever operation."""
    in_ring: bool
    first: bool
    closed: bool


def held_keys(using: str, *, tenant: str | None = None, space: uuid.UUID | None = None) -> list[HeldKey]:
    """Return what each key holds: those of the ring in their order, then the others, then what is not known.

    Keys of the ring, and closed ones, are there even if they hold nothing. Locks nothing; counts the ledger.
    """
    ring = _ring()
    held = {key_id: counts for key_id, *counts in sql.query(using, "keys/held", tenant=tenant, space=space)}
    shut = closed(using)
    others = sorted((held.keys() | shut) - {*ring, None}, key=str)
    return [
        HeldKey(
            key_id=key_id,
            live=live,
            retired=retired,
            candidate=candidate,
            in_ring=key_id in ring,
            first=key_id in ring[:1],
            closed=key_id in shut,
        )
        for key_id in (*ring, *others, *([None] if None in held else []))
        for live, retired, candidate in [held.get(key_id, (0, 0, 0))]
    ]


def refs_held(key: HeldKey) -> int:
    """Return how many refs a key holds that are not erased, in whatever state."""
    return key["live"] + key["retired"] + key["candidate"]


def missing_from_ring(keys: Iterable[HeldKey]) -> list[HeldKey]:
    """Return the keys that hold refs and are not in the ring of this process, of what `held_keys` returned."""
    return [key for key in keys if key["key_id"] is not None and not key["in_ring"] and refs_held(key)]


def unknown_in_use(keys: Iterable[HeldKey]) -> int:
    """Return how many refs are in use of which it is not known under which key they are, of what `held_keys` returned.

    The Node service does not note it, nor does whoever registers what a source names: any key may be theirs.
    """
    return sum(key["live"] for key in keys if key["key_id"] is None)


def _ring() -> tuple[str, ...]:
    try:
        return key_ring().key_ids
    except (InvalidKey, InvalidSetting):
        return ()  # the system checks say what is wrong; what the database knows can be shown nevertheless

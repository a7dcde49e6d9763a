"""A store's word is not enough: what it says that it has put, replaced or erased is looked at again in the same call.

On a receipt a plaintext is removed from the database, and on an erasure a ref reads `deleted`: after either nobody
else has the secret, or looks for it. A store may say more than it did: a cache that never reached the disk, a replica
that answers for another, a bucket that keeps what it hides, a restore in the middle.

One object that does not show what was said fails alone, with `NotAsSaid` or what reading it raised. Where none of a
call does, a secret that is none is put, read back and erased (`works`): if that does not work either, the store itself
is not what the settings say: `StoreMisconfigured`, which pauses the workers.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from kfs_credentials.crypto import sensitive
from kfs_credentials.errors import (
    KfsCredentialsError,
    NotAsSaid,
    SecretLost,
    SecretNotFound,
    SecretStoreError,
    StoreDenied,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.stores.calls import Deadline
from kfs_credentials.stores.outcomes import alone
from kfs_credentials.stores.values import Entry, Receipt, Resealed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kfs_credentials.stores.outcomes import Outcomes
    from kfs_credentials.stores.values import Address, Probe, Sighting

logger = logging.getLogger(__name__)

T = TypeVar("T")

ReadBack: TypeAlias = "Callable[..., Outcomes[Receipt]]"
"""`SecretStore._read_back` of a store."""

NOT_PUT = (
    "the secret store said that it has put this secret, and holds nothing under its ref: whatever it was to replace is "
    "left as it is. See whether the storage keeps what is written, and gives back what was written last"
)
NOT_REPLACED = (
    "the secret store said that it has sealed this secret anew, and gives back the old object: it stays in use. See "
    "whether the storage keeps what is written, and gives back what was written last"
)
LOST = (
    "the secret store does not give this secret back since it was to be sealed anew, nor since it was put again: "
    "restore its object from a copy, unless somebody else has erased it, or sealed it anew, at this moment"
)
NOT_ERASED = "the secret store said that it has erased this secret, and still holds it"


@sensitive
def put(
    put_many: Callable[..., Outcomes[Receipt]],
    read: ReadBack,
    entries: Sequence[Entry],
    *,
    works: Callable[..., bool],
    deadline: Deadline,
) -> Outcomes[Receipt]:
    """Put each, and read it back; a receipt says what was read."""
    outcomes = put_many(entries, deadline=deadline)
    said = [place for place, outcome in enumerate(outcomes) if isinstance(outcome, Receipt | NotAsSaid)]
    receipts = {place: outcome for place, outcome in enumerate(outcomes) if isinstance(outcome, Receipt)}
    for place, seen in _seen(read, {place: entries[place] for place in receipts}, receipts, deadline).items():
        outcomes[place] = NotAsSaid(NOT_PUT) if isinstance(seen, SecretNotFound) else seen
    _doubt(outcomes, said, "put", works, deadline)
    return outcomes


@sensitive
def replace(
    replace_many: Callable[..., Outcomes[Resealed]],
    read: ReadBack,
    put_back: Callable[..., None],
    addresses: Sequence[Address],
    *,
    works: Callable[..., bool],
    deadline: Deadline,
) -> Outcomes[Resealed]:
    """Seal each anew, and read back what was rewritten. What a store has lost by that is put again, from memory."""
    receipts: dict[int, Resealed] = {}
    try:
        outcomes = replace_many(addresses, rewritten=receipts, deadline=deadline)
    finally:
        # Also of what was rewritten before this was stopped, nobody else has the plaintext.
        found = _kept(read, put_back, addresses, receipts, deadline)
    said = [place for place in found if isinstance(outcomes[place], Resealed)]
    for place, seen in found.items():
        if isinstance(seen, StoreUnavailable | StoreDenied | StoreMisconfigured):
            raise seen
        if isinstance(seen, KfsCredentialsError):
            outcomes[place] = SecretLost(LOST)
        elif place in said and seen.key_id != receipts[place].key_id:
            outcomes[place] = NotAsSaid(NOT_REPLACED)
        elif place in said:
            outcomes[place] = Resealed(seen.key_id, seen.size, rewritten=True)
    _doubt(outcomes, said, "sealed anew", works, deadline)
    return outcomes


@sensitive
def _kept(
    read: ReadBack,
    put_back: Callable[..., None],
    addresses: Sequence[Address],
    receipts: Mapping[int, Resealed],
    deadline: Deadline,
) -> dict[int, Receipt | KfsCredentialsError]:
    """Return what is there of each that was rewritten, once what is lost of them was put again: nobody else has it.

    However late, and whoever has the lease by then: each step has its own time. If it is gone since somebody has
    erased it at this moment, whoever replaced it looks at its ledger row again.
    """
    entries = {
        place: Entry(addresses[place].scope, addresses[place].ref, receipt.plaintext)
        for place, receipt in receipts.items()
        if receipt.plaintext is not None
    }
    in_time = partial(Deadline, deadline.seconds, look=deadline.look)
    found = _looked_at(read, entries, receipts, in_time())
    lost = {place: entry for place, entry in entries.items() if not isinstance(found[place], Receipt)}
    if lost:
        try:
            put_back(list(lost.values()), deadline=in_time())
        finally:
            found |= _looked_at(read, lost, receipts, in_time())
            for place, entry in lost.items():
                if not isinstance(found[place], Receipt):
                    logger.critical("ref %s: %s (%s)", entry.ref, LOST, found[place])
    return found


@sensitive
def _looked_at(
    read: ReadBack, entries: Mapping[int, Entry], receipts: Mapping[int, Receipt], deadline: Deadline
) -> dict[int, Receipt | KfsCredentialsError]:
    """Return what is read back of each, by place. Where the store cannot be read, that is what became of each."""
    there = {place: receipts[place] for place in entries}
    try:
        return alone(partial(_seen, read, entries, there, deadline))
    except KfsCredentialsError as error:
        return dict.fromkeys(entries, error)


@sensitive
def _seen(
    read: ReadBack, entries: Mapping[int, Entry], receipts: Mapping[int, Receipt], deadline: Deadline
) -> dict[int, Receipt | KfsCredentialsError]:
    """Return what is read back of each, by place."""
    if not entries:
        return {}
    return dict(zip(entries, read(list(entries.values()), list(receipts.values()), deadline=deadline), strict=True))


def erase(
    delete_many: Callable[..., Outcomes[bool]],
    remain: Callable[..., Sequence[bool]],
    items: Sequence[T],
    *,
    works: Callable[..., bool],
    were_there: set[T],
    deadline: Deadline,
) -> Outcomes[bool]:
    """Erase each, and look whether it is gone. `items`: addresses, or names.

    Whether it was there is looked at before, too: a store that always says so would give its ref one horizon after the
    other. What is written in between is erased with it, and a patrol finds what comes later. `were_there`: what was,
    when this was tried before in the same call, and failed in a way that nobody foresaw.
    """
    remaining = remain(items, deadline=deadline)
    were_there.update(item for item, is_there in zip(items, remaining, strict=True) if is_there)
    outcomes = delete_many(items, deadline=deadline)
    said = [place for place, outcome in enumerate(outcomes) if isinstance(outcome, bool)]
    if said:
        remaining = remain([items[place] for place in said], deadline=deadline)
        for place, is_there in zip(said, remaining, strict=True):
            outcomes[place] = NotAsSaid(NOT_ERASED) if is_there else items[place] in were_there
        with suppress(StoreFull):  # then no trial can be put: to erase takes no room, and must go on
            _doubt(outcomes, said, "erased", works, deadline)
    return outcomes


def write_probe(write: Callable[..., None], read: Callable[[], Sighting], probe: Probe, *, deadline: Deadline) -> None:
    """Write the probe, and read it back: an epoch that the store does not show tells it from none of its copies."""
    write(probe, deadline=deadline)
    if read() != probe:
        deadline.check()
        raise StoreMisconfigured(
            "the secret store said that it has written its probe, and shows another one, or none: see whether its "
            "storage keeps what is written, and gives back what was written last"
        )


def _doubt(
    outcomes: Sequence[object], said: Collection[int], done: str, works: Callable[..., bool], deadline: Deadline
) -> None:
    """Raise `StoreMisconfigured` if nothing of what the store says that it has `done` is to be seen, nor a trial.

    Or what `works` raises: by now another store may be in the place of the one where it was done.
    """
    wrong = sum(isinstance(outcomes[place], SecretStoreError) for place in said)
    if not wrong:
        return
    # Who has lost the lease, or the time, may see what others have done since.
    deadline.check()
    if wrong == len(said) and not works(deadline=deadline):
        shown = f"{wrong} secrets, and shows none of them" if wrong > 1 else "1 secret, and does not show it"
        raise StoreMisconfigured(
            f"the secret store said that it has {done} {shown} like that, nor one that was put, read and erased to try "
            "it out: nothing was changed in the database for that. See whether its storage keeps what is written, and "
            "gives back what was written last"
        )

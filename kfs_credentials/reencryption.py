"""The steps of `reencrypt_secrets`, in the order in which they happen: begin, page, replace, settle.

- `begin` leases the run, of which there is one at a time, and closes all keys but the first.
- `page` goes through the ledger in the order of the refs. What is recorded as sealed under the first key is left out,
  so that a run which was interrupted goes on where it was.
- `start_replace` and `finish_replace` let the store seal a batch anew, while no transaction is open.
- `settle` locks the ledger rows, looks in a later statement what became of them meanwhile, and notes the key. What was
  erased since it was read may have been brought back by that: `erase_again` erases it once more.
"""

from __future__ import annotations

import enum
import math
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kfs_credentials import sql
from kfs_credentials.audit import acting_as, current_actor, record
from kfs_credentials.binding import Watch, advance
from kfs_credentials.conf import key_ring, settings
from kfs_credentials.crypto import Scope
from kfs_credentials.errors import (
    ImproperlyPrepared,
    InvalidScope,
    KfsCredentialsError,
    LeaseLost,
    SecretLost,
    SecretNotFound,
    SecretStoreError,
)
from kfs_credentials.keys import close_keys, hold
from kfs_credentials.leases import Lease
from kfs_credentials.ledger import ledger
from kfs_credentials.models import EventKind, RefState, Round
from kfs_credentials.models.ledger import RESERVED
from kfs_credentials.pause import check_not_paused
from kfs_credentials.stores import Address, Resealed, secret_stores
from kfs_credentials.stores.calls import Call
from kfs_credentials.stores.values import Probe
from kfs_credentials.transactions import short_transaction

PAGE = 2000
"""Refs that are read in one step."""
BEGUN = "another run has begun"
OVER = (RefState.DELETING, RefState.DELETED)
"""What is in these states is being erased, or is erased already: nothing of it is sealed anew unless it is named."""


class Outcome(enum.Enum):
    """What became of a ref. Also the names under which they are counted."""

    REWRITTEN = "rewritten"
    SKIPPED = "skipped"  # under the first key already
    FAILED = "failed"
    RESERVED = "reserved, with no object yet"
    ABSENT = "to be erased, with no object"
    ERASED = "erased meanwhile"


@dataclass(slots=True)
class Object:
    """One ref, as a page has it."""

    ref: str
    tenant_id: str
    space_id: uuid.UUID
    source_id: uuid.UUID
    state: str
    store: str
    key_id: str | None
    size: int
    live: bool
    """Its object has to be there: a source names the ref, or may name it again."""
    named: bool
    """It is being erased, or is erased, and a source names it by a stale save: if its object is there, it is copied."""
    result: Resealed | KfsCredentialsError | None = None
    """What the store answered; None if it was not asked, or its answer is not known."""
    gone: bool = False
    """It was erased since it was read, or claimed for that, and no source names it."""

    def address(self) -> Address | None:
        """Return where the object lies, None if no object can lie there."""
        try:
            return Address(Scope(self.tenant_id, self.space_id, self.source_id), self.ref)
        except InvalidScope as error:
            self.result = error
            return None

    @property
    def is_found(self) -> bool:
        """Whether something lies there, whatever it is."""
        answered = isinstance(self.result, Resealed | SecretStoreError)
        return answered and not isinstance(self.result, SecretNotFound | SecretLost)

    @property
    def outcome(self) -> Outcome | None:
        """What became of it; None if that is not known."""
        if self.gone:
            return Outcome.ERASED
        match self.result:
            case None:
                return None
            case Resealed():
                return Outcome.REWRITTEN if self.result.rewritten else Outcome.SKIPPED
            case SecretNotFound() if self.state in RESERVED:
                return Outcome.RESERVED
            case SecretNotFound() if not self.live:
                return Outcome.ABSENT
            case _:
                return Outcome.FAILED


@dataclass(slots=True)
class Page:
    """The next refs: those to look at, and how many are under the first key already."""

    objects: list[Object]
    skipped: int
    after: str | None
    """The last ref of the page; None if it was the last page."""


@dataclass(slots=True)
class Batch:
    """Objects, and the call to the store that is at work on some of them."""

    items: list[Object]
    asked: list[Object] = field(default_factory=list)
    call: Call[list[Resealed | KfsCredentialsError]] | None = None
    back: list[Object] = field(default_factory=list)
    """What was erased since it was read, and may be back by this."""
    watches: dict[str, Watch] = field(default_factory=dict)
    """What to watch of each store, by alias."""


class Reencryption:
    """The steps, for one run on one database.

    `using`: the database alias. `worker`: the run's name. `lease`: seconds. `by`: who is noted to have closed the keys.
    `store`: only what lies in the store of this alias. `recheck`: look at every object, whatever is recorded.

    It acts in the name of whoever makes it, whichever worker then goes through its steps.
    """

    def __init__(
        self, *, using: str, worker: str, lease: float, by: str, store: str | None = None, recheck: bool = False
    ) -> None:
        self.using = using
        self.worker = worker
        self.lease = Lease(worker, lease, size=1)
        self.by = by
        self.actor = current_actor()
        self.store = store
        self.recheck = recheck
        self.primary = key_ring().primary.id
        self._is_leased = False

    def begin(self) -> Lease:
        """Lease the run, then close all keys of the ring but the first, which is opened again if it was closed.

        Committed before the first ref is looked at: see `keys`. Raises `ImproperlyPrepared` if another run is at work,
        `WorkersPaused`, and `LeaseLost` if another run has begun since this one leased it: that one's keys stay as they
        are. Calling it again goes on where it was.
        """
        if not self._is_leased:
            self._take_lease()
        with acting_as(self.actor):
            close_keys(self.using, key_ring().key_ids[1:], by=self.by, primary=self.primary, fence=self._fence)
        return self.lease

    def _take_lease(self) -> None:
        with short_transaction(self.using):
            check_not_paused(self.using)
            sql.query(self.using, "cleanup/rounds", name=Round.REENCRYPTION)
            rounds = Round.objects.using(self.using).filter(pk=Round.REENCRYPTION)
            list(rounds.select_for_update(no_key=True).values_list("pk"))
            if not rounds.fenced(self.lease).exists() and not rounds.claim(self.lease, every=0):
                raise ImproperlyPrepared(
                    f"Another reencrypt_secrets is at work on the database '{self.using}', or was until a moment ago. "
                    f"Wait for its end; if it was killed, for {self.lease.duration:g} s (KFS_CREDENTIALS['LEASE'])."
                )
        self._is_leased = True

    def _fence(self) -> None:
        """Extend, and so lock, the lease in the caller's transaction. Raises `LeaseLost` if another run has begun."""
        if not Round.objects.using(self.using).renew(self.lease):
            raise LeaseLost(BEGUN)

    def page(self, after: str, limit: int = PAGE) -> Page:
        """Return what comes after this ref. Locks nothing."""
        with short_transaction(self.using):
            found = [Object(*row) for row in sql.query(self.using, "keys/page", after=after, limit=limit)]
        ours = [one for one in found if (one.named or one.state not in OVER) and self.store in (None, one.store)]
        objects = [one for one in ours if self.recheck or one.key_id != self.primary]
        return Page(objects, len(ours) - len(objects), found[-1].ref if found else None)

    def start_replace(self, batch: Batch, limit: int) -> bool:
        """Start the next store on at most `limit` of what it holds of the batch; return False if none is left to ask.

        Raises `WorkersPaused` and `BindingBroken`.
        """
        waiting = [item for item in batch.items if item.result is None]
        if not waiting:
            return False
        group = [(item, item.address()) for item in waiting if item.store == waiting[0].store][:limit]
        batch.asked = [item for item, address in group if address is not None]
        addresses = [address for _, address in group if address is not None]
        if addresses:
            check_not_paused(self.using)
            store = secret_stores[waiting[0].store]
            # One for all that the store answers of a batch: what it has answered is noted for the same binding.
            if not any(isinstance(item.result, Resealed) for item in batch.items if item.store == store.alias):
                batch.watches[store.alias] = Watch.begin(self.using, store.alias)
            watch = batch.watches[store.alias]
            # Another run must not begin while this one writes: its lease is looked at before each object is visible.
            batch.call = store.start_replace_many(addresses, guard=self.lease.check, look=watch.look)
        return True

    def finish_replace(self, batch: Batch) -> None:
        """Note what the store answered for each object.

        Raises what concerns the store as a whole or the lease: then some of these may be replaced, and some not.
        """
        if batch.call is not None:
            call, batch.call = batch.call, None
            for item, result in zip(batch.asked, call.result(), strict=True):
                item.result = result

    def give_up(self, batch: Batch) -> None:
        """Let nothing become visible any more of what the store is still at work on."""
        batch.call = None
        self.lease.confirmed(-math.inf)

    def renew(self, _: Batch | None = None) -> None:
        """Extend the lease of the run if a third of it is over. Raises `LeaseLost` if another run has begun."""
        if self.lease.renewal_due:
            asked_at = time.monotonic()
            with short_transaction(self.using):
                self._fence()
            self.lease.confirmed(asked_at)

    def settle(self, batch: Batch) -> Counter[Outcome]:
        """Note under which key each object is now, in one transaction; return how many of each outcome.

        `batch.back` is then what was erased since it was read, also where this raises `LeaseLost`, since another run
        has begun: then nothing was written. Locks the ledger rows (waits for LOCK_TIMEOUT at most).
        """
        refs = {item.ref: item for item in batch.items}
        with short_transaction(self.using), acting_as(self.actor):
            hold(self.using)
            list(ledger(self.using).filter(credential_ref__in=list(refs)).lock().values_list("pk"))
            gone = {ref for (ref,) in sql.query(self.using, "keys/gone", refs=list(refs))}
            for item in batch.items:
                item.gone = item.ref in gone
            batch.back = [item for item in batch.items if item.gone and not isinstance(item.result, SecretNotFound)]
            self._fence()
            sealed = [item for item in batch.items if isinstance(item.result, Resealed) and not item.gone]
            receipts = [item.result for item in sealed if isinstance(item.result, Resealed)]
            noted = sql.query(
                self.using,
                "keys/note",
                refs=[item.ref for item in sealed],
                stores=[item.store for item in sealed],
                key_ids=[receipt.key_id for receipt in receipts],
                sizes=[receipt.size for receipt in receipts],
            )
            rewritten = [ref for (ref,) in noted if refs[ref].outcome is Outcome.REWRITTEN]
            record(self.using, EventKind.REENCRYPTED, rewritten, detail=self.primary)
            self._forget([item for item in batch.items if item.outcome in (Outcome.RESERVED, Outcome.ABSENT)])
            for watch in batch.watches.values():
                watch.end()
        return Counter(item.outcome for item in batch.items if item.outcome is not None)

    def _forget(self, items: Sequence[Object]) -> None:
        noted = {item.ref: item.key_id for item in items if item.key_id is not None}
        if noted:
            sql.query(self.using, "keys/forget", refs=list(noted), key_ids=list(noted.values()))

    def erase_again(self, batch: Batch, limit: int) -> None:
        """Erase what was erased, or claimed for it, while it was sealed anew: at most `limit` objects of one store.

        Raises what concerns the store. `batch.back` is then what is left.
        """
        store = batch.back[0].store
        items = [item for item in batch.back if item.store == store][:limit]
        addresses = [address for address in (item.address() for item in items) if address is not None]
        watch = batch.watches.get(store)
        look = None if watch is None else watch.look
        secret_stores[store].start_delete_many(addresses, look=look).result()
        erased = {item.ref for item in items}
        batch.back = [item for item in batch.back if item.ref not in erased]

    def reseal_probes(self) -> bool:
        """Seal the probe of each store under the first key, too: the last that was under another one. Return True.

        Of each, also where only one store's secrets are moved: who hears that a key can go looks at no probe. Raises as
        `binding.advance` does.
        """
        for store in settings.STORES:
            seen = secret_stores[store].read_probe()
            if isinstance(seen, Probe) and seen.key_id != self.primary:
                advance(self.using, store, worker=self.worker)
        return True

    def release(self, _: Batch) -> int:
        """Give nothing back: a run has no rows of its own."""
        return 0

    def complete(self, failed: int) -> int:
        """Note that the run came to its end, and how many could not be sealed anew; return 1.

        Raises `LeaseLost` if another run has begun.
        """
        with short_transaction(self.using):
            if completed := Round.objects.using(self.using).complete(self.lease, found=failed):
                return completed
            raise LeaseLost(BEGUN)

    def abandon(self) -> int:
        """Let another run begin; return 1, or 0 if one has."""
        with short_transaction(self.using):
            return Round.objects.using(self.using).release(self.lease)

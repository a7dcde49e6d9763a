"""The cleanup's steps, in the order in which they happen: reconcile, sweep, erase, confirm, patrol, purge.

- `reconcile` takes back what was reserved and never used.
- `sweep` goes through the ledger and the sources, finds refs that nobody names any more, however that came about, and
  `repair` looks after sources that name a ref which is not active.
- `claim`, `start_delete` and `settle` erase what is due: a batch is leased in one transaction, erased while none is
  open, and settled in another. An erasure is repeated once, after the horizon: a writer that was frozen can write late.
- `patrol` goes through what the store lists, for what was written later still; `purge` then forgets final rows.

Lock, then look, then write: whether a ref is in use is asked in a statement of its own, after its row is locked, since
a statement that waits for a lock sees other tables as they were before.
"""

from __future__ import annotations

import enum
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kfs_credentials import sql
from kfs_credentials.audit import announce, current_actor
from kfs_credentials.binding import Watch, advance, check_bound, wait_for
from kfs_credentials.conf import settings
from kfs_credentials.crypto import Scope
from kfs_credentials.errors import (
    InvalidScope,
    KfsCredentialsError,
    LeaseLost,
    SecretRetained,
    StoreFull,
    StoreUnavailable,
)
from kfs_credentials.keys import closed, hold
from kfs_credentials.leases import Lease, Leases
from kfs_credentials.ledger import note_claim
from kfs_credentials.models import (
    Attention,
    Event,
    EventKind,
    Receipt,
    RefError,
    RefState,
    Round,
    SecretObject,
    Source,
)
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.models.ledger import LedgerQuerySet
from kfs_credentials.pause import check_not_paused
from kfs_credentials.repairs import Repair, Repairs
from kfs_credentials.stores import Address, SecretStore, secret_stores
from kfs_credentials.stores.calls import Call
from kfs_credentials.transactions import short_transaction

logger = logging.getLogger(__name__)

BEGUN_ANEW = "another worker has begun this round anew"
DAY = 86400.0
PARKED_FOR = DAY
"""How long a parked erasure waits before it is tried again."""
LONGEST_EXPONENT = 20
PAGE = 2000
"""Rows, or objects, that a sweep or a patrol looks at in one step."""
MOST_UNKNOWN = 10_000
"""Unknown objects that one patrol keeps in mind, and counts."""
NAMED = 20
"""How many rows of a kind the log names."""


def backoff(attempts: int, *, interval: float, longest_exponent: int = LONGEST_EXPONENT) -> float:
    """Return the delay before an erasure is tried again, in the unit of `interval`, as knowledge-fs has it.

    It doubles with each attempt that failed before, and is never above 24 hours (if `interval` is in seconds).
    """
    return min(interval * 2.0 ** min(attempts, longest_exponent), max(interval, DAY))


class Outcome(enum.Enum):
    """What became of a row that was claimed for erasure. Also the names under which they are counted."""

    ERASED = "erased"
    CONFIRMED = "confirmed"
    RETRY = "to retry"
    RETAINED = "retained by the store"
    PARKED = "parked"
    RELEASED = "released"


@dataclass(slots=True)
class Item:
    """One ref that is being erased."""

    id: uuid.UUID
    tenant_id: str
    space_id: uuid.UUID
    source_id: uuid.UUID
    ref: str
    attempts: int
    store: str = "default"
    confirms: bool = False
    """The horizon has passed since the first erasure."""
    result: bool | KfsCredentialsError | None = None
    """Whether it was there, or what the store raised; None if it was not asked."""

    def address(self) -> Address | None:
        """Return where the object lies, None if no object can lie there."""
        try:
            return Address(Scope(self.tenant_id, self.space_id, self.source_id), self.ref)
        except InvalidScope as error:
            self.result = error
            return None


@dataclass(slots=True)
class Erasure:
    """Refs under one lease, and the call to the store that is at work on them."""

    lease: Lease
    items: list[Item]
    in_use: list[str] = field(default_factory=list)
    """Refs that were due, and that a source names: not claimed, to be repaired."""
    erasing: list[Item] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)
    """What to watch of each store that has been asked."""
    call: Call[list[bool | KfsCredentialsError]] | None = None
    made_room: set[str] = field(default_factory=set)
    """Refs whose objects were there, and were erased before the others."""
    no_room: bool = False
    """A store is full, and nothing of the batch could be erased to make room."""

    @property
    def waiting(self) -> list[str]:
        """The aliases of the stores that have not been asked yet."""
        return sorted({item.store for item in self.items if item.result is None})


@dataclass(slots=True)
class SweepPosition:
    """How far a sweep has got: through the ledger first, then through the sources."""

    lease: Lease
    after: str | None = None
    """The last ref that was looked at; None at the start, since a source can name an empty text."""
    through_ledger: bool = False
    found: int = 0


@dataclass(slots=True)
class PatrolPosition:
    """How far a patrol of one store has got."""

    lease: Lease
    store: str
    names: Iterator[str]
    page: dict[bytes, str] = field(default_factory=dict)
    """Digests and names of the objects that were listed and not looked at yet."""
    unknown: dict[bytes, str] = field(default_factory=dict)
    found: int = 0


class Swept(NamedTuple):
    """What a page of a sweep found: refs that sources name and that are to be repaired, besides the counts."""

    retired: int
    kept: int
    """Displaced by an older ref, and kept for a person."""
    to_repair: list[str]
    more: bool


class Cleanup:
    """The steps, for one worker on one database.

    `using`: the database alias. `worker`: the worker's name. `lease`: seconds. `tenant` and `space` narrow the work.
    """

    def __init__(
        self,
        *,
        using: str,
        worker: str,
        lease: float,
        tenant: str | None = None,
        space: uuid.UUID | None = None,
    ) -> None:
        self.using = using
        self.worker = worker
        self.tenant = tenant
        self.space = space
        self.leases = Leases(using, self.refs, worker=worker, seconds=lease)
        self.repairs = Repairs(using, self.refs)

    def refs(self) -> LedgerQuerySet:
        """Return the ledger rows that this cleanup is for."""
        rows: LedgerQuerySet = LedgerRow.objects.using(self.using)
        return rows.of(self.tenant, self.space)

    # 1. What was reserved and never used.

    def reconcile(self, limit: int) -> Counter[str]:
        """Settle at most `limit` reservations past `recover_after`; return how many became what.

        A ref that its source names is active, unless its key is closed: that is looked at again later, when
        `reencrypt_secrets` has moved it. So is one that a live job holds; any other is retired. Holds the keys, see
        `keys`, and locks the rows, SKIP LOCKED.
        """
        with short_transaction(self.using):
            hold(self.using)
            unused = self.refs().unused().order_by("recover_after", "id")
            locked = unused.select_for_update(skip_locked=True, no_key=True, of=("self",))[:limit]
            ids = list(locked.values_list("pk", flat=True))
            if not ids:
                return Counter()
            rows = self.refs().filter(pk__in=ids)
            named = dict(rows.named().values_list("pk", "credential_ref"))
            live = set(rows.with_live_job().values_list("pk", flat=True)) - named.keys()
            naming = Source.objects.using(self.using).filter(credential_ref__in=named.values())
            versions = {
                (ref, *owner): version
                for ref, *owner, version in naming.values_list("credential_ref", "pk", "knowledge_space_id", "version")
            }
            activated = 0
            sealed_off = SecretObject.objects.filter(key_id__in=closed(self.using)).values("pk")
            for row in rows.filter(pk__in=named).exclude(credential_ref__in=sealed_off):
                version = versions.get((row.credential_ref, row.source_id, row.knowledge_space_id))
                if version is not None:
                    activated += self.refs().filter(pk=row.pk).activate(version)
            # What a live job holds is the job's; a ref that another source names is the sweep's finding.
            kept = self.refs().filter(pk__in=ids).unused().filter(pk__in=[*live, *named])
            counts = {"activated": activated, "kept": kept.recover_later()}
            counts["retired"] = self.refs().filter(pk__in=set(ids) - named.keys() - live).retire()
        return Counter({name: count for name, count in counts.items() if count})

    # 2. What nobody names, and what somebody names and should not.

    def begin_sweep(self, *, every: float) -> SweepPosition | None:
        """Begin a round through all refs; None if another worker makes one, or one was made `every` seconds ago."""
        lease = self._begin(Round.SWEEP, every)
        return None if lease is None else SweepPosition(lease)

    def sweep(self, position: SweepPosition, limit: int = PAGE) -> Swept:
        """Look at the next page, and retire what nobody names; keep what an older ref has displaced for a person.

        Locks the rows that it retires, SKIP LOCKED. Raises `LeaseLost` if another worker has begun anew.
        """
        self.renew_round(position)
        if position.through_ledger:
            wanted = {"after": position.after, "tenant": self.tenant, "space": self.space, "limit": limit}
            with short_transaction(self.using):
                found = sql.query(self.using, "cleanup/sweep_sources", **wanted)
            position.after = found[-1][0] if found else None
            return Swept(0, 0, [ref for ref, fine in found if not fine], more=bool(found))
        retired = kept = 0
        with short_transaction(self.using):
            following = self.refs()
            if position.after is not None:
                following = following.filter(credential_ref__gt=position.after)
            columns = ("pk", "credential_ref", "state", "next_delete_at")
            page = list(following.order_by("credential_ref").values_list(*columns)[:limit])
            if page:
                # The state is looked at here: asked for it, PostgreSQL could read an index on the state, whole.
                active = [row for row, _, state, _ in page if state == RefState.ACTIVE]
                undated = [row for row, _, state, due in page if state == RefState.RETIRED and due is None]
                named = set(self.refs().filter(pk__in=active).named().values_list("pk", flat=True))
                retired, kept = self._let_go([*(row for row in active if row not in named), *undated])
                refs = {ref for _, ref, *_ in page}
                self._know(refs.difference(SecretObject.objects.using(self.using).in_bulk(refs)))
        if not page:
            position.after, position.through_ledger = None, True
            return Swept(0, 0, [], more=True)
        position.after = page[-1][1]
        return Swept(retired, kept, [], more=True)

    def _let_go(self, rows: Sequence[uuid.UUID]) -> tuple[int, int]:
        """Lock these rows, look again what is to become of each, and do it; return how many were retired, and kept."""
        locked = self.refs().filter(pk__in=rows).lock(skip_locked=True).values_list("pk", flat=True)
        if not (rows and (ids := list(locked))):
            return 0, 0
        ours = self.refs().filter(pk__in=ids)
        kept = self.repairs.keep(list(ours.displaced().values_list("pk", flat=True)))
        # Looked up after that: what is kept is neither.
        retired = dict(ours.orphaned().values_list("pk", "credential_ref"))
        retired |= dict(ours.undated().values_list("pk", "credential_ref"))
        SecretObject.objects.using(self.using).mark(retired.values(), None)
        return self.refs().filter(pk__in=retired).retire(), kept

    def _know(self, refs: Iterable[str]) -> None:
        """Make rows about objects whose refs somebody else has reserved, so that the patrol can find them."""
        if refs := sorted(refs):
            sql.query(self.using, "cleanup/know", refs=refs)

    def complete(self, position: SweepPosition | PatrolPosition) -> int:
        """Note that a round was made to the end; return how many: 1. `LeaseLost` if another worker has begun anew."""
        with short_transaction(self.using):
            if completed := Round.objects.using(self.using).complete(position.lease, found=position.found):
                return completed
            raise LeaseLost(BEGUN_ANEW)

    def give_up(self, position: SweepPosition | PatrolPosition) -> None:
        """Let another worker begin this round anew."""
        with short_transaction(self.using):
            Round.objects.using(self.using).release(position.lease)

    def repair(self, ref: str) -> Repair:
        """Look after a source that names a ref which is not active: see `Repairs.repair`."""
        return self.repairs.repair(ref)

    # 3. Erase what is due.

    def claim(self, limit: int, *, beside: bool = False) -> Erasure | None:
        """Lease at most `limit` refs whose erasure is due; None if there are none.

        First what a dead worker held, in groups of at most half the size, so that a row which kills its worker is
        alone sooner or later; then retired refs; confirmations only if there are none of these, whatever their number.
        A ref that a source names is held, and one that a live job holds is put off: neither is claimed. `beside`: this
        worker has another batch at work, so that a single row is not alone.

        Locks the rows, SKIP LOCKED, for one short transaction. Raises `WorkersPaused`, and `BindingBroken` of any of
        the stores.
        """
        lease = self.leases.new()
        with short_transaction(self.using):
            check_not_paused(self.using)
            ids, alone = self._lock_due(limit, beside=beside)
            if not ids:
                self.leases.taken()
                return None
            rows = self.refs().filter(pk__in=ids)
            in_use = dict(rows.named().values_list("pk", "credential_ref"))
            held = in_use.keys() | set(rows.with_live_job().values_list("pk", flat=True))
            if held:
                # Of what the Node service had claimed, this is the only trace once the row is retired again.
                note_claim(self.using, self.refs().filter(pk__in=held).exclude(state=RefState.RETIRED))
                self.refs().filter(pk__in=in_use).hold()
                waiting = self.refs().filter(pk__in=held - in_use.keys())
                waiting.leased().release()
                waiting.postpone(max(settings.RETRY_BASE, settings.POLL_INTERVAL))
            free = [row for row in ids if row not in held]
            if alone and self._park(self.refs().filter(pk__in=free, delete_attempts__gte=settings.PARK_AFTER - 1)):
                free = []
            items = self._items(self.refs().filter(pk__in=free))
            for store in sorted({item.store for item in items}):
                Watch.begin(self.using, store)
            lease.size = max(len(items), 1 + beside)
            self.refs().filter(pk__in=free).claim(lease, crashed_alone=alone)
        self.leases.taken()
        return Erasure(lease, items, in_use=sorted(in_use.values()))

    def _lock_due(self, limit: int, *, beside: bool) -> tuple[list[uuid.UUID], bool]:
        expired = self.refs().expired().with_leased_size()
        # Of those that are free: a frozen worker holds its rows, and must not stand before everybody else's.
        oldest = expired.order_by("lease_expires_at", "id")
        oldest = oldest.select_for_update(skip_locked=True, no_key=True, of=("self",))
        crashed = oldest.values_list("lease_token", "leased_size").first()
        if crashed is not None:
            token, size = crashed
            group = self._lock_oldest(expired.filter(lease_token=token), min(limit, max(1, size // 2)))
            if beside and len(group) == 1:
                return [], False  # it has to be alone, to be held responsible: once the batch beside it is settled
            if group:
                return group, size == 1
        for due in (self.refs().retired().due(), self.refs().tombstones().due()):
            if ids := self._lock_oldest(due, limit):
                return ids, False
        return [], False

    def _lock_oldest(self, rows: LedgerQuerySet, limit: int) -> list[uuid.UUID]:
        # In the order of the claim index.
        oldest = rows.order_by("next_delete_at", "lease_expires_at", "updated_at", "id")
        locked = oldest.select_for_update(skip_locked=True, no_key=True, of=("self",))[:limit]
        return list(locked.values_list("pk", flat=True))

    def _items(self, rows: LedgerQuerySet) -> list[Item]:
        objects = note_claim(self.using, rows)
        columns = ("id", "tenant_id", "knowledge_space_id", "source_id", "credential_ref", "delete_attempts")
        items = [Item(*row) for row in rows.order_by("pk").values_list(*columns)]
        for item in items:
            item.store, item.confirms = objects[item.ref]
        return items

    def _park(self, rows: LedgerQuerySet) -> int:
        """Put aside a ref that was leased alone and has killed its worker PARK_AFTER times."""
        SecretObject.objects.using(self.using).mark(note_claim(self.using, rows), Attention.ERASURE_FAILS)
        return rows.retry_later(RefError.NEEDS_ATTENTION, PARKED_FOR)

    def start_delete(self, erasure: Erasure, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Start the next store on what it holds of the batch; return False if none is left to ask.

        A new epoch begins before anything is erased, but for the one object that makes room for it in a store that is
        full. Raises as `binding.advance` does, in transactions of its own; `meanwhile`: as there.
        """
        if not (waiting := erasure.waiting):
            return False
        group = [(item, item.address()) for item in erasure.items if item.store == waiting[0]]
        erasure.erasing = [item for item, address in group if address is not None]
        addresses = [address for _, address in group if address is not None]
        if addresses:
            store = secret_stores[waiting[0]]
            try:
                watch = advance(self.using, store.alias, worker=self.worker, meanwhile=meanwhile)
            except StoreFull:
                erasure.no_room = not self._make_room(store, erasure, addresses, meanwhile)
                watch = advance(self.using, store.alias, worker=self.worker, meanwhile=meanwhile)
            erasure.watches.append(watch)
            erasure.call = store.start_delete_many(addresses, guard=erasure.lease.check, look=watch.look)
        return True

    def _make_room(
        self, store: SecretStore, erasure: Erasure, addresses: Sequence[Address], meanwhile: Callable[[], None]
    ) -> bool:
        """Erase objects of the batch, one at a time, until one was there: a new epoch takes no more room than that.

        Without it a store that is full could never be cleaned. Nothing that was erased counts before the new epoch has
        begun: the ledger hears of the batch as a whole, and till then a copy of the store from before this is told by
        the epoch, or else its object is still to be erased. What cannot be erased is that also if no room is made: else
        such a batch would be claimed again and again, and no other.
        """
        watch = check_bound(self.using, store.alias, meanwhile)
        for item, address in zip(erasure.erasing, addresses, strict=True):
            call = store.start_delete_many([address], guard=erasure.lease.check, look=watch.look)
            try:
                (outcome,) = wait_for(call, meanwhile)
            except StoreFull:
                continue  # this one cannot be erased without room; perhaps the next can
            if outcome is True:
                erasure.made_room.add(address.ref)
                return True
            if isinstance(outcome, KfsCredentialsError):
                item.result = outcome
        return False

    def finish_delete(self, erasure: Erasure) -> None:
        """Note what the store answered for each ref.

        Raises what concerns the store as a whole or the lease: then these refs count as not asked, and `settle` gives
        them back.
        """
        if erasure.call is None:
            return
        call, erasure.call = erasure.call, None
        for item, result in zip(erasure.erasing, call.result(), strict=True):
            item.result = result
            if result is False and item.ref in erasure.made_room:
                item.result = True

    def renew(self, erasure: Erasure) -> None:
        """Extend the lease of the batch if a third of it is over. Raises `LeaseLost` if nothing of it is left."""
        self.leases.renew(erasure.lease)

    def settle(self, erasure: Erasure) -> Counter[Outcome]:
        """Write what the store said about each ref, in one transaction; return how many of each outcome.

        Refs that are not this lease's any more belong to another worker, and are not counted. Locks the ledger rows
        (waits for LOCK_TIMEOUT at most). Raises `LeaseLost` if the lease ran out before the commit, and
        `BindingBroken`; then nothing was written.
        """
        outcomes: dict[Outcome, list[Item]] = {outcome: [] for outcome in Outcome}
        with short_transaction(self.using):
            mine = self.refs().fenced(erasure.lease).filter(pk__in=[item.id for item in erasure.items])
            locked = set(mine.lock().values_list("pk", flat=True))
            for item in erasure.items:
                if item.id in locked:
                    outcomes[_outcome(item)].append(item)
            for outcome, items in outcomes.items():
                if items:
                    self._write(outcome, items)
            if erasure.no_room:
                # Of these nothing is left to erase, or it cannot be: others may make room, which are due later.
                given_back = self.refs().filter(pk__in=[item.id for item in outcomes[Outcome.RELEASED]])
                given_back.postpone(settings.RETRY_BASE)
            for watch in erasure.watches:
                watch.end()
            erasure.lease.check()
        return Counter({outcome: len(items) for outcome, items in outcomes.items() if items})

    def _write(self, outcome: Outcome, items: list[Item]) -> None:
        rows = self.refs().filter(pk__in=[item.id for item in items])
        refs = [item.ref for item in items]
        objects = SecretObject.objects.using(self.using)
        match outcome:
            case Outcome.ERASED | Outcome.CONFIRMED:
                receipts = {item.id: Receipt.ERASED if item.result else Receipt.ABSENT for item in items}
                stored = [receipts[item.id].value for item in items]
                sql.query(self.using, "cleanup/receipts", refs=refs, receipts=stored)
                horizon = settings.LATE_WRITE_HORIZON if outcome is Outcome.ERASED else None
                for receipt in Receipt:
                    same = [row for row, given in receipts.items() if given is receipt]
                    rows.filter(pk__in=same).erased(receipt, confirm_after=horizon)
            case Outcome.RELEASED:
                rows.release()
            case Outcome.PARKED:
                objects.mark(refs, Attention.ERASURE_FAILS)
                rows.retry_later(RefError.NEEDS_ATTENTION, PARKED_FOR)
            case Outcome.RETAINED:
                objects.mark(refs, Attention.RETAINED)
                results = [(item.id, item.result) for item in items]
                until = {row: result.until for row, result in results if isinstance(result, SecretRetained)}
                rows.retain({row: moment for row, moment in until.items() if moment is not None}, PARKED_FOR)
            case Outcome.RETRY:
                for attempts in {item.attempts for item in items}:
                    same = [item.id for item in items if item.attempts == attempts]
                    delay = backoff(attempts, interval=settings.RETRY_BASE)
                    self.refs().filter(pk__in=same).retry_later(RefError.DELETE_FAILED, delay)

    def release(self, erasure: Erasure) -> int:
        """Give back the refs of a batch that will not be settled; return how many were still this worker's."""
        return self.leases.give_back(erasure.lease)

    def erased(self, erasure: Erasure) -> int:
        """Return how many of the batch are erased by now, by what the ledger says."""
        return self.refs().tombstones().filter(pk__in=[item.id for item in erasure.items]).count()

    # 4. What the store holds and should not; what can be forgotten.

    def begin_patrol(self, store: str, *, every: float) -> PatrolPosition | None:
        """Begin a round through all that a store lists; None as for `begin_sweep`, or if the store cannot list.

        Raises what concerns the store, `BindingBroken` too.
        """
        if not secret_stores[store].can_list:
            return None
        check_bound(self.using, store)
        lease = self._begin(Round.patrol(store), every)
        return None if lease is None else PatrolPosition(lease, store, secret_stores[store].list())

    def patrol(self, position: PatrolPosition, limit: int = PAGE) -> bool:
        """Look at the next objects; return whether there may be more.

        An object whose row is final was written late: it is erased again, by making its row due. Locks these rows, and
        waits for them: what a patrol has passed may be purged. Raises what concerns the store, and `LeaseLost` if
        another worker has begun anew.
        """
        digest = secret_stores[position.store].digest
        digests = position.page = position.page or {digest(name): name for name in islice(position.names, limit)}
        self.renew_round(position)
        if digests:
            with short_transaction(self.using):
                found = sql.query(self.using, "cleanup/patrol", digests=list(digests))
                late = [row for _, row in found if row is not None]
                list(self.refs().filter(pk__in=late).lock().values_list("pk"))
                self.refs().final().filter(pk__in=late).erase_again(EventKind.LATE_WRITE)
            if late:
                logger.warning("%d objects were written after their erasure was confirmed: erased again", len(late))
            for digest, row in found:
                if row is None and len(position.unknown) < MOST_UNKNOWN:
                    position.unknown[bytes(digest)] = digests[bytes(digest)]
        else:
            # Of an empty directory in the place of the store a patrol has seen nothing.
            check_bound(self.using, position.store)
            self._report_unknown(position)
        position.page = {}
        return bool(digests)

    def _report_unknown(self, position: PatrolPosition) -> None:
        """Tell of the objects that no ledger row accounts for: the row came first, and was looked for afterwards."""
        if position.unknown:
            known = sql.query(self.using, "cleanup/known", digests=list(position.unknown))
            self._know(ref for ref, _ in known)
            for _, digest in known:
                position.unknown.pop(bytes(digest), None)
        position.found = len(position.unknown)
        if position.unknown:
            some = ", ".join(sorted(position.unknown.values())[:NAMED])
            logger.error(
                "store '%s' has %d objects that no ledger row accounts for: %s", position.store, position.found, some
            )

    def purge(self, limit: int) -> int:
        """Forget at most `limit` final rows older than LEDGER_RETENTION that a patrol has passed; return how many."""
        with short_transaction(self.using):
            limits = {"retention": settings.LEDGER_RETENTION, "limit": limit}
            purged = sql.query(self.using, "cleanup/purge", actor=current_actor(), **limits)
            announce(self.using, EventKind.FORGOTTEN, [ref for (ref,) in purged])
        return len(purged)

    def purge_events(self, limit: int) -> int:
        """Delete at most `limit` events older than EVENT_RETENTION; return how many."""
        with short_transaction(self.using):
            return Event.objects.using(self.using).purge(settings.EVENT_RETENTION, limit)

    # Rounds.

    def _begin(self, name: str, every: float) -> Lease | None:
        lease = Lease(self.leases.worker, self.leases.seconds, size=1)
        with short_transaction(self.using):
            sql.query(self.using, "cleanup/rounds", name=name)
            rounds = Round.objects.using(self.using).filter(pk=name)
            free = rounds.select_for_update(skip_locked=True, no_key=True)
            if not free.values_list("pk") or not rounds.claim(lease, every=every):
                return None
        return lease

    def renew_round(self, position: SweepPosition | PatrolPosition) -> None:
        """Extend the lease of a round; raises `LeaseLost` if another worker has begun anew."""
        with short_transaction(self.using):
            if not Round.objects.using(self.using).renew(position.lease):
                raise LeaseLost(BEGUN_ANEW)


def _outcome(item: Item) -> Outcome:
    match item.result:
        case None | StoreUnavailable():
            return Outcome.RELEASED
        case True:
            # A late write, if this was to be the confirmation: another horizon for it.
            return Outcome.ERASED
        case False:
            return Outcome.CONFIRMED if item.confirms else Outcome.ERASED
        case SecretRetained():
            return Outcome.RETAINED
        case _:
            return Outcome.PARKED if item.attempts + 1 >= settings.PARK_AFTER else Outcome.RETRY

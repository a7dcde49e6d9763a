"""The backfill's steps, in the order in which they happen: discover or claim, put, activate.

A batch goes through three short pieces of work, and no transaction is open between them:

1. `claim` or `discover`: a transaction that leases rows to this worker, either jobs that wait, or legacy sources that
   have no job yet and get a candidate reserved. Committed before any byte is written.
2. `start_put` and `finish_put`: the store keeps each secret at its candidate's own address, once.
3. `settle`: a transaction that locks ledger rows, jobs and sources, in this order and each in id order, looks at them
   again under the locks, decides for each source what is right *now* (`batch.decide`), and writes it.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from django.db import DatabaseError, connections, transaction

from kfs_credentials import sql
from kfs_credentials.audit import announce, announce_all, current_actor
from kfs_credentials.batch import Batch, Item, Move, Put, SourceNow, decide, made
from kfs_credentials.binding import Watch
from kfs_credentials.conf import key_ring, settings
from kfs_credentials.crypto import KeyRing, new_ref
from kfs_credentials.keys import hold, refuse_closed
from kfs_credentials.leases import Lease, Leases
from kfs_credentials.models import EventKind, JobError, Purpose, RefState, RunState, Source, SourceCredentialBackfill
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.models.backfill import BackfillQuerySet
from kfs_credentials.models.knowledge_space import being_deleted
from kfs_credentials.pause import check_not_paused
from kfs_credentials.stores import Address, Entry, SecretStore
from kfs_credentials.transactions import Fault, fault, short_transaction


class Backfill:
    """The steps, for one worker on one database.

    `using`: the database alias. `worker`: the worker's name. `lease`: seconds. `tenant` and `space` narrow the work.
    """

    def __init__(
        self,
        *,
        using: str,
        store: SecretStore,
        worker: str,
        lease: float,
        tenant: str | None = None,
        space: uuid.UUID | None = None,
    ) -> None:
        self.using = using
        self.worker = worker
        self.store = store
        self.tenant = tenant
        self.space = space
        self.after: uuid.UUID | None = None
        self.rejected: set[uuid.UUID] = set()
        self.leases = Leases(using, self._jobs, worker=worker, seconds=lease)

    # 1. Lease rows to this worker.

    def claim(self, limit: int, *, beside: bool = False) -> Batch | None:
        """Lease at most `limit` jobs whose worker died, or else that wait; None if there are none.

        What one claim held when its worker died is claimed again in groups of at most half its size, so that a row
        which kills its worker is alone sooner or later, and only then held responsible. `beside`: this worker has
        another batch at work, so that a single row is not alone.

        Locks the jobs, SKIP LOCKED, for one short transaction. Reads values, writes none. Raises `WorkersPaused` and
        `BindingBroken`.
        """
        lease = self.leases.new()
        leaving = being_deleted(self.using)
        with short_transaction(self.using):
            watch = self._admitted()
            refuse_closed(self.using)
            jobs = self._jobs().of_open_sources(leaving)
            expired = jobs.expired().with_leased_size()
            # Of those that are free: a frozen worker holds its rows, and must not stand before everybody else's.
            oldest = expired.order_by("lease_expires_at", "id")
            oldest = oldest.select_for_update(skip_locked=True, no_key=True, of=("self",))
            crashed = oldest.values_list("lease_token", "leased_size").first()
            ids: list[uuid.UUID] = []
            alone = False
            if crashed is not None:
                token, size = crashed
                alone = size == 1
                group = expired.filter(lease_token=token).lock_for_claim(min(limit, max(1, size // 2)))
                ids = list(group.values_list("id", flat=True))
            if not ids:
                alone = False
                ids = list(jobs.due().lock_for_claim(limit).values_list("id", flat=True))
            items = self._read(ids)
            if not items:
                self.leases.taken()
                return None
            lease.size = max(len(items), 1 + beside)
            self._jobs().filter(pk__in=[item.job_id for item in items]).claim(lease, crashed_alone=alone)
        self.leases.taken()
        if alone:
            for item in items:
                item.retry_count += 1
                if item.retry_count >= settings.MAX_ATTEMPTS:
                    item.out_of_reach(JobError.WORKER_LOST)
        ring = key_ring()
        for item in items:
            if item.put is Put.NOTHING:
                item.prepare()
                if not item.is_fingerprinted(ring):
                    # The candidate was reserved for another value, and somebody may have put that one there.
                    item.put, item.plaintext = Put.STALE, None
        return Batch(lease, items, watch)

    def discover(self, limit: int, *, beside: bool = False) -> Batch | None:
        """Lease at most `limit` legacy sources that have no job; None if none was found before the end of the table.

        Goes through the sources in id order and starts anew at the end. Locks sources and spaces, SKIP LOCKED, for
        one short transaction, in which job and candidate of each are inserted together. `beside`, and what is raised:
        as for `claim`.
        """
        lease = self.leases.new()
        ring = key_ring()
        leaving = being_deleted(self.using)
        with short_transaction(self.using):
            watch = self._admitted()
            refuse_closed(self.using, ring.primary.id)
            if self.after is None:
                self.rejected.clear()
            items = self._discovered(limit, leaving)
            if not items:
                self.after = None
                self.leases.taken()
                return None
            for item in items:
                item.prepare()
                item.fingerprint = item.fingerprint_now(ring)
            lease.size = max(len(items), 1 + beside)
            # Now that the values are read and canonical, so that closing waits for one statement. Sources are locked by
            # now, against the rule of `hold`: none of ours waits for these. An old application's UPDATE does, while a
            # key is being closed: as long as this waits, for LOCK_TIMEOUT at most. What closes waits for no source.
            hold(self.using)
            refuse_closed(self.using, ring.primary.id)
            reserved = self._reserve(items, lease, ring)
        self.leases.taken()
        self.after = items[-1].source_id
        return Batch(lease, reserved, watch)

    def _admitted(self) -> Watch:
        """Return what to watch of the store while a batch is put, inside the transaction that claims it.

        Raises `WorkersPaused` and `BindingBroken`.
        """
        check_not_paused(self.using)
        return Watch.begin(self.using, self.store.alias)

    def _jobs(self) -> BackfillQuerySet:
        jobs: BackfillQuerySet = SourceCredentialBackfill.objects.using(self.using)
        return jobs.of(self.tenant, self.space)

    def _discovered(self, limit: int, leaving: Sequence[uuid.UUID]) -> list[Item]:
        # In the order of the index a page costs a page; sorting would read all that are left, for every page.
        self._set("enable_sort", "off")
        found = partial(
            sql.query,
            self.using,
            "backfill/discover",
            after=self.after,
            leaving=list(leaving),
            tenant=self.tenant,
            space=self.space,
            limit=limit,
            bytes=settings.BATCH_BYTES,
        )
        return made(Item.discovered, found())

    def _set(self, name: str, value: str) -> None:
        with connections[self.using].cursor() as cursor:
            cursor.execute("SELECT set_config(%s, %s, true)", [name, value])

    def _read(self, ids: Sequence[uuid.UUID]) -> list[Item]:
        if not ids:
            return []
        read = partial(sql.query, self.using, "backfill/read", jobs=list(ids), bytes=settings.BATCH_BYTES)
        return made(Item.claimed, read())

    def _reserve(self, items: list[Item], lease: Lease, ring: KeyRing) -> list[Item]:
        def insert(part: list[Item]) -> None:
            # Two lists of this batch are joined here, and no table is read: hashing is right.
            self._set("enable_hashjoin", "on")
            rows = sql.query(
                self.using,
                "backfill/reserve",
                **columns(part, jobs="job_id", tenants="tenant_id", spaces="space_id", sources="source_id"),
                **columns(part, versions="version", refs="ref", fingerprints="fingerprint", sizes="size"),
                ledger=[uuid.uuid4() for _ in part],
                worker=lease.worker_id,
                token=lease.token,
                lease=lease.duration,
                recover_after=settings.RECOVER_AFTER,
                store=self.store.alias,
                key_id=ring.primary.id,
                actor=current_actor(),
            )
            announce(self.using, EventKind.RESERVED, [ref for _, ref in rows])
            reserved.update((ref, job) for job, ref in rows)

        reserved: dict[str, uuid.UUID] = {}
        for item in bisected(self.using, items, insert):
            self.rejected.add(item.source_id)
        for item in items:
            item.job_id = reserved.get(item.ref, item.job_id)
        return [item for item in items if item.ref in reserved]

    # 2. Put, outside of any transaction.

    def start_put(self, batch: Batch) -> None:
        """Start the store on what is to be put. Nothing becomes visible late, or once the lease is lost."""
        batch.putting = [item for item in batch.items if item.to_put]
        entries = [Entry(item.scope, item.ref, item.plaintext) for item in batch.putting if item.plaintext is not None]
        if entries:
            batch.call = self.store.start_put_many(entries, guard=batch.lease.check, look=batch.watch.look)

    def finish_put(self, batch: Batch) -> None:
        """Note what the store answered for each item.

        Raises what concerns the store as a whole (`StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`) or the
        lease (`LeaseLost`): then the items count as not put, and `settle` gives their jobs back.
        """
        if batch.call is not None:
            call, batch.call = batch.call, None
            for item, outcome in zip(batch.putting, call.result(), strict=True):
                item.put_outcome(outcome)
        # Rare: somebody else has activated the candidate. What is not put and nobody can read is not taken for done.
        if reading := [item for item in batch.items if item.to_read]:
            found = self.store.get_many([Address(item.scope, item.ref) for item in reading])
            for item, secret in zip(reading, found, strict=True):
                item.read_outcome(secret)

    def renew(self, batch: Batch) -> None:
        """Extend the lease of the batch if a third of it is over. Raises `LeaseLost` if nothing of it is left."""
        self.leases.renew(batch.lease)

    # 3. Look again under the locks, decide, write.

    def settle(self, batch: Batch) -> Counter[Move]:
        """Carry out what is right for each item now, all in one transaction; return how many of each move.

        Items whose row is not this lease's any more belong to another worker, and are not counted.

        Holds the keys, then locks ledger rows (waits for LOCK_TIMEOUT at most), then jobs and sources (SKIP LOCKED).
        Raises `LeaseLost` if the lease ran out before the commit, `KeyClosed` if this process has an old key ring, and
        `BindingBroken`; then nothing was written.
        """
        moves: dict[Move, list[Item]] = {move: [] for move in Move}
        with short_transaction(self.using):
            hold(self.using)
            ledger = lock_ledger(self.using, batch.items)
            mine = self._lock_jobs(batch)
            closed = refuse_closed(self.using)
            sources = lock_sources(self.using, mine)
            elsewhere = locked_elsewhere(self.using, mine, sources)
            leaving = set(being_deleted(self.using))
            for item in mine:
                source = sources.get(item.source_id)
                if item.receipt is not None and item.receipt.key_id in closed:
                    # Whoever has put it there had an old key ring.
                    item.put = Put.STALE
                move, error = decide(
                    item,
                    ledger.get(item.ref),
                    source,
                    locked_elsewhere=item.source_id in elsewhere,
                    leaving=not leaving.isdisjoint((item.source_id, item.space_id)),
                )
                # A copy: this transaction may be rolled back, and is then decided anew.
                version = item.version if source is None else source.version
                moves[move].append(replace(item, error=error, version=version))
            for item in self._activate(moves[Move.ACTIVATE], batch.lease):
                moves[Move.ACTIVATE].remove(item)
                moves[Move.FAIL].append(item)
                item.error = JobError.ROW_REJECTED
            self._refresh(moves[Move.REFRESH], sources)
            finish(self.using, moves[Move.ADOPT], RunState.SUCCEEDED, RefState.ACTIVE)
            finish(self.using, moves[Move.ABANDON], RunState.SUCCEEDED, RefState.RETIRED)
            # A ref that its source names is never retired, whatever is wrong with it.
            named = [item for item in moves[Move.FAIL] if item.put is Put.MISSING]
            finish(self.using, named, RunState.FAILED, RefState.ACTIVE)
            unnamed = [item for item in moves[Move.FAIL] if item.put is not Put.MISSING]
            finish(self.using, unnamed, RunState.FAILED, RefState.RETIRED)
            self._requeue(moves, batch.lease)
            batch.watch.end()
            batch.lease.check()
        return Counter({move: len(items) for move, items in moves.items() if items})

    def release(self, batch: Batch) -> int:
        """Give back the jobs of a batch that will not be settled; return how many were still this worker's.

        If the database does not answer, they are given back before the next batch is leased.
        """
        return self.leases.give_back(batch.lease)

    def moved(self, batch: Batch) -> int:
        """Return how many items are moved by now, by what the sources say."""
        refs = [item.ref for item in batch.items]
        return Source.objects.using(self.using).filter(credential_ref__in=refs).count()

    def _lock_jobs(self, batch: Batch) -> list[Item]:
        ids = [item.job_id for item in batch.items]
        # SKIP LOCKED: a DELETE of sources takes their jobs by cascade, in an order of its own, and must not be the
        # victim of a deadlock with us. What it leaves behind is given back.
        jobs = self._jobs().fenced(batch.lease).filter(pk__in=ids).order_by("id")
        locked = jobs.select_for_update(no_key=True, skip_locked=True)
        held = dict(locked.values_list("id", "candidate_credential_ref"))
        return [item for item in batch.items if held.get(item.job_id) == item.ref]

    def _activate(self, items: list[Item], lease: Lease) -> list[Item]:
        def update(part: list[Item]) -> None:
            receipts = [item.receipt for item in part if item.receipt is not None]
            (counts,) = sql.query(
                self.using,
                "backfill/activate",
                **columns(part, jobs="job_id", sources="source_id", refs="ref"),
                key_ids=[receipt.key_id for receipt in receipts],
                sizes=[receipt.size for receipt in receipts],
                token=lease.token,
                actor=current_actor(),
                detail=Purpose.BACKFILL.value,
            )
            if counts != (len(part),) * 3:
                raise CountsDiffer
            announce(self.using, EventKind.ACTIVATED, [item.ref for item in part], detail=Purpose.BACKFILL.value)

        return bisected(self.using, items, update)

    def _refresh(self, items: list[Item], sources: dict[uuid.UUID, SourceNow]) -> None:
        if not items:
            return
        for item in items:
            item.put, item.legacy = Put.NOTHING, sources[item.source_id].legacy
        requeue_with_fresh_candidates(self.using, self.store.alias, items)

    def _requeue(self, moves: dict[Move, list[Item]], lease: Lease) -> None:
        jobs = self._jobs().fenced(lease)
        if moves[Move.RELEASE]:
            jobs.filter(pk__in=[item.job_id for item in moves[Move.RELEASE]]).release()
        by_error: dict[JobError, list[uuid.UUID]] = {}
        for item in moves[Move.RETRY]:
            by_error.setdefault(item.error or JobError.UNEXPECTED, []).append(item.job_id)
        for error, ids in by_error.items():
            jobs.filter(pk__in=ids).retry_later(error)


def lock_ledger(using: str, items: Sequence[Item]) -> dict[str, str]:
    """Lock the ledger rows of the candidates, in id order; return the state by ref of those that are the items' own."""
    owners = {item.ref: (item.tenant_id, item.space_id, item.source_id) for item in items}
    rows = LedgerRow.objects.using(using).filter(credential_ref__in=list(owners)).order_by("id")
    locked = rows.select_for_update(no_key=True).values_list(
        "credential_ref", "state", "tenant_id", "knowledge_space_id", "source_id"
    )
    return {ref: state for ref, state, *owner in locked if owners[ref] == tuple(owner)}


def lock_sources(using: str, items: Sequence[Item]) -> dict[uuid.UUID, SourceNow]:
    """Lock the sources, SKIP LOCKED, in id order; return what they are now, by id."""
    lock = partial(sql.query, using, "backfill/lock_sources", bytes=settings.BATCH_BYTES)
    return dict(made(SourceNow.by_id, lock(**columns(items, sources="source_id"))))


def locked_elsewhere(using: str, items: Sequence[Item], locked: Container[uuid.UUID]) -> set[uuid.UUID]:
    """Return the ids of the sources that are there, but could not be locked. `locked`: those that could."""
    ids = [item.source_id for item in items if item.source_id not in locked]
    return set(Source.objects.using(using).filter(pk__in=ids).values_list("pk", flat=True)) if ids else set()


def finish(using: str, items: Sequence[Item], run_state: RunState, ref_state: RefState) -> None:
    """End these jobs, with `item.error` if there is one, and move their candidates to `ref_state`. All are locked."""
    if not items:
        return
    written = sql.query(
        using,
        "backfill/finish",
        **columns(items, jobs="job_id", refs="ref", versions="version"),
        codes=[item.error.value if item.error else None for item in items],
        messages=[item.error.message if item.error else None for item in items],
        run_state=run_state.value,
        ref_state=ref_state.value,
        grace=settings.ERASE_GRACE,
        actor=current_actor(),
    )
    announce_all(using, written)


def requeue_with_fresh_candidates(using: str, store: str, items: Sequence[Item]) -> None:
    """Retire the candidates of these jobs and queue the jobs with new ones, for the credentials in `item.legacy`.

    The caller has locked ledger rows, jobs and sources. Changes `item.ref` to the new ref. Raises `KeyClosed` if this
    process has an old key ring.
    """
    ring = key_ring()
    refuse_closed(using, ring.primary.id)
    old_refs = [item.ref for item in items]
    for item in items:
        item.ref, item.plaintext = new_ref(), None
        item.prepare()
        item.fingerprint = item.fingerprint_now(ring)
    written = sql.query(
        using,
        "backfill/refresh",
        **columns(items, jobs="job_id", refs="ref", versions="version", fingerprints="fingerprint", sizes="size"),
        old_refs=old_refs,
        ledger=[uuid.uuid4() for _ in items],
        grace=settings.ERASE_GRACE,
        recover_after=settings.RECOVER_AFTER,
        store=store,
        key_id=ring.primary.id,
        actor=current_actor(),
    )
    announce_all(using, written)


class CountsDiffer(Exception):
    """A statement wrote fewer rows in one table than in another."""


def columns(items: Iterable[Item], **names: str) -> dict[str, list[Any]]:
    """Return lists for `unnest`: for each keyword, that attribute of every item."""
    items = list(items)
    return {parameter: [getattr(item, attribute) for item in items] for parameter, attribute in names.items()}


def bisected(using: str, items: list[Item], write: Callable[[list[Item]], None]) -> list[Item]:
    """Write all items in one statement; on a data error, in halves, until it is known which items it is about.

    Returns the items that cannot be written; the others are. Each try is a savepoint of the open transaction.
    """
    if not items:
        return []
    try:
        with transaction.atomic(using=using):
            write(items)
            # What a host's deferred constraints have to say must be said here, not at the commit.
            with connections[using].cursor() as cursor:
                cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
    except CountsDiffer:
        pass
    except DatabaseError as error:
        if fault(error) is not Fault.DATA:
            raise
    else:
        return []
    if len(items) == 1:
        return items
    middle = len(items) // 2
    return bisected(using, items[:middle], write) + bisected(using, items[middle:], write)

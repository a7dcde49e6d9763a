"""A database and its store know each other, or nothing is put and nothing is erased.

Each has its half of the binding: the database a row of `kfs_credentials_binding`, the store the probe, an object that
is sealed as secrets are. Both name the environment (made anew with each binding), the server and the database that the
binding was made in, and the epoch.

- Another directory, an empty mount: there is no probe. Another key: nobody can open it.
- A copy of the database that runs elsewhere says where it was copied from.
- Before each batch of erasures one worker at a time (a lease) begins a new epoch: in the database first, then in the
  store, which may therefore show the recorded epoch or the one before. Of what was restored from an older copy, one
  side is behind by more.

The probe is seen, through the handle by which a batch is put or erased, before the first object of it and after the
last; the row is read in the transaction that claims the batch, and again in the one that settles it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from django.db import ProgrammingError
from psycopg.errors import InsufficientPrivilege

from kfs_credentials import sql
from kfs_credentials.audit import record_act
from kfs_credentials.conf import settings
from kfs_credentials.crypto import Credentials, Scope, new_ref
from kfs_credentials.errors import (
    BindingBroken,
    BindingProblem,
    ImproperlyPrepared,
    InvalidKey,
    LeaseLost,
    SecretIntegrityError,
    SecretStoreError,
    StoreUnavailable,
)
from kfs_credentials.keys import refuse_closed
from kfs_credentials.leases import Lease
from kfs_credentials.models import Binding, EventKind
from kfs_credentials.models.binding import BindingQuerySet
from kfs_credentials.stores import Address, secret_stores
from kfs_credentials.stores.calls import Call
from kfs_credentials.stores.values import Probe, Sighting
from kfs_credentials.transactions import pause_before_try, short_transaction

T = TypeVar("T")

COMMAND = "bind_secret_store"
LOOK_UP_EVERY = 0.25
"""Seconds after which whoever waits looks up, at most."""
ADVANCING = 10.0
"""Seconds that an advance of the epoch may take; after a worker that died in it, others wait as long."""

EXPLANATIONS = {
    BindingProblem.UNBOUND: (
        "this database is not bound to the store",
        "If its secrets are in this store, bind it",
    ),
    BindingProblem.UNCONFIRMED: (
        "somebody has begun to bind this database to the store, and did not finish",
        "Bind it again",
    ),
    BindingProblem.CLONE: (
        "this database is a copy of the one that the store is bound to, or has moved to another server",
        "Give a copy a store of its own, and bind it to that one; if the database has moved, bind it again",
    ),
    BindingProblem.ENVIRONMENT: (
        "the store was bound in another environment than KFS_CREDENTIALS['ENVIRONMENT'] says",
        "Give a copy a store of its own, and bind it to that one; if the environment was renamed, bind it again",
    ),
    BindingProblem.NO_PROBE: (
        "the store does not show that it is this database's: it is another directory or bucket, or is not mounted",
        "Correct STORES or mount the volume; if this is the right store, bind it again",
    ),
    BindingProblem.UNREADABLE: (
        "no key in KFS_CREDENTIALS['KEYS'] opens the probe of the store",
        "Add the key under which its secrets are sealed; if that is lost, bind it again",
    ),
    BindingProblem.OTHER: (
        "the store is bound to another database",
        "Correct STORES or DATABASES; if this database is to have the store from now on, bind it",
    ),
    BindingProblem.OLD_STORE: (
        "the store shows an older epoch than the database: it was restored from a copy",
        "See which secrets are missing with `manage.py verify_credentials --deep`, then bind it again",
    ),
    BindingProblem.OLD_DATABASE: (
        "the store shows a newer epoch than the database: the database was restored from a copy",
        "See which secrets are missing with `manage.py verify_credentials --deep`, then bind it again",
    ),
}
"""What is the matter, and what to do, for each problem."""


def broken(problem: BindingProblem, store: str) -> BindingBroken:
    """Return the error of this problem."""
    what, do = EXPLANATIONS[problem]
    alias = "" if store == "default" else f" --store {store}"
    return BindingBroken(
        problem, f"secret store '{store}': {what}. Nothing is put or erased. {do}: `manage.py {COMMAND}{alias}`"
    )


class Known(NamedTuple):
    """The database's half."""

    store: str
    environment_id: uuid.UUID
    environment: str
    system_identifier: str
    database_oid: int
    epoch: int
    shown_epoch: int
    """What the store has shown for certain: the epoch, or the one before while an advance is not finished."""
    is_confirmed: bool
    is_here: bool
    """Whether it was made in this very database."""
    is_leased: bool
    """Whether somebody is advancing the epoch, or binding the store, at this moment."""

    @property
    def probe(self) -> Probe:
        """The other half, as it has to be."""
        return Probe(self.environment_id, self.environment, self.system_identifier, self.database_oid, self.epoch)

    def problem(self) -> BindingProblem | None:
        """Return what is wrong with this half by itself."""
        if not self.is_here:
            return BindingProblem.CLONE
        if self.environment != settings.ENVIRONMENT:
            return BindingProblem.ENVIRONMENT
        return None if self.is_confirmed else BindingProblem.UNCONFIRMED

    def problem_with(self, seen: Sighting) -> BindingProblem | None:
        """Return what is wrong with what was seen in the store, its epoch being no older than this half allows."""
        if seen is None:
            return BindingProblem.NO_PROBE
        if isinstance(seen, SecretIntegrityError):
            return BindingProblem.UNREADABLE
        if replace(seen, epoch=self.epoch) != self.probe:
            return BindingProblem.OTHER
        return BindingProblem.OLD_STORE if seen.epoch < self.shown_epoch else None


def known(using: str, store: str) -> Known | None:
    """Return the database's half of the binding of a store, None if it is not bound. One statement, no lock.

    Raises `ImproperlyPrepared` if this role may not ask which server this is.
    """
    try:
        found = sql.query(using, "binding/read", store=store)
    except ProgrammingError as error:
        if not isinstance(error.__cause__, InsufficientPrivilege):
            raise
    else:
        return Known(store, *found[0]) if found else None
    raise ImproperlyPrepared(
        f"This role of the database '{using}' may not ask which server it is on, or which store is bound to it: "
        "GRANT EXECUTE ON FUNCTION pg_control_system() to it, and SELECT on kfs_credentials_binding."
    )


def _sound(using: str, store: str) -> Known:
    """Return the database's half; raises `BindingBroken` if that shows a problem by itself."""
    half = known(using, store)
    if half is None:
        raise broken(BindingProblem.UNBOUND, store)
    if problem := half.problem():
        if problem is BindingProblem.UNCONFIRMED and half.is_leased:
            raise StoreUnavailable(f"secret store '{store}' is being bound at this moment")
        raise broken(problem, store)
    return half


@dataclass
class Watch:
    """Both halves, watched for the time of one batch."""

    using: str
    half: Known
    epoch: int = 0
    """The newest that was seen in the store."""

    @classmethod
    def begin(cls, using: str, store: str) -> Watch:
        """Read the database's half, in the transaction that claims. Raises `BindingBroken`.

        And `StoreUnavailable` while somebody is binding the store.
        """
        return cls(using, _sound(using, store))

    def look(self, seen: Sighting) -> None:
        """Compare with what is seen in the store, on the store's thread. Raises `BindingBroken`."""
        if problem := self.half.problem_with(seen):
            raise broken(problem, self.half.store)
        if isinstance(seen, Probe):
            self.epoch = max(self.epoch, seen.epoch)

    def end(self) -> None:
        """Read the database's half again, in the transaction that settles. Raises `BindingBroken`."""
        now = _sound(self.using, self.half.store)
        if now.environment_id != self.half.environment_id:
            raise broken(BindingProblem.OTHER, now.store)
        if self.epoch > now.epoch:
            raise broken(BindingProblem.OLD_DATABASE, now.store)


def check_bound(using: str, store: str, meanwhile: Callable[[], None] = lambda: None) -> Watch:
    """Raise `BindingBroken` unless both halves fit together; return what to watch. Changes nothing.

    Raises what the store raises, too. `meanwhile` is called now and then while that answers, and may raise to stop it.
    """
    watch = Watch.begin(using, store)
    seen = wait_for(secret_stores[store].start_read_probe(), meanwhile)
    try:
        watch.look(seen)
    except BindingBroken as error:
        # Somebody may have bound the store anew since the row was read.
        again = Watch.begin(using, store)
        if error.problem is not BindingProblem.OTHER or again.half.environment_id == watch.half.environment_id:
            raise
        watch = again
        watch.look(seen)
    if watch.epoch > watch.half.epoch:
        watch.end()  # epochs may have begun since the row was read; else the database was restored
    return watch


def ensure_bound(using: str, store: str) -> Watch:
    """Do what `check_bound` does, and bind a database that has no secrets yet by itself.

    For whoever is about to put or to erase. Works in transactions of its own.
    """
    try:
        return check_bound(using, store)
    except BindingBroken as error:
        if error.problem not in (BindingProblem.UNBOUND, BindingProblem.UNCONFIRMED):
            raise
    _bind_first(using, store)
    return check_bound(using, store)


def store_problem(using: str, store: str) -> str | None:
    """Return why nothing may be put into this store or erased there, or why that is not known; None if it may be."""
    try:
        check_bindable(using, store)
    except BindingBroken as error:
        return str(error)
    except (InvalidKey, SecretStoreError) as error:
        return f"secret store '{store}' could not be looked at: {error}"
    return None


def check_bindable(using: str, store: str) -> None:
    """Raise `BindingBroken` where `ensure_bound` would. Changes nothing."""
    found = survey(using, store)
    is_new = found.half is None or not (found.half.is_confirmed or found.half.epoch)
    if found.problem and not (is_new and found.seen is None and not found.has_live_refs):
        raise broken(found.problem, store)


def _bind_first(using: str, store: str) -> None:
    """Bind a database without live refs to a store without a probe, with any number of processes at once."""
    opened = secret_stores[store]
    seen = opened.read_probe()
    with short_transaction(using):
        ((has_live_refs,),) = sql.query(using, "binding/has_live_refs", store=store)
        if not has_live_refs and seen is None:
            refuse_closed(using)
            named = {"id": uuid.uuid4(), "environment": settings.ENVIRONMENT}
            sql.query(using, "binding/propose", store=store, by="first use", **named)
        half = known(using, store)
    if half is None:
        raise broken(_unbound(seen, has_live_refs=has_live_refs), store)
    if half.is_confirmed or not half.is_here:
        return
    if seen is None and not has_live_refs and not half.epoch:
        opened.create_probe(half.probe)
        seen = opened.read_probe()
    # Whoever was first: what the store shows now is compared before anything is put.
    if problem := _unconfirmed(half, seen):
        raise broken(problem, store)
    with short_transaction(using):
        if _rows(using, store).filter(environment_id=half.environment_id).confirm():
            record_act(using, EventKind.BOUND, detail=store)


def _unconfirmed(half: Known, seen: Sighting) -> BindingProblem | None:
    """Return what is wrong where the database's half is not confirmed; None if the store has the other one."""
    if half.epoch or seen is None:
        return BindingProblem.UNCONFIRMED
    return half.problem_with(seen)


def _unbound(seen: Sighting, *, has_live_refs: bool) -> BindingProblem:
    if has_live_refs or seen is None:
        return BindingProblem.UNBOUND
    return BindingProblem.OTHER if isinstance(seen, Probe) else BindingProblem.UNREADABLE


def _rows(using: str, store: str) -> BindingQuerySet:
    return Binding.objects.using(using).filter(pk=store)


def advance(using: str, store: str, *, worker: str, meanwhile: Callable[[], None] = lambda: None) -> Watch:
    """Begin a new epoch on both sides, before a batch is erased; return what to watch while it is.

    Takes the lease of the binding's row, and waits for another worker that has it; no transaction is open while the
    store writes. `meanwhile` is called now and then while this waits, and may raise to stop it. Raises `BindingBroken`,
    what the store raises, `StoreUnavailable` if others were at it all the time, and `KeyClosed`. An advance that is cut
    short leaves the store one epoch behind, and the next one catches up first.
    """
    opened = secret_stores[store]
    lease = Lease(worker, min(settings.LEASE, ADVANCING), size=1)
    attempts = _attempts("other workers advance the epoch of the secret store all the time", meanwhile)
    while True:
        half = _sound(using, store)
        watch = Watch(using, half)
        watch.look(wait_for(opened.start_read_probe(), meanwhile))
        if watch.epoch > half.epoch:
            watch.end()  # the database was restored, or else somebody has begun another epoch since
        elif _leased(using, lease, half, begin=watch.epoch == half.epoch):
            break
        next(attempts)
    behind = watch.epoch < half.epoch
    half = half._replace(epoch=half.epoch + 1, shown_epoch=half.epoch)
    shown = False
    try:
        if behind:
            _catch_up(using, half, lease, meanwhile)
        wait_for(opened.start_replace_probe(half.probe, guard=lease.check), meanwhile)
        shown = True
    except LeaseLost:
        # Not the lease of the batch: that one is still to be given back.
        raise StoreUnavailable(f"the secret store did not take a new epoch within {lease.duration:g} s") from None
    finally:
        with short_transaction(using):
            _rows(using, store).release(lease, shown=shown)
    return Watch(using, half, epoch=half.epoch)


def _leased(using: str, lease: Lease, half: Known, *, begin: bool) -> bool:
    """Lease the row, if nobody else has and it is as it was; `begin` the next epoch in the same moment."""
    lease.confirmed(time.monotonic())
    with short_transaction(using):
        rows = _rows(using, half.store).filter(epoch=half.epoch, environment_id=half.environment_id)
        leased = bool(rows.lease(lease, **({"epoch": half.epoch + 1, "shown_epoch": half.epoch} if begin else {})))
        # Under the row's lock: whoever has closed the key seals the probe anew once this lease is over.
        refuse_closed(using)
        return leased


def _catch_up(using: str, half: Known, lease: Lease, meanwhile: Callable[[], None]) -> None:
    """Let the store show the epoch before this one, which a worker left unfinished, and only then begin this one."""
    before = replace(half.probe, epoch=half.shown_epoch)
    wait_for(secret_stores[half.store].start_replace_probe(before, guard=lease.check), meanwhile)
    with short_transaction(using):
        if not _rows(using, half.store).advance(lease):
            raise LeaseLost("the lease ran out while the store caught up with the epoch")


def wait_for(call: Call[T], meanwhile: Callable[[], None]) -> T:
    """Return what a call to a store returns, or raise what it raises; `meanwhile` is called now and then."""
    while not call.wait(LOOK_UP_EVERY):
        meanwhile()
    return call.result()


def _attempts(message: str, meanwhile: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Pause between attempts, until even a lease whose worker died has run out; then raise `StoreUnavailable`."""
    until, failures = time.monotonic() + ADVANCING + settings.LOCK_TIMEOUT, 0
    while time.monotonic() < until:
        meanwhile()
        failures += 1
        time.sleep(min(LOOK_UP_EVERY, pause_before_try(failures)))
        yield
    raise StoreUnavailable(message)


class Survey(NamedTuple):
    """What an operator has to know before a store is bound."""

    half: Known | None
    seen: Sighting
    problem: BindingProblem | None
    has_live_refs: bool


def survey(using: str, store: str) -> Survey:
    """Look at both halves, and change nothing. Raises what the store raises."""
    half = known(using, store)
    seen = secret_stores[store].read_probe()
    ((has_live_refs,),) = sql.query(using, "binding/has_live_refs", store=store)
    problem: BindingProblem | None
    if half is None:
        problem = _unbound(seen, has_live_refs=has_live_refs)
    else:
        problem = half.problem() or half.problem_with(seen)
        if problem is BindingProblem.UNCONFIRMED:
            problem = _unconfirmed(half, seen) or problem
        if problem is None and isinstance(seen, Probe) and seen.epoch > half.epoch:
            again = known(using, store)
            if again is None or seen.epoch > again.epoch:
                problem = BindingProblem.OLD_DATABASE
    return Survey(half, seen, problem, has_live_refs)


class Tried(NamedTuple):
    """How many refs in use were tried, and how many of their objects can be read."""

    refs: int
    readable: int


def try_refs(using: str, store: str, count: int) -> Tried:
    """Read the objects of at most `count` active refs of a store, spread over all of them; keep none of them."""
    spread = sql.query(using, "binding/spread", store=store, starts=["", *(new_ref() for _ in range(count - 1))])
    if not spread:
        return Tried(0, 0)
    outcomes = secret_stores[store].get_many([Address(Scope(*scope), ref) for ref, *scope in spread])
    return Tried(len(outcomes), sum(isinstance(outcome, Credentials) for outcome in outcomes))


def bind(using: str, store: str, *, by: str) -> None:
    """Bind this database and this store to each other, whatever each of them was bound to.

    Takes the lease of the binding's row first: raises `StoreUnavailable` if workers have it all the time, and what the
    store raises. If this is cut short, nothing is put or erased until it was done again.
    """
    opened = secret_stores[store]
    seen = opened.read_probe()
    lease = Lease(by, ADVANCING, size=1)
    attempts = _attempts("a worker is advancing the epoch of this store: try again in a minute")
    while (half := _rebound(using, store, seen, lease)) is None:
        next(attempts)
    shown = False
    try:
        opened.start_replace_probe(half.probe, guard=lease.check).result()
        shown = True
        with short_transaction(using):
            _rows(using, store).filter(environment_id=half.environment_id).confirm()
    finally:
        with short_transaction(using):
            _rows(using, store).release(lease, shown=shown)


def _rebound(using: str, store: str, seen: Sighting, lease: Lease) -> Known | None:
    """Write a new half, to be confirmed, and lease the row; return it, None if a worker has the lease."""
    lease.confirmed(time.monotonic())
    with short_transaction(using):
        refuse_closed(using)
        epochs = [half.epoch for half in (known(using, store), seen) if isinstance(half, Known | Probe)]
        bound = sql.query(
            using,
            "binding/bind",
            store=store,
            id=uuid.uuid4(),
            environment=settings.ENVIRONMENT,
            epoch=max(epochs, default=0) + 1,
            by=lease.worker,
            worker=lease.worker_id,
            token=lease.token,
            lease=lease.duration,
        )
        if not bound:
            return None
        record_act(using, EventKind.BOUND, detail=store)
        return known(using, store)

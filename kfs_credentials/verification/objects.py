"""Goes through what a store lists: objects that no ledger row accounts for, and those whose row is final.

A row comes before its object, so that what is listed first and looked for afterwards has its row. What is found is
looked for in the store again before it counts: it may have been erased in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from django.db import connections

from kfs_credentials import sql
from kfs_credentials.audit import record_act
from kfs_credentials.binding import advance
from kfs_credentials.conf import settings
from kfs_credentials.crypto import Scope
from kfs_credentials.errors import (
    InvalidRef,
    InvalidScope,
    KfsCredentialsError,
    SecretNotFound,
    SecretStoreError,
    StoreDenied,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.leases import new_worker_name
from kfs_credentials.models import EventKind
from kfs_credentials.pause import check_not_paused
from kfs_credentials.stores import SecretStore, secret_stores
from kfs_credentials.transactions import short_transaction
from kfs_credentials.verification.findings import Finding, FindingClass, Findings
from kfs_credentials.verification.reading import PAGE, Pages

if TYPE_CHECKING:
    import uuid

LISTED_OBJECTS = (FindingClass.OBJECT_UNKNOWN, FindingClass.OBJECT_UNREGISTERED, FindingClass.OBJECT_OF_FINAL)
AT_ONCE = 10_000
"""Objects without a row of our own that are looked for at once: that reads the whole ledger, and all sources."""
WHOLE_STORE = (StoreUnavailable, StoreDenied, StoreMisconfigured)
"""What is not about one object."""


class Unaccounted(NamedTuple):
    """Objects that the ledger does not know, by the SHA-256 of their refs."""

    unknown: dict[bytes, str]
    """Nobody knows them."""
    named: dict[bytes, str]
    """A source names their refs: the cleanup registers them."""


@dataclass
class Listing:
    """One look at all objects of all stores. `erase`: erase those that nobody knows, if older than ERASE_GRACE.

    Such an object's ref may be in a database that is not this one: whoever erases has to know that it is not. `worker`:
    in whose name the epoch of a store advances before that.
    """

    using: str
    classes: Collection[FindingClass] = LISTED_OBJECTS
    erase: bool = False
    worker: str = field(default_factory=new_worker_name)
    progress: Callable[[], None] = lambda: None
    findings: Findings = field(default_factory=Findings)
    seen: int = 0
    erased: int = 0
    not_listed: list[str] = field(default_factory=list)
    """The aliases of stores that cannot list."""

    def __post_init__(self) -> None:
        self.pages = Pages(self.using)

    def run(self) -> None:
        """Go through all of them.

        Raises what concerns a store as a whole, `BindingBroken` and `WorkersPaused` before something is erased, and a
        database error.
        """
        for alias in settings.STORES:
            store = secret_stores[alias]
            if store.can_list:
                self._go_through(store)
            else:
                self.not_listed.append(alias)

    def _go_through(self, store: SecretStore) -> None:
        names, unknown = store.list(), dict[bytes, str]()
        while page := {store.digest(name): name for name in islice(names, PAGE)}:
            found = self._patrolled(page)
            if late := [row for _, row in found if row is not None]:
                self._final(store, late)
            unknown |= {digest: page[digest] for digest, row in found if row is None}
            if len(unknown) >= AT_ONCE:
                self._unknown(store, unknown)
                unknown = {}
            self.seen += len(page)
            self.progress()
        if unknown:
            self._unknown(store, unknown)

    def _patrolled(self, digests: Collection[bytes]) -> list[tuple[bytes, uuid.UUID | None]]:
        """Return those of these objects that should not be there, with the id of their row if that is final."""
        found = self.pages.read(lambda _: sql.query(self.using, "cleanup/patrol", digests=list(digests)))
        return [(bytes(digest), row) for digest, row in found]

    def _unaccounted(self, names: dict[bytes, str]) -> Unaccounted:
        """Return those of these objects that the ledger does not know, whoever has reserved their refs."""
        found = self.pages.read(lambda _: sql.query(self.using, "verification/accounted", digests=list(names)))
        of_sources = {bytes(digest) for digest, is_named in found if is_named}
        of_ledger = {bytes(digest) for digest, is_named in found if not is_named}
        rest = {digest: name for digest, name in names.items() if digest not in of_ledger}
        return Unaccounted(
            {digest: name for digest, name in rest.items() if digest not in of_sources},
            {digest: name for digest, name in rest.items() if digest in of_sources},
        )

    def _final(self, store: SecretStore, rows: Sequence[uuid.UUID]) -> None:
        if FindingClass.OBJECT_OF_FINAL not in self.classes:
            return
        found = self.pages.read(lambda _: sql.query(self.using, "verification/named_objects", rows=list(rows)))
        for ref, tenant, space, source in found:
            try:
                store.get(Scope(tenant, space, source), ref)
            except (SecretNotFound, InvalidRef, InvalidScope):
                continue  # erased since it was listed
            except SecretStoreError as error:
                if isinstance(error, WHOLE_STORE):
                    raise
            self.findings.add(Finding(FindingClass.OBJECT_OF_FINAL, tenant, str(source), ref))

    def _unknown(self, store: SecretStore, names: dict[bytes, str]) -> None:
        found = self._unaccounted(names)
        for name in found.named.values():
            if self._age(store, name) is not GONE:
                self._found(FindingClass.OBJECT_UNREGISTERED, store, name, "a source names it")
        unknown = list(found.unknown.items())
        for start in range(0, len(unknown), settings.BATCH_SIZE):
            some = dict(unknown[start : start + settings.BATCH_SIZE])
            ages = {digest: age for digest, name in some.items() if (age := self._age(store, name)) is not GONE}
            old = [digest for digest, age in ages.items() if age is not None and age >= _grace()]
            erased = self._erase(store, {digest: some[digest] for digest in old}) if self.erase and old else set()
            for digest in ages.keys() - erased:
                self._found(FindingClass.OBJECT_UNKNOWN, store, some[digest], _why_not(ages[digest]))

    def _found(self, what: FindingClass, store: SecretStore, name: str, why_not: str) -> None:
        if what in self.classes:
            why = f" (not erased: {why_not})" if self.erase else ""
            self.findings.add(Finding(what, detail=f"{store.alias}: {name}{why}"))

    def _age(self, store: SecretStore, name: str) -> timedelta | None:
        """Return how old an object is, at least; None if that cannot be told, `GONE` if it is not there any more."""
        try:
            written_at = store.modified_at(name)
        except SecretNotFound:
            return GONE
        except SecretStoreError as error:
            if isinstance(error, WHOLE_STORE):
                raise
            return None
        if written_at is None:
            return None
        # By the clock that is behind: the store has one of its own, and neither knows it.
        return min(self._database_time(), datetime.now(UTC)) - written_at

    def _database_time(self) -> datetime:
        with connections[self.using].cursor() as cursor:
            cursor.execute("SELECT extract(epoch FROM statement_timestamp())")
            (seconds,) = cursor.fetchone()
        return datetime.fromtimestamp(float(seconds), UTC)

    def _erase(self, store: SecretStore, names: dict[bytes, str]) -> set[bytes]:
        """Erase these, after one more look at ledger and sources; return which. What the store refuses to erase stays.

        As the cleanup does it: not while the workers are paused, and after a new epoch has begun.
        """
        with short_transaction(self.using):
            check_not_paused(self.using)
        watch = advance(self.using, store.alias, worker=self.worker)
        still = {digest: names[digest] for digest, row in self._patrolled(names) if row is None}
        still = self._unaccounted(still).unknown if still else {}
        outcomes = store.delete_named(list(still.values()), look=watch.look) if still else []
        answers = dict(zip(still, outcomes, strict=True))
        erased = {digest for digest, answer in answers.items() if not isinstance(answer, KfsCredentialsError)}
        if erased:
            self.erased += len(erased)
            with short_transaction(self.using):
                detail = f"{len(erased)} objects without a ledger row, in store {store.alias}"
                record_act(self.using, EventKind.ERASED, detail=detail)
        # On its own: whatever it says, these are erased, and that has been written down.
        watch.end()
        return erased


GONE = timedelta.min
"""The age of what is not there."""


def _grace() -> timedelta:
    return timedelta(seconds=settings.ERASE_GRACE)


def _why_not(age: timedelta | None) -> str:
    if age is None:
        return "its age cannot be told"
    return "younger than ERASE_GRACE" if age < _grace() else "the store, the ledger or a source keeps it"

"""Goes through what a store lists: objects that no ledger row accounts for, and those whose row is final.

A row comes before its object, so that what is listed first and looked for afterwards has its row. What is found is
looked for in the store again before it counts: it may have been erased in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING

from django.db import connections

from kfs_credentials import sql
from kfs_credentials.audit import record_act
from kfs_credentials.binding import check_bound
from kfs_credentials.conf import settings
from kfs_credentials.crypto import Scope
from kfs_credentials.errors import (
    InvalidRef,
    InvalidScope,
    SecretNotFound,
    SecretStoreError,
    StoreDenied,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.models import EventKind
from kfs_credentials.stores import SecretStore, secret_stores
from kfs_credentials.transactions import short_transaction
from kfs_credentials.verification.findings import Finding, FindingClass, Findings
from kfs_credentials.verification.reading import PAGE, Pages

if TYPE_CHECKING:
    import uuid

LISTED_OBJECTS = (FindingClass.OBJECT_UNKNOWN, FindingClass.OBJECT_OF_FINAL)
AT_ONCE = 10_000
"""Objects without a row of our own that are looked for in the ledger at once: that reads the whole ledger."""
ERASED_AT_A_TIME = 100
WHOLE_STORE = (StoreUnavailable, StoreDenied, StoreMisconfigured)
"""What is not about one object."""


@dataclass
class Listing:
    """One look at all objects of all stores. `erase`: erase those without a ledger row that are older than ERASE_GRACE.

    Such an object's ref may be in a database that is not this one: whoever erases has to know that it is not.
    """

    using: str
    classes: Collection[FindingClass] = LISTED_OBJECTS
    erase: bool = False
    progress: Callable[[], None] = lambda: None
    findings: Findings = field(default_factory=Findings)
    seen: int = 0
    erased: int = 0
    not_listed: list[str] = field(default_factory=list)
    """The aliases of stores that cannot list."""

    def __post_init__(self) -> None:
        self.pages = Pages(self.using)

    def run(self) -> None:
        """Go through all of them. Raises what concerns a store as a whole, and a database error."""
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

    def _not_in_ledger(self, names: dict[bytes, str]) -> dict[bytes, str]:
        """Return those of these objects that the ledger does not know, whoever has reserved their refs."""
        known = self.pages.read(lambda _: sql.query(self.using, "cleanup/known", digests=list(names)))
        of_ledger = {bytes(digest) for _, digest in known}
        return {digest: name for digest, name in names.items() if digest not in of_ledger}

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
        unknown = list(self._not_in_ledger(names).items())
        for start in range(0, len(unknown), ERASED_AT_A_TIME):
            some = dict(unknown[start : start + ERASED_AT_A_TIME])
            ages = {digest: age for digest, name in some.items() if (age := self._age(store, name)) is not GONE}
            old = [digest for digest, age in ages.items() if age is not None and age >= _grace()]
            erased = self._erase(store, {digest: some[digest] for digest in old}) if self.erase and old else set()
            for digest in ages.keys() - erased if FindingClass.OBJECT_UNKNOWN in self.classes else ():
                detail = f"{store.alias}: {some[digest]}"
                if self.erase:
                    detail += f" ({_why_not(ages[digest])})"
                self.findings.add(Finding(FindingClass.OBJECT_UNKNOWN, detail=detail))

    def _age(self, store: SecretStore, name: str) -> timedelta | None:
        """Return how old an object is, at least; None if that cannot be told, `GONE` if it is not there any more."""
        try:
            written_at = store.modified_at(name)
        except SecretNotFound:
            return GONE
        if written_at is None:
            return None
        # By the clock that is behind: the store has one of its own, and neither knows it.
        return min(self._database_time(), datetime.now(UTC)) - written_at

    def _database_time(self) -> datetime:
        with connections[self.using].cursor() as cursor:
            cursor.execute("SELECT statement_timestamp()")
            (now,) = cursor.fetchone()
        assert isinstance(now, datetime)  # noqa: S101
        return now

    def _erase(self, store: SecretStore, names: dict[bytes, str]) -> set[bytes]:
        """Erase these, after one more look at the ledger; return which. What the store refuses to erase stays."""
        watch = check_bound(self.using, store.alias)
        still = {digest: names[digest] for digest, row in self._patrolled(names) if row is None}
        erased = set()
        for digest, name in self._not_in_ledger(still).items():
            try:
                store.delete_named(name)
            except SecretStoreError as error:
                if isinstance(error, WHOLE_STORE):
                    raise
                continue
            erased.add(digest)
        if erased:
            self.erased += len(erased)
            with short_transaction(self.using):
                watch.end()
                detail = f"{len(erased)} objects without a ledger row, in store {store.alias}"
                record_act(self.using, EventKind.ERASED, detail=detail)
        return erased


GONE = timedelta.min
"""The age of what is not there."""


def _grace() -> timedelta:
    return timedelta(seconds=settings.ERASE_GRACE)


def _why_not(age: timedelta | None) -> str:
    if age is None:
        return "not erased: its age cannot be told"
    return "not erased: younger than ERASE_GRACE" if age < _grace() else "not erased: the store or the ledger keeps it"

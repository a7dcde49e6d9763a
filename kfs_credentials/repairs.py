"""A source that names a ref which is not active in the ledger: what can be done about it, one source at a time.

An old writer that saves a whole row brings back an old ref; a database that was restored, or another program, leaves
refs that the ledger does not know. Such sources are rare, and their secrets are what is easiest to lose.
"""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

from django.db import DatabaseError
from django.db.models import Exists, OuterRef, Q
from psycopg.errors import LockNotAvailable

from kfs_credentials import sql
from kfs_credentials.audit import announce, current_actor
from kfs_credentials.binding import Watch, check_bound
from kfs_credentials.crypto import Plaintext, Scope, validate_ref
from kfs_credentials.errors import (
    BeingDeleted,
    CredentialsTooLarge,
    InvalidRef,
    InvalidScope,
    MutationFailed,
    SecretIntegrityError,
    SecretNotFound,
    SecretStoreError,
    ServiceError,
    StoreDenied,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.keys import hold, refuse_closed
from kfs_credentials.ledger import Moved, Operation, check_admission, note_claim, point, reserve
from kfs_credentials.models import Attention, EventKind, Purpose, RefError, RefState, SecretObject, Source
from kfs_credentials.models.ledger import LedgerQuerySet
from kfs_credentials.pause import check_not_paused
from kfs_credentials.redaction import short_ref
from kfs_credentials.stores import secret_stores
from kfs_credentials.transactions import Fault, fault, short_transaction

logger = logging.getLogger(__name__)


class Repair(enum.Enum):
    """What became of a source that names a ref which is not active."""

    FINE = "fine by now"
    LATER = "later"  # somebody holds the rows, or the ref is only just reserved
    REINSTATED = "brought back"  # a stale save: the older ref is in use again, the newer one waits for a person
    RESCUED = "rescued by a copy"
    REGISTERED = "registered"
    REFUSED = "refused by the database"  # a person has to see which constraint or trigger keeps the source as it is
    UNREADABLE = "unreadable"  # a person has to give it new credentials, or choose the newer ref
    MISPLACED = "of another source"  # a person has to correct the source


FINDINGS = (Repair.REFUSED, Repair.UNREADABLE, Repair.MISPLACED)


class Named(NamedTuple):
    """A ref that a source names, and what is known of both."""

    ref: str
    tenant: str
    space: uuid.UUID
    source: uuid.UUID
    version: int
    status: str
    state: str | None
    own: bool
    claimed: bool
    store: str

    @property
    def scope(self) -> Scope:
        """Whose secret it is; raises `InvalidScope`."""
        return Scope(self.tenant, self.space, self.source)


def _shown(ref: str) -> str:
    try:
        validate_ref(ref)
    except InvalidRef:
        return "(not a ref: it is not shown)"  # it may be anything, a secret too
    return short_ref(ref)


class Repairs:
    """What can be done, on one database. `refs` returns the ledger's rows that this is about."""

    def __init__(self, using: str, refs: Callable[[], LedgerQuerySet]) -> None:
        self.using = using
        self.refs = refs

    def repair(self, ref: str) -> Repair:
        """Look after a source that names a ref which is not active; return what became of it.

        A ref that was never claimed for erasure is active again, and a newer one of the same source that it displaced
        is kept until a person chooses. One that was claimed never is: the source gets a copy under a fresh ref, if the
        object can still be read. One that the ledger does not know is registered, if it can be read. Locks ledger rows
        and the source, NOWAIT. Raises what concerns the store as a whole, `KeyClosed`, and `WorkersPaused`.
        """
        check_not_paused(self.using)
        found = sql.query(self.using, "cleanup/named", ref=ref)
        if not found:
            self._date(ref)
            return Repair.FINE
        named = Named(ref, *found[0])
        if named.state == RefState.ACTIVE and named.own:
            return Repair.FINE
        if named.state in (RefState.STAGED, RefState.CANDIDATE) and named.own:
            return Repair.LATER  # reconciled, past recover_after
        # In a wrong store every ref would look as if it could not be read.
        watch = check_bound(self.using, named.store)
        try:
            if named.state is not None and not named.own:
                return self._report(named, Repair.MISPLACED)
            if named.state is None:
                return self._register(named)
            if named.state == RefState.RETIRED and not named.claimed:
                return self._reinstate(named)
            return self._rescue(named, watch)
        except (StoreUnavailable, StoreDenied, StoreMisconfigured):
            raise
        except MutationFailed:
            pass
        except (Moved, ServiceError, SecretStoreError):
            return Repair.LATER
        except DatabaseError as error:
            if isinstance(error.__cause__, LockNotAvailable):
                return Repair.LATER
            if fault(error) is not Fault.DATA:
                raise
        # Out here, where there is no context: the error quotes the row.
        try:
            return self._report(named, Repair.REFUSED)
        except DatabaseError as error:
            if not isinstance(error.__cause__, LockNotAvailable) and fault(error) is not Fault.DATA:
                raise
        return Repair.REFUSED

    def _date(self, ref: str) -> None:
        """Give a ref that was held, and that nobody names any more, its time for the erasure."""
        with short_transaction(self.using):
            rows = self.refs().filter(credential_ref=ref)
            list(rows.lock(skip_locked=True).values_list("pk"))
            if undated := list(rows.undated().values_list("pk", flat=True)):
                SecretObject.objects.using(self.using).mark([ref], None)
                self.refs().filter(pk__in=undated).retire()

    def _register(self, named: Named) -> Repair:
        try:
            validate_ref(named.ref)
            secret_stores["default"].get(named.scope, named.ref)
        except (InvalidRef, InvalidScope, SecretNotFound, SecretIntegrityError):
            return self._report(named, Repair.UNREADABLE)
        with short_transaction(self.using):
            displaced = self._displaced(named)
            list(self.refs().filter(pk__in=displaced).lock(nowait=True).values_list("pk"))
            now = sql.query(self.using, "services/lock_source", tenant=named.tenant, source=named.source)
            if not now or now[0][2] != named.ref or not self._are_all(displaced, named):
                return Repair.LATER
            adopted = sql.query(self.using, "cleanup/adopt", ref=named.ref, store="default", actor=current_actor())
            if not adopted:
                return Repair.LATER
            announce(self.using, EventKind.ADOPTED, [named.ref])
            self.keep(displaced)
        return Repair.REGISTERED

    def _reinstate(self, named: Named) -> Repair:
        with short_transaction(self.using):
            displaced = self._displaced(named)
            ids = [*displaced, *self.refs().filter(credential_ref=named.ref).values_list("pk", flat=True)]
            rows = self.refs().filter(pk__in=ids)
            list(rows.lock(nowait=True).values_list("pk"))
            now = sql.query(self.using, "services/lock_source", tenant=named.tenant, source=named.source)
            if not now or now[0][2] != named.ref or not self._are_all(displaced, named):
                return Repair.LATER
            back = rows.filter(credential_ref=named.ref, state=RefState.RETIRED).never_claimed()
            if not (back_again := list(back.values_list("pk", flat=True))):
                return Repair.LATER
            rows.filter(pk__in=back_again).activate(now[0][1], event=EventKind.REINSTATED)
            SecretObject.objects.using(self.using).mark([named.ref], None)
            self.keep(displaced)
        logger.warning(
            "source %s names an older ref again (a save of an old copy, most likely): it is in use again%s",
            named.source,
            "; the newer one is kept until a person chooses" if displaced else "",
        )
        return Repair.REINSTATED

    def _rescue(self, named: Named, watch: Watch) -> Repair:
        store = secret_stores[named.store]
        try:
            credentials = store.get(named.scope, named.ref)
        except (InvalidRef, InvalidScope, SecretNotFound, SecretIntegrityError):
            return self._report(named, Repair.UNREADABLE)
        if named.status == Source.DELETING:
            raise BeingDeleted
        check_admission(self.using, named.space, named.source)
        copy = Operation(Purpose.ROTATE, named.tenant, named.space, named.source)
        plaintext = Plaintext.of(credentials)
        with short_transaction(self.using):
            hold(self.using)
            refuse_closed(self.using)
            reserve(self.using, copy, store=store.alias, size=plaintext.size)
        try:
            receipt = store.put(named.scope, copy.ref, plaintext, look=watch.look)
        except CredentialsTooLarge:
            return self._report(named, Repair.UNREADABLE)
        with short_transaction(self.using):
            hold(self.using)  # before any row: `point` would do so after these
            displaced = self._displaced(named)
            list(self.refs().filter(pk__in=displaced).lock(nowait=True).values_list("pk"))
            point(
                self.using,
                tenant=named.tenant,
                source=named.source,
                operation=copy,
                ref=copy.ref,
                from_ref=named.ref,
                scrub=False,
                receipt=receipt,
                event=EventKind.RESCUED,
            )
            if not self._are_all(displaced, named, copy.ref):
                raise Moved
            self.keep(displaced)
            watch.end()
        logger.warning("source %s names a ref that is being erased: its secret was copied to a new one", named.source)
        return Repair.RESCUED

    def _displaced(self, named: Named, copy: str | None = None) -> list[uuid.UUID]:
        """Return the rows of the same source that are active, and that it does not name. `copy`: what it names now."""
        own = self.refs().filter(
            tenant_id=named.tenant, knowledge_space_id=named.space, source_id=named.source, state=RefState.ACTIVE
        )
        return list(own.exclude(credential_ref__in=[named.ref, copy]).values_list("pk", flat=True))

    def _are_all(self, displaced: Sequence[uuid.UUID], named: Named, copy: str | None = None) -> bool:
        """Return whether these, which are locked, are all that is displaced; ask it once the source is locked.

        Another rotation may have come before that, and another old writer: its secret would be the newest.
        """
        return set(self._displaced(named, copy)) <= set(displaced)

    def keep(self, displaced: Sequence[uuid.UUID]) -> int:
        """Keep these rows, which the caller has locked, until a person chooses; return how many were in use."""
        rows = self.refs().filter(pk__in=displaced, state=RefState.ACTIVE)
        refs = dict(rows.values_list("pk", "credential_ref"))
        SecretObject.objects.using(self.using).mark(refs.values(), Attention.DISPLACED)
        return self.refs().filter(pk__in=refs).keep(RefError.DISPLACED)

    def _report(self, named: Named, what: Repair) -> Repair:
        if named.state in (RefState.RETIRED, RefState.DELETED):
            with short_transaction(self.using):
                row = self.refs().filter(credential_ref=named.ref)
                list(row.lock(nowait=True).values_list("pk"))
                # An erased one too: it is not over while it is named, and is erased again once it is not.
                over = row.filter(state__in=(RefState.RETIRED, RefState.DELETED))
                note_claim(self.using, over.tombstones())
                waiting = SecretObject.objects.filter(pk=OuterRef("credential_ref"))
                waiting = waiting.filter(Q(attention__isnull=False) | Q(abandoned_at__isnull=False))
                if over.exclude(Exists(waiting), next_delete_at__isnull=True).keep(RefError.UNREADABLE):
                    SecretObject.objects.using(self.using).mark([named.ref], Attention.UNREADABLE)
        logger.error(
            "source %s of tenant %s names ref %s, which is %s: rotate its credentials, or choose the newer ref in the "
            "admin if there is one",
            *(named.source, named.tenant, _shown(named.ref), what.value),
        )
        return what

"""What an application calls: create, resolve, rotate, revoke, delete.

All arguments are keywords, and the tenant is part of every question: another tenant's id is answered like one that
nobody has. `using` is an alias of DATABASES (default: where the routers send writes of Source).

`create_source` and `rotate_credentials` commit a reservation before they put a byte into the store, and so refuse
to run inside a transaction. The others join the one that is open, if there is one.

Errors are those of `kfs_credentials.errors`; each has a `code` that may be shown to a client. Where a commit was not
answered, what happened is read, and nothing is undone. A reservation that an error left behind is taken back by
`run_secret_cleanup`, with its object.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

from django.db import DatabaseError, InterfaceError, connections, router
from django.db.models import ProtectedError, RestrictedError
from django.db.transaction import TransactionManagementError
from psycopg.errors import LockNotAvailable

from kfs_credentials import keys, sql
from kfs_credentials.arguments import (
    Id,
    Validator,
    check_texts,
    checked_credentials,
    checked_operation_id,
    json_text,
    own_id,
    taken_apart,
)
from kfs_credentials.batch import Legacy
from kfs_credentials.binding import Watch, check_bound, ensure_bound
from kfs_credentials.conf import NAME, key_ring, settings
from kfs_credentials.crypto import Credentials, Plaintext, Scope, sensitive
from kfs_credentials.errors import (
    BeingDeleted,
    BindingBroken,
    BindingProblem,
    ImproperlyPrepared,
    InvalidMetadata,
    KeyClosed,
    KfsCredentialsError,
    MutationFailed,
    NoCredentials,
    SecretIntegrityError,
    SecretNotFound,
    SecretStoreError,
    SourceBusy,
    SourceExists,
    SourceNotFound,
    SpaceNotFound,
    VersionConflict,
)
from kfs_credentials.ledger import (
    Moved,
    Operation,
    check_admission,
    held,
    ledger,
    let_go,
    lock_reserved,
    lock_space,
    note_receipt,
    operation_uuid,
    point,
    reserve,
)
from kfs_credentials.models import KnowledgeSpace, Purpose, RefState, Source, SourceCredentialBackfill
from kfs_credentials.stores import Receipt, secret_stores
from kfs_credentials.transactions import (
    TRIES,
    Fault,
    describe,
    fault,
    joined_transaction,
    pause_before_try,
    refuse_transaction,
    short_transaction,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


@sensitive
def create_source(
    *,
    tenant: str,
    space_id: Id,
    type: str,  # noqa: A002 - the column's name
    name: str,
    uri: str,
    credentials: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    permission_scope: Any = None,
    status: str = "active",
    source_id: Id | None = None,
    operation_id: str | None = None,
    validate: Validator | None = None,
    using: str | None = None,
) -> Source:
    """Create a source whose credentials are in the secret store from the first moment on; return it.

    `credentials`: a JSON object. It may also be the member `credentials` of `metadata`, as knowledge-fs has it: it is
    taken out there. Every other member of `metadata` is stored in the database as it is, in clear. With neither, the
    source has no credentials. `permission_scope`: any JSON value (default: `{}`). `source_id`: default: a new one.
    `operation_id`: an id of the caller's own; a call that is repeated with the same one makes no second source, and
    returns the first one's (without credentials: unless `source_id` is given too).

    Raises `InvalidCredentials`, `CredentialsTooLarge`, `InvalidMetadata`, `InvalidOperation`, `CredentialsRejected` (by
    `validate`) before anything is written; `SpaceNotFound`, `BeingDeleted`, `SourceExists`, `OperationOver`,
    `SourceBusy`, `MutationFailed`; what the store raises; `ImproperlyPrepared` inside a transaction; `KeyClosed` if
    this process has an old key ring; a database error if the database is out of reach.

    Locks the space FOR KEY SHARE for two short transactions, and the ref's ledger row for the second; both NOWAIT.
    """
    using = _writer(using)
    refuse_transaction(using)
    metadata, credentials = taken_apart(metadata, credentials)
    operation = checked_operation_id(operation_id)
    space = own_id(tenant, space_id, SpaceNotFound())
    made_id = operation_uuid("source", tenant, operation)
    source = made_id if source_id is None else own_id(tenant, source_id, InvalidMetadata("source_id must be a UUID"))
    check_texts(type=type, status=status, name=name, uri=uri)
    values = {
        "space": space,
        "type": type,
        "status": status,
        "name": name,
        "uri": uri,
        "metadata": json_text(metadata, "metadata"),
        "permission_scope": json_text({} if permission_scope is None else permission_scope, "permission_scope"),
    }
    new = put = None
    if credentials is not None:
        new = Operation(Purpose.CREATE, tenant, space, source, id=operation)
        put = _reserve_and_put(using, new, checked_credentials(credentials, validate))
    insertion = _Insertion(using, tenant, source, values, new, is_made_id=source == made_id)
    if put is None:
        _repeated(using, partial(insertion.insert, None))
    else:
        _activated(using, put, insertion.insert)
    return _read(using, source)


@sensitive
def resolve_credentials(*, tenant: str, source_id: Id, using: str | None = None) -> Credentials:
    """Return the credentials of a source: from the store if it has a ref, else in clear while LEGACY_READS is True.

    Raises `SourceNotFound`; `NoCredentials` if there are none, or none that may be read; `InvalidCredentials` if those
    in clear are nested too deep; `SecretNotFound`, `SecretIntegrityError`, `SecretStoreError` itself if the store does
    not give out this one secret; `StoreUnavailable`, `StoreDenied`, `StoreMisconfigured`, which it is too if the secret
    cannot be read since this is not the store that it was put into (`BindingBroken`). Never returns None, part of a
    secret, or ciphertext. Locks nothing; works inside a transaction, which then stays open while the store answers.
    """
    using = _writer(using)
    source = own_id(tenant, source_id, SourceNotFound())
    tried: str | None = None
    while True:
        found = _repeated(using, lambda: sql.query(using, "services/resolve", tenant=tenant, source=source))
        if not found:
            raise SourceNotFound
        ((space, ref, alias, key_id, shape, text),) = found
        if ref is None:
            return _legacy(shape, text)
        try:
            return secret_stores[alias or "default"].get(Scope(tenant, space, source), ref)
        except KfsCredentialsError as error:
            problem = error
        if not isinstance(problem, SecretNotFound) or ref == tried:
            problem = _explained(using, alias or "default", problem)
            logger.warning(
                "credentials of source %s (tenant %s, ref %s, key %s) cannot be read: %s",
                *(source, tenant, ref, key_id, problem),
            )
            raise problem
        # It may have been rotated, and erased, since the source was read: look again, once.
        tried = ref


def _explained(using: str, store: str, problem: KfsCredentialsError) -> KfsCredentialsError:
    """Return why a secret cannot be read: that this is not the store which it was put into, if that is why."""
    if isinstance(problem, SecretNotFound | SecretIntegrityError):
        try:
            # By a savepoint: what goes wrong here must not spoil the caller's transaction.
            with joined_transaction(using):
                check_bound(using, store)
        except BindingBroken as broken:
            # Of a database that was never bound nobody knows whether this is its store.
            return problem if broken.problem is BindingProblem.UNBOUND else broken
        except (SecretStoreError, DatabaseError, InterfaceError):
            pass  # what is known is enough
    return problem


@sensitive
def rotate_credentials(
    *,
    tenant: str,
    source_id: Id,
    credentials: Mapping[str, Any],
    expected_version: int | None = None,
    operation_id: str | None = None,
    validate: Validator | None = None,
    using: str | None = None,
) -> Source:
    """Give a source new credentials, under a new ref; return it. The old ref can be read for ERASE_GRACE.

    Works on a source without a ref too: what lies in clear is removed in the same commit. `expected_version`: the
    version that the caller has read; with None, whatever version it has by then. `operation_id`: as for
    `create_source`.

    Raises `SourceNotFound`, `BeingDeleted`, `VersionConflict`, `InvalidCredentials`, `CredentialsTooLarge`,
    `CredentialsRejected` (by `validate`), `InvalidOperation` before anything is written; the first
    three, `OperationOver`, `SourceBusy` and `MutationFailed` later too; what the store raises; `ImproperlyPrepared`
    inside a transaction; `KeyClosed` if this process has an old key ring; a database error if the database is out of
    reach.

    Locks the ledger rows of both refs, then the source, all NOWAIT, for one short transaction.
    """
    using = _writer(using)
    refuse_transaction(using)
    operation = checked_operation_id(operation_id)
    source = own_id(tenant, source_id, SourceNotFound())
    found = _repeated(using, lambda: sql.query(using, "services/find", tenant=tenant, source=source))
    if not found:
        raise SourceNotFound
    ((space, version, _, status),) = found
    new = Operation(Purpose.ROTATE, tenant, space, source, id=operation)
    active = ledger(using).filter(pk=new.row_id, state=RefState.ACTIVE)
    done = operation_id is not None and _repeated(using, active.exists)
    if not done and status == Source.DELETING:
        raise BeingDeleted
    if not done and expected_version not in (None, version):
        raise VersionConflict(expected_version, version)
    put = _reserve_and_put(using, new, checked_credentials(credentials, validate))

    def activate(put: _Put) -> None:
        with short_transaction(using):
            point(
                using,
                tenant=tenant,
                source=source,
                operation=new,
                ref=put.ref,
                expected_version=expected_version,
                receipt=put.receipt,
            )
            put.watch.end()

    _activated(using, put, activate)
    return _read(using, source)


def revoke_credentials(
    *, tenant: str, source_id: Id, expected_version: int | None = None, using: str | None = None
) -> Source:
    """Take the credentials away from a source, the ref and what lies in clear, and let them be erased; return it.

    Doing it again changes nothing. Raises `SourceNotFound`, `BeingDeleted`, `VersionConflict`, `SourceBusy`,
    `MutationFailed`; a database error if the database is out of reach.

    Locks the ledger row, then the source, NOWAIT. Joins an open transaction, by a savepoint.
    """
    using = _writer(using)
    source = own_id(tenant, source_id, SourceNotFound())

    def revoke() -> None:
        with joined_transaction(using):
            point(using, tenant=tenant, source=source, operation=None, ref=None, expected_version=expected_version)

    _repeated(using, revoke)
    return _read(using, source)


def delete_source(*, tenant: str, source_id: Id, expected_version: int | None = None, using: str | None = None) -> None:
    """Delete a source, and let all its secrets be erased.

    Raises `SourceNotFound`, `BeingDeleted`, `VersionConflict`, `SourceBusy`, `MutationFailed` (a row of the project
    refers to it); a database error if the database is out of reach.

    Locks its ledger rows, its job and the source, NOWAIT. Joins an open transaction, by a savepoint.
    """
    using = _writer(using)
    source = own_id(tenant, source_id, SourceNotFound())

    deleted = False

    def delete() -> None:
        nonlocal deleted
        with joined_transaction(using):
            found = sql.query(using, "services/find", tenant=tenant, source=source)
            if not found and deleted:
                return  # the commit was not answered, and took place
            if not found:
                raise SourceNotFound
            space = found[0][0]
            own = held(using).filter(tenant_id=tenant, knowledge_space_id=space, source_id=source)
            refs = list(own.lock(nowait=True).values_list("credential_ref", flat=True))
            jobs = SourceCredentialBackfill.objects.using(using).filter(source_id=source)
            list(jobs.select_for_update(nowait=True).values_list("pk"))
            now = sql.query(using, "services/lock_source", tenant=tenant, source=source)
            if not now:
                raise SourceNotFound
            _, version, _, status, _ = now[0]
            if status == Source.DELETING:
                raise BeingDeleted
            check_admission(using, space, source)
            if expected_version is not None and version != expected_version:
                raise VersionConflict(expected_version, version)
            let_go(using, refs)
            sources = Source.objects.using(using).filter(pk=source)
            sources.delete()
            if sources.exists():
                raise MutationFailed(LEFT_ALONE)
            deleted = True

    _repeated(using, delete)


def delete_knowledge_space(*, tenant: str, space_id: Id, using: str | None = None) -> None:
    """Delete a knowledge space with its sources, and let all their secrets be erased.

    What another worker is at work on at that moment is retired by the cleanup's sweep. Raises `SpaceNotFound`,
    `BeingDeleted`, `SourceBusy`, `MutationFailed` (a row of the project refers to it); a database error if the
    database is out of reach.

    Locks the space FOR UPDATE, its jobs and its sources NOWAIT, its ledger rows SKIP LOCKED. Joins an open
    transaction, by a savepoint. Takes as long as PostgreSQL takes to delete the rows.
    """
    using = _writer(using)
    space = own_id(tenant, space_id, SpaceNotFound())

    deleted = False

    def delete() -> None:
        nonlocal deleted
        with joined_transaction(using):
            # The space first: from here on no create can finish, and all that were finished before can be seen.
            spaces = KnowledgeSpace.objects.using(using).filter(pk=space, tenant_id=tenant)
            found = bool(spaces.select_for_update(nowait=True).values_list("pk"))
            if not found and deleted:
                return  # the commit was not answered, and took place
            if not found:
                raise SpaceNotFound
            check_admission(using, space)
            own = held(using).filter(tenant_id=tenant, knowledge_space_id=space)
            refs = list(own.lock(skip_locked=True).values_list("credential_ref", flat=True))
            for rows in (SourceCredentialBackfill.objects, Source.objects):
                of_space = rows.using(using).filter(knowledge_space_id=space).order_by("pk")
                list(of_space.select_for_update(nowait=True).values_list("pk"))
            let_go(using, refs)
            # By the ORM, sources first: what the project keeps beside them has rules of its own.
            sources = Source.objects.using(using).filter(knowledge_space_id=space)
            sources.delete()
            spaces.delete()
            if sources.exists() or spaces.exists():
                raise MutationFailed(LEFT_ALONE)
            deleted = True

    _repeated(using, delete)


LEFT_ALONE = "a trigger of the database left the row as it was"


def _writer(using: str | None) -> str:
    return using or router.db_for_write(Source)


class _Put(NamedTuple):
    """What the store has for an operation. `receipt`: None if nothing was put, as the ref was active already."""

    scope: Scope
    ref: str
    receipt: Receipt | None
    watch: Watch
    """To be ended in the transaction that activates the ref."""


@sensitive
def _reserve_and_put(using: str, operation: Operation, plaintext: Plaintext) -> _Put:
    """Reserve, commit, put. Nothing is put for what is active already, and nothing is reserved for a wrong store."""
    scope = operation.scope
    store = secret_stores["default"]
    watch = _repeated(using, lambda: ensure_bound(using, store.alias))

    def commit() -> tuple[str, str]:
        with short_transaction(using):
            keys.hold(using)
            if operation.purpose is Purpose.CREATE:
                lock_space(using, operation.tenant, operation.space)
            check_admission(using, operation.space, operation.source)
            reserved = reserve(using, operation, store=store.alias, size=plaintext.size)
            if reserved.state != RefState.ACTIVE:
                keys.refuse_closed(using)
            return reserved

    ref, state = _repeated(using, commit)
    receipt = None if state == RefState.ACTIVE else store.put(scope, ref, plaintext, look=watch.look)
    is_foreign = receipt is not None and receipt.key_id != key_ring().primary.id
    put = _Put(scope, ref, receipt, watch)
    if receipt is not None and is_foreign and receipt.key_id in _repeated(using, lambda: keys.closed(using)):
        return _sealed_anew(using, put)
    return put


def _sealed_anew(using: str, put: _Put) -> _Put:
    """Seal anew what an earlier call with the same id, by a process with an old key ring, has put there."""
    receipt = secret_stores["default"].replace(put.scope, put.ref, look=put.watch.look)
    _repeated(using, partial(_note, using, put.ref, receipt))
    return put._replace(receipt=receipt)


@sensitive
def _activated(using: str, put: _Put, activate: Callable[[_Put], None]) -> None:
    """Do `activate` with what was put; again where its key, another than the first, was closed since that was asked."""
    try:
        _repeated(using, partial(activate, put))
    except KeyClosed as error:
        if error.key_id == key_ring().primary.id:
            raise
    else:
        return
    _repeated(using, partial(activate, _sealed_anew(using, put)))


def _note(using: str, ref: str, receipt: Receipt) -> None:
    """Note that an object is under another key from here on, whoever activates it."""
    with short_transaction(using):
        list(ledger(using).filter(credential_ref=ref).lock(nowait=True).values_list("pk"))
        note_receipt(using, ref, receipt)


@dataclass
class _Insertion:
    """The transaction that makes a source, and activates its ref if it has one."""

    using: str
    tenant: str
    source: uuid.UUID
    values: Mapping[str, Any]
    operation: Operation | None
    is_made_id: bool
    """Whether the source's id is made of the operation's."""
    inserted_at: datetime | None = None
    """What an earlier try inserted, whose commit was not answered."""

    def insert(self, put: _Put | None) -> None:
        """Do it; again, if need be: what is there already is told apart from another source of the same id."""
        with short_transaction(self.using):
            receipt = None if put is None else put.receipt
            if receipt is not None:
                keys.hold(self.using)
            if self._is_done(put):
                return
            if receipt is not None:
                keys.refuse_closed(self.using, receipt.key_id)
            lock_space(self.using, self.tenant, self.values["space"])
            ref = None if put is None else put.ref
            made = sql.query(self.using, "services/create_source", id=self.source, ref=ref, **self.values)
            version = 1
            if made:
                ((self.inserted_at,),) = made
            else:
                version = self._version_of_the_same(ref)
            if put is not None:
                ledger(self.using).filter(credential_ref=ref).activate(version)
                if receipt is not None:
                    note_receipt(self.using, put.ref, receipt)
                put.watch.end()

    def _is_done(self, put: _Put | None) -> bool:
        """Return whether the commit of an earlier call took place. Locks the ledger row."""
        if self.operation is None or put is None:
            return False
        return lock_reserved(self.using, self.operation, put.ref) == RefState.ACTIVE

    def _version_of_the_same(self, ref: str | None) -> int:
        """Return the version of the source that was not inserted, if it is this operation's; else raise."""
        there = Source.objects.using(self.using).filter(pk=self.source).first()
        if there is None:
            raise MutationFailed("a trigger of the database kept the source from being made")
        if ref is not None:
            is_same = there.credential_ref == ref
        else:
            is_same = self.is_made_id or there.created_at == self.inserted_at
        if not is_same or there.knowledge_space_id != self.values["space"]:
            raise SourceExists(f"there is a source {self.source} already: give another id, or rotate its credentials")
        return there.version


def _read(using: str, source: uuid.UUID) -> Source:
    found = _repeated(using, Source.objects.using(using).filter(pk=source).first)
    if found is None:
        raise SourceNotFound  # deleted since
    return found


@sensitive
def _legacy(shape: str | None, text: str | None) -> Credentials:
    """Return credentials that lie in clear, or raise `NoCredentials`."""
    if shape in (None, "null"):
        raise NoCredentials("the source has no credentials")
    if text is None:
        raise NoCredentials(
            f"the credentials of this source are a JSON {shape}, not an object: nothing here reads or moves them. "
            "`manage.py settle_unsupported_credentials` lists such sources."
        )
    if not settings.LEGACY_READS:
        raise NoCredentials(
            f"the credentials of this source lie in clear, and {NAME}['LEGACY_READS'] is False: "
            "`manage.py run_credential_backfill` moves them."
        )
    return Credentials(Legacy(text).plaintext())


@sensitive
def _repeated(using: str, work: Callable[[], T]) -> T:
    """Do `work`, whole transactions of it again where the database was busy, or where a commit was not answered.

    So `work` looks at what an earlier call of it may have committed. Inside a transaction of the caller's, the
    savepoint is what is repeated; a connection that is lost takes that transaction along.
    """
    connection = connections[using]
    joined = connection.in_atomic_block or not connection.get_autocommit()
    until, failures = time.monotonic() + settings.LOCK_TIMEOUT, 0
    while True:
        try:
            return work()
        except Moved:
            meaning, what, busy, lost = Fault.PASSING, "", True, None
        except TransactionManagementError:
            raise  # the caller's transaction failed before
        except (ProtectedError, RestrictedError):
            meaning, what, busy, lost = Fault.DATA, "rows that are protected refer to it", False, None
        except (DatabaseError, InterfaceError) as error:
            meaning, what = fault(error), describe(error)
            busy, lost = isinstance(error.__cause__, LockNotAvailable), error
        failures += 1
        if meaning is Fault.DATA:
            raise MutationFailed(f"the database refused the change ({what}): a constraint, a trigger or a foreign key")
        if meaning is Fault.REFUSED:
            raise ImproperlyPrepared(
                f"the database refused a statement ({what}). Check that `manage.py migrate` has run and that this role "
                "may read and write the tables."
            )
        if busy and time.monotonic() >= until:
            raise SourceBusy(
                f"somebody else has held the source or its space for {settings.LOCK_TIMEOUT:g} s, or was closing a key "
                f"({NAME}['LOCK_TIMEOUT']): try again"
            )
        if lost is not None and not busy:
            if joined or failures >= TRIES:
                raise lost
            connection.close_if_unusable_or_obsolete()
        pause = pause_before_try(failures)
        time.sleep(min(pause, max(0.0, until - time.monotonic())) if busy else pause)

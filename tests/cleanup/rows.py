"""Ledger rows in each state, with or without an object, and what becomes of them behind the package's back."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from django.db import connection
from django.db.models.functions import Now

from kfs_credentials import services
from kfs_credentials.crypto import Scope, new_ref
from kfs_credentials.leases import seconds_from_now
from kfs_credentials.models import KnowledgeSpace, RefState, SecretObject, Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores import SecretStore
from tests.factories import SourceFactory, SpaceFactory

SECRET = {"token": "made-up"}
HOUR = 3600.0
PAST, FUTURE = seconds_from_now(-1), seconds_from_now(HOUR)

LEASED: Mapping[str, Any] = {
    "worker_id": "another#1",
    "lease_token": uuid.UUID(int=7),
    "heartbeat_at": Now(),
    "deleted_at": None,
}

# The columns of a row in each situation that a ledger row can be in.
IN_STATE: Mapping[str, Mapping[str, Any]] = {
    "staged": {"state": RefState.STAGED},
    "staged, unused": {"state": RefState.STAGED, "recover_after": PAST},
    "candidate": {"state": RefState.CANDIDATE, "purpose": "backfill"},
    "candidate, unused": {"state": RefState.CANDIDATE, "purpose": "backfill", "recover_after": PAST},
    "active": {"state": RefState.ACTIVE, "source_version": 1},
    "retired": {"state": RefState.RETIRED, "next_delete_at": FUTURE},
    "retired, due": {"state": RefState.RETIRED, "next_delete_at": PAST},
    "deleting": {"state": RefState.DELETING, "next_delete_at": PAST, "lease_expires_at": FUTURE, **LEASED},
    "deleting, expired": {"state": RefState.DELETING, "next_delete_at": PAST, "lease_expires_at": PAST, **LEASED},
    "deleted": {"state": RefState.DELETED, "deleted_at": Now(), "next_delete_at": FUTURE},
    "deleted, due": {"state": RefState.DELETED, "deleted_at": seconds_from_now(-HOUR), "next_delete_at": PAST},
    "final": {"state": RefState.DELETED, "deleted_at": Now(), "next_delete_at": None},
}


def make_source(space: KnowledgeSpace | None = None, secret: Mapping[str, Any] = SECRET) -> Source:
    """Create a source with a secret, as an application does."""
    space = space or SpaceFactory.create()
    return services.create_source(
        tenant=space.tenant_id, space_id=space.pk, type="web", name="n", uri="u", credentials=secret
    )


def ref_of(source: Source) -> str:
    """Return the ref that a source names now."""
    ref = Source.objects.values_list("credential_ref", flat=True).get(pk=source.pk)
    assert ref is not None
    return ref


def scope_of(source: Source) -> Scope:
    """Return whose secret a source's is."""
    return Scope(source.knowledge_space.tenant_id, source.knowledge_space_id, source.pk)


def scope_of_row(row: LedgerRow) -> Scope:
    """Return whose secret a ledger row is about."""
    return Scope(row.tenant_id, row.knowledge_space_id, row.source_id)


def add_ref(source: Source | None = None, situation: str = "retired, due", **columns: Any) -> LedgerRow:
    """Insert a ledger row of this source, or of one that nobody has; what our own table knows of it is inserted too.

    `situation`: one of `IN_STATE`. `columns`: others than this gives.
    """
    ids: dict[str, Any] = {"tenant_id": "tenant-a", "knowledge_space_id": uuid.uuid4(), "source_id": uuid.uuid4()}
    if source is not None:
        ids = {
            "tenant_id": source.knowledge_space.tenant_id,
            "knowledge_space_id": source.knowledge_space_id,
            "source_id": source.pk,
        }
    values = {
        **ids,
        "credential_ref": new_ref(),
        "operation_id": str(uuid.uuid4()),
        "purpose": "rotate",
        "recover_after": FUTURE,
        "delete_attempts": 0,
        "row_version": 1,
        "created_at": Now(),
        "updated_at": Now(),
        **IN_STATE[situation],
        **columns,
    }
    row = LedgerRow.objects.create(**values)
    claimed = PAST if values["state"] in (RefState.DELETING, RefState.DELETED) else None
    SecretObject.objects.create(
        credential_ref=row.credential_ref,
        store="default",
        created_at=Now(),
        updated_at=Now(),
        first_claimed_at=claimed,
        first_erased_at=values.get("deleted_at"),
    )
    return reread(row)


def add_secret(
    store: SecretStore, source: Source | None = None, situation: str = "retired, due", **columns: Any
) -> LedgerRow:
    """Insert a ledger row as `add_ref` does, and put its object."""
    row = add_ref(source, situation, **columns)
    put_late(store, row)
    return row


def put_late(store: SecretStore, row: LedgerRow, secret: Mapping[str, Any] = SECRET) -> None:
    """Put an object at the row's address, whatever its state: a writer that was frozen does."""
    store.put(scope_of_row(row), row.credential_ref, secret)


def bare_source(**columns: Any) -> Source:
    """Create a source without credentials."""
    return SourceFactory.create(bare=True, **columns)


def reread(row: LedgerRow) -> LedgerRow:
    """Return the row as it is now."""
    return LedgerRow.objects.get(pk=row.pk)


def of_ref(ref: str) -> LedgerRow:
    """Return the row of a ref."""
    return LedgerRow.objects.get(credential_ref=ref)


def known(ref: str) -> SecretObject:
    """Return what our own table knows of a ref."""
    return SecretObject.objects.get(pk=ref)


def in_database(statement: str, *parameters: Any) -> None:
    """Run a statement as somebody else would, past the package."""
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)


def name_ref(source: Source, ref: str | None) -> None:
    """Let the source name this ref, as an old writer does that saves a whole row."""
    in_database("UPDATE sources SET credential_ref = %s WHERE id = %s", ref, source.pk)


def make_due(*refs: str) -> None:
    """Move rows in time: what they wait for is over."""
    rows = LedgerRow.objects.filter(credential_ref__in=refs) if refs else LedgerRow.objects.all()
    rows.filter(next_delete_at__isnull=False).update(next_delete_at=PAST)


def pass_horizon(*refs: str) -> None:
    """Move rows in time: the horizon since their first erasure is over."""
    make_due(*refs)
    objects = SecretObject.objects.filter(pk__in=refs) if refs else SecretObject.objects.all()
    objects.filter(first_erased_at__isnull=False).update(first_erased_at=seconds_from_now(-24 * HOUR))


def is_due(row: LedgerRow) -> bool:
    """Whether its next erasure is due by the database's clock."""
    return LedgerRow.objects.filter(pk=row.pk).due().exists()


def due_between(row: LedgerRow, least: float, most: float) -> bool:
    """Whether its next erasure is due so many seconds after its last move."""
    row = reread(row)
    assert row.next_delete_at is not None
    return least <= (row.next_delete_at - row.updated_at).total_seconds() <= most

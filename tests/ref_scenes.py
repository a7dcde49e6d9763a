"""Refs that an operator has to decide about, made as they come about, with their objects in a real store."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import connection
from django.db.models.functions import Now

from kfs_credentials import services
from kfs_credentials.cleanup import Cleanup
from kfs_credentials.crypto import Scope
from kfs_credentials.leases import seconds_from_now
from kfs_credentials.models import Attention, RefError, RefState, SecretObject, Source, SourceSecretLifecycleRef
from kfs_credentials.models.ledger import LedgerQuerySet
from kfs_credentials.ref_operations import RefResult, abandon, discard, erase_again, restore
from kfs_credentials.repairs import Repair
from kfs_credentials.stores import secret_stores
from tests.factories import SpaceFactory

TENANT = "tenant-a"
OLD, NEW = {"access_token": "made-up-old"}, {"access_token": "made-up-new"}
A_DAY = "now() + interval '1 day'"


Decide = Callable[..., RefResult]
DECISIONS: dict[str, Decide] = {
    "erase_again": erase_again,
    "abandon": lambda using, rows: abandon(using, rows, by="tests", reason="the bucket is gone"),
    "restore": restore,
    "discard": discard,
}


def execute(statement: str, *parameters: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)


def row_of(ref: str) -> Any:
    return SourceSecretLifecycleRef.objects.get(credential_ref=ref)


def refs(*names: str) -> LedgerQuerySet:
    found: LedgerQuerySet = SourceSecretLifecycleRef.objects.filter(credential_ref__in=names)
    return found


def due_in_grace(ref: str) -> bool:
    """Return whether the ref is due after the grace, of 10 minutes."""
    soon = seconds_from_now(601)
    return refs(ref).retired().filter(next_delete_at__gt=Now(), next_delete_at__lte=soon).exists()


def object_of(ref: str) -> SecretObject:
    return SecretObject.objects.get(pk=ref)


def rows(*names: str, version: int | None = None) -> list[tuple[uuid.UUID, int | None]]:
    """Return these refs as an operator chooses them; the versions are those of now, if none is given."""
    return [(row_of(ref).pk, row_of(ref).row_version if version is None else version) for ref in names]


def made(credentials: dict[str, Any] = OLD) -> Source:
    """Return a source with credentials in the store."""
    return services.create_source(
        tenant=TENANT, space_id=SpaceFactory.create().pk, type="web", name="n", uri="u", credentials=credentials
    )


def parked(attention: Attention = Attention.ERASURE_FAILS) -> str:
    """Return a ref that nobody uses, and whose erasure failed as often as it may."""
    source = made()
    assert source.credential_ref
    services.revoke_credentials(tenant=TENANT, source_id=source.pk)
    execute(
        "UPDATE source_secret_lifecycle_refs SET delete_attempts = 20, last_error_code = %s, "
        f"next_delete_at = {A_DAY} WHERE credential_ref = %s",
        *(RefError.NEEDS_ATTENTION.value, source.credential_ref),
    )
    execute(
        "UPDATE kfs_credentials_secret_object SET first_claimed_at = now() WHERE credential_ref = %s",
        source.credential_ref,
    )
    SecretObject.objects.mark([source.credential_ref], attention)
    return source.credential_ref


@dataclass
class Pair:
    """A source, the ref that it names, and another one that it might name."""

    source: uuid.UUID
    named: str
    other: str

    def credentials(self) -> dict[str, Any]:
        """What an application reads now."""
        return dict(services.resolve_credentials(tenant=TENANT, source_id=self.source))

    def read(self) -> Source:
        """The source as it is now."""
        return Source.objects.get(pk=self.source)


def name(source: uuid.UUID, ref: str | None) -> None:
    """Let the source name a ref, as an old writer does that saves a whole row that it read long ago."""
    execute("UPDATE sources SET credential_ref = %s WHERE id = %s", ref, source)


def rotated() -> Pair:
    """Return a source that was rotated, and names its old ref, which is retired, again."""
    source = made(OLD)
    old = source.credential_ref
    new = services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW).credential_ref
    assert old
    assert new
    name(source.pk, old)
    return Pair(source.pk, named=old, other=new)


def displaced() -> Pair:
    """Return the same after the cleanup has found it: the old ref is in use, and the new one waits for a person."""
    pair = rotated()
    assert repaired(pair) == Repair.REINSTATED
    return pair


def out_of_use(state: RefState) -> Pair:
    """Return the same where the old ref was claimed for erasure before. The new one is active."""
    pair = rotated()
    lease = "worker_id = 'w', lease_token = gen_random_uuid(), lease_expires_at = now(), heartbeat_at = now()"
    more = {RefState.DELETING: f", {lease}", RefState.DELETED: ", deleted_at = now()"}.get(state, "")
    execute(f"UPDATE source_secret_lifecycle_refs SET state = %s{more} WHERE credential_ref = %s", state, pair.named)
    execute("UPDATE kfs_credentials_secret_object SET first_claimed_at = now() WHERE credential_ref = %s", pair.named)
    return pair


def unreadable() -> Pair:
    """Return the same after the cleanup has found that the old ref's object is gone."""
    pair = out_of_use(RefState.DELETED)
    row = row_of(pair.named)
    secret_stores["default"].delete(Scope(row.tenant_id, row.knowledge_space_id, row.source_id), pair.named)
    assert repaired(pair) == Repair.UNREADABLE
    return pair


def repaired(pair: Pair) -> Repair:
    """Let the cleanup look after the source; return what became of it."""
    return Cleanup(using="default", worker="tests", lease=60.0).repair(pair.named)

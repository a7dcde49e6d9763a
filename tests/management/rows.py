"""Jobs and refs for the tests, and all that the tables hold."""

# factory-boy's declarations have no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import factory
from django.db import connection
from django.utils import timezone

from kfs_credentials.conf import key_ring
from kfs_credentials.crypto import new_ref
from kfs_credentials.models import (
    JobError,
    RefState,
    SecretObject,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from tests.factories import SourceFactory

TABLES = (
    "knowledge_spaces",
    "sources",
    "source_credential_backfills",
    "source_secret_lifecycle_refs",
    "kfs_credentials_secret_object",
    "kfs_credentials_acknowledgement",
    "kfs_credentials_round",
    "kfs_credentials_event",
)


class JobFactory(factory.django.DjangoModelFactory[SourceCredentialBackfill]):
    """A failed job of `source=`, without a ledger row; or one that is queued or running."""

    class Meta:
        model = SourceCredentialBackfill

    class Params:
        queued = factory.Trait(run_state="queued", retry_count=0, last_error_code=None, completed_at=None)
        succeeded = factory.Trait(run_state="succeeded", last_error_code=None)
        running = factory.Trait(
            run_state="running",
            retry_count=0,
            last_error_code=None,
            completed_at=None,
            worker_id="tests#1",
            lease_token=factory.LazyFunction(uuid.uuid4),
            lease_expires_at=factory.LazyFunction(lambda: timezone.now() + timedelta(hours=1)),
            heartbeat_at=factory.LazyFunction(timezone.now),
        )

    source = factory.SubFactory(SourceFactory)
    tenant_id = factory.SelfAttribute("source.knowledge_space.tenant_id")
    knowledge_space = factory.SelfAttribute("source.knowledge_space")
    source_version = 1
    candidate_credential_ref = factory.LazyFunction(new_ref)
    secret_fingerprint = "0" * 64
    run_state = "failed"
    retry_count = 5
    row_version = 7
    last_error_code = JobError.UNEXPECTED.value
    created_at = factory.LazyFunction(timezone.now)
    updated_at = factory.LazyFunction(timezone.now)
    completed_at = factory.LazyFunction(timezone.now)


class RefFactory(factory.django.DjangoModelFactory[SourceSecretLifecycleRef]):
    """The ledger row of `job=`'s candidate, retired."""

    class Meta:
        model = SourceSecretLifecycleRef
        exclude = ("job",)

    job: Any
    tenant_id = factory.SelfAttribute("job.tenant_id")
    knowledge_space_id = factory.SelfAttribute("job.knowledge_space_id")
    source_id = factory.SelfAttribute("job.source_id")
    credential_ref = factory.SelfAttribute("job.candidate_credential_ref")
    operation_id = factory.LazyAttribute(lambda ref: str(ref.job.pk))
    purpose = "backfill"
    state = RefState.RETIRED.value
    source_version = 1
    recover_after = factory.LazyFunction(timezone.now)
    next_delete_at = factory.LazyFunction(lambda: timezone.now() + timedelta(minutes=10))
    delete_attempts = 0
    row_version = 1
    created_at = factory.LazyFunction(timezone.now)
    updated_at = factory.LazyFunction(timezone.now)


def give_ref(source: Source, *, in_ledger: bool = True) -> str:
    """Let the source have a ref, whose object is under the first key; return the ref."""
    ref = new_ref()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE sources SET credential_ref = %s WHERE id = %s", [ref, source.pk])
    if in_ledger:
        ledger_row(source, ref, state=RefState.ACTIVE.value)
        object_row(ref, key_id=key_ring().primary.id)
    return ref


def ledger_row(source: Source, ref: str | None = None, **values: Any) -> SourceSecretLifecycleRef:
    """Write the ledger row of a ref of the source, as the Node service would do it: retired, unless told otherwise."""
    now = timezone.now()
    row = {
        "tenant_id": source.knowledge_space.tenant_id,
        "knowledge_space_id": source.knowledge_space_id,
        "source_id": source.pk,
        "credential_ref": ref or new_ref(),
        "operation_id": str(uuid.uuid4()),
        "purpose": "rotate",
        "state": RefState.RETIRED.value,
        "source_version": 1,
        "recover_after": now,
        "delete_attempts": 0,
        "row_version": 1,
        "created_at": now,
        "updated_at": now,
        **values,
    }
    made: SourceSecretLifecycleRef = SourceSecretLifecycleRef.objects.create(**row)
    return made


def object_row(ref: str, **values: Any) -> SecretObject:
    """Write what our own table has about a ref."""
    now = timezone.now()
    row = {"credential_ref": ref, "store": "default", "created_at": now, "updated_at": now, **values}
    return SecretObject.objects.create(**row)


def table_contents() -> dict[str, list[str]]:
    """Return every row of every table that the package reads, as text."""
    contents = {}
    with connection.cursor() as cursor:
        for table in TABLES:
            cursor.execute(f"SELECT t::text FROM {table} t ORDER BY 1")
            contents[table] = [row for (row,) in cursor.fetchall()]
    return contents


def directory_contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Return every file below the directory, with its content and the time of its last change."""
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }

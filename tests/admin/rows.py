"""Rows of the tables that the pages show."""

# factory-boy's declarations have no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import factory
from django.utils import timezone

from kfs_credentials.crypto import new_ref
from kfs_credentials.models import (
    AcknowledgedShape,
    Acknowledgement,
    Binding,
    Checkpoint,
    ClosedKey,
    Event,
    EventKind,
    JobError,
    Pause,
    Purpose,
    RefState,
    Refusal,
    RefusalReason,
    Round,
    RunState,
    SecretObject,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
    Tick,
    WorkerRole,
)
from tests.factories import SourceFactory

LEASED = {
    "worker_id": "worker#1",
    "lease_token": factory.LazyFunction(uuid.uuid4),
    "lease_expires_at": factory.LazyFunction(lambda: timezone.now() + dt.timedelta(hours=1)),
    "heartbeat_at": factory.LazyFunction(timezone.now),
}


class JobFactory(factory.django.DjangoModelFactory[SourceCredentialBackfill]):
    """A failed job; `leased=True` a running one."""

    class Meta:
        model = SourceCredentialBackfill

    class Params:
        leased = factory.Trait(run_state=RunState.RUNNING, completed_at=None, **LEASED)
        queued = factory.Trait(run_state=RunState.QUEUED, completed_at=None)

    source = factory.SubFactory(SourceFactory)
    knowledge_space = factory.SelfAttribute("source.knowledge_space")
    tenant_id = factory.SelfAttribute("source.knowledge_space.tenant_id")
    source_version = 1
    candidate_credential_ref = factory.LazyFunction(new_ref)
    secret_fingerprint = "f" * 64
    run_state = RunState.FAILED
    retry_count = 5
    row_version = 7
    last_error_code = JobError.INTEGRITY
    last_error_message = "text-from-outside"
    created_at = factory.LazyFunction(timezone.now)
    updated_at = factory.LazyFunction(timezone.now)
    completed_at: Any = factory.LazyFunction(timezone.now)


class RefFactory(factory.django.DjangoModelFactory[SourceSecretLifecycleRef]):
    """An active ref of a source that need not exist; `leased=True` one that is being erased."""

    class Meta:
        model = SourceSecretLifecycleRef
        exclude = ("source",)

    class Params:
        leased = factory.Trait(state=RefState.DELETING, **LEASED)

    source: Source | None = None
    tenant_id: Any = factory.LazyAttribute(
        lambda row: row.source.knowledge_space.tenant_id if row.source else "tenant-a"
    )
    knowledge_space_id: Any = factory.LazyAttribute(
        lambda row: row.source.knowledge_space_id if row.source else uuid.uuid4()
    )
    source_id: Any = factory.LazyAttribute(lambda row: row.source.pk if row.source else uuid.uuid4())
    credential_ref = factory.LazyFunction(new_ref)
    operation_id = factory.LazyFunction(lambda: str(uuid.uuid4()))
    purpose = Purpose.BACKFILL
    state = RefState.ACTIVE
    source_version = 1
    recover_after = factory.LazyFunction(timezone.now)
    delete_attempts = 0
    row_version = 1
    created_at = factory.LazyFunction(timezone.now)
    updated_at = factory.LazyFunction(timezone.now)


class ObjectFactory(factory.django.DjangoModelFactory[SecretObject]):
    """What is known of a ref's object."""

    class Meta:
        model = SecretObject

    credential_ref = factory.LazyFunction(new_ref)
    store = "default"
    key_id = "0123456789abcdef"
    size = 1234
    created_at = factory.LazyFunction(timezone.now)
    updated_at = factory.LazyFunction(timezone.now)


class AcknowledgementFactory(factory.django.DjangoModelFactory[Acknowledgement]):
    """An acknowledged string."""

    class Meta:
        model = Acknowledgement

    source_id = factory.LazyFunction(uuid.uuid4)
    shape = AcknowledgedShape.STRING
    acknowledged_by = "an operator"
    acknowledged_at = factory.LazyFunction(timezone.now)


class RoundFactory(factory.django.DjangoModelFactory[Round]):
    """A sweep that a worker is at."""

    class Meta:
        model = Round

    name = Round.SWEEP
    worker_id = "worker#1"
    lease_token = factory.LazyFunction(uuid.uuid4)
    lease_expires_at = factory.LazyFunction(lambda: timezone.now() + dt.timedelta(hours=1))
    started_at = factory.LazyFunction(timezone.now)
    found = 3


class EventFactory(factory.django.DjangoModelFactory[Event]):
    """A ref was retired by the application."""

    class Meta:
        model = Event

    created_at = factory.LazyFunction(timezone.now)
    kind = EventKind.RETIRED
    actor = "application"
    credential_ref = factory.LazyFunction(new_ref)
    tenant_id = "tenant-a"
    knowledge_space_id = factory.LazyFunction(uuid.uuid4)
    source_id = factory.LazyFunction(uuid.uuid4)


class BindingFactory(factory.django.DjangoModelFactory[Binding]):
    """The default store, with its epoch under a lease."""

    class Meta:
        model = Binding

    store = "default"
    environment_id = factory.LazyFunction(uuid.uuid4)
    environment = "production"
    shown_epoch = 7
    system_identifier = "7000000000000000000"
    database_oid = 16384
    epoch = 7
    bound_at = factory.LazyFunction(timezone.now)
    bound_by = "an operator"
    worker_id = "worker#1"
    lease_token = factory.LazyFunction(uuid.uuid4)
    lease_expires_at = factory.LazyFunction(lambda: timezone.now() + dt.timedelta(hours=1))


class PauseFactory(factory.django.DjangoModelFactory[Pause]):
    """The workers are paused."""

    class Meta:
        model = Pause
        django_get_or_create = ("id",)

    id = Pause.ID
    paused_at = factory.LazyFunction(timezone.now)
    paused_by = "an operator"
    reason = "the bucket moves"


class ClosedKeyFactory(factory.django.DjangoModelFactory[ClosedKey]):
    """A key that is closed."""

    class Meta:
        model = ClosedKey

    key_id = factory.Sequence(lambda n: f"{n:016x}")
    closed_at = factory.LazyFunction(timezone.now)
    closed_by = "an operator"


class TickFactory(factory.django.DjangoModelFactory[Tick]):
    """A cleanup is at work."""

    class Meta:
        model = Tick

    role = WorkerRole.CLEANUP
    worker_id = "worker"
    ticked_at = factory.LazyFunction(timezone.now)


class RefusalFactory(factory.django.DjangoModelFactory[Refusal]):
    """A cleanup was refused by the store, three times."""

    class Meta:
        model = Refusal

    role = WorkerRole.CLEANUP
    reason = RefusalReason.STORE_DENIED
    count = 3
    refused_at = factory.LazyFunction(timezone.now)


class CheckpointFactory(factory.django.DjangoModelFactory[Checkpoint]):
    """A command that was interrupted."""

    class Meta:
        model = Checkpoint

    name = "reencrypt"
    position = "source-secret:v1:"
    data = factory.LazyFunction(dict)
    started_at = factory.LazyFunction(timezone.now)
    updated_at = factory.LazyFunction(timezone.now)


OPERATIONS = (
    BindingFactory,
    CheckpointFactory,
    ClosedKeyFactory,
    EventFactory,
    PauseFactory,
    RefusalFactory,
    TickFactory,
)
"""Rows of the tables that it takes to operate."""


def set_ref(source: Source, ref: str) -> None:
    """Give a source its ref, which its model refuses to write."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("UPDATE sources SET credential_ref = %s WHERE id = %s", [ref, source.pk])
    source.refresh_from_db()

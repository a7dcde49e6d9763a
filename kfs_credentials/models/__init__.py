"""The tables, one file each: states with their moves, the queryset (which rows), the row."""

from kfs_credentials.models.acknowledgement import AcknowledgedShape, Acknowledgement
from kfs_credentials.models.backfill import JobError, RunState, SourceCredentialBackfill
from kfs_credentials.models.binding import Binding
from kfs_credentials.models.checkpoint import Checkpoint
from kfs_credentials.models.closed_key import ClosedKey
from kfs_credentials.models.event import Event, EventKind
from kfs_credentials.models.knowledge_space import KnowledgeSpace
from kfs_credentials.models.ledger import Purpose, RefError, RefState, SourceSecretLifecycleRef
from kfs_credentials.models.pause import Pause
from kfs_credentials.models.round import Round
from kfs_credentials.models.secret_object import Attention, Receipt, SecretObject
from kfs_credentials.models.source import Shape, Source
from kfs_credentials.models.tick import Refusal, RefusalReason, Tick, WorkerRole

__all__ = [
    "AcknowledgedShape",
    "Acknowledgement",
    "Attention",
    "Binding",
    "Checkpoint",
    "ClosedKey",
    "Event",
    "EventKind",
    "JobError",
    "KnowledgeSpace",
    "Pause",
    "Purpose",
    "Receipt",
    "RefError",
    "RefState",
    "Refusal",
    "RefusalReason",
    "Round",
    "RunState",
    "SecretObject",
    "Shape",
    "Source",
    "SourceCredentialBackfill",
    "SourceSecretLifecycleRef",
    "Tick",
    "WorkerRole",
]

"""The tables, one file each: states with their moves, the queryset (which rows), the row."""

from kfs_credentials.models.acknowledgement import AcknowledgedShape, Acknowledgement
from kfs_credentials.models.backfill import JobError, RunState, SourceCredentialBackfill
from kfs_credentials.models.knowledge_space import KnowledgeSpace
from kfs_credentials.models.ledger import Purpose, RefError, RefState, SourceSecretLifecycleRef
from kfs_credentials.models.round import Round
from kfs_credentials.models.secret_object import Attention, Receipt, SecretObject
from kfs_credentials.models.source import Shape, Source

__all__ = [
    "AcknowledgedShape",
    "Acknowledgement",
    "Attention",
    "JobError",
    "KnowledgeSpace",
    "Purpose",
    "Receipt",
    "RefError",
    "RefState",
    "Round",
    "RunState",
    "SecretObject",
    "Shape",
    "Source",
    "SourceCredentialBackfill",
    "SourceSecretLifecycleRef",
]

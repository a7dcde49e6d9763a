"""The tables, one file each: states with their moves, the queryset (which rows), the row."""

from kfs_credentials.models.acknowledgement import AcknowledgedShape, Acknowledgement
from kfs_credentials.models.backfill import JobError, RunState, SourceCredentialBackfill
from kfs_credentials.models.knowledge_space import KnowledgeSpace
from kfs_credentials.models.ledger import Purpose, RefState, SourceSecretLifecycleRef
from kfs_credentials.models.secret_object import SecretObject
from kfs_credentials.models.source import Shape, Source

__all__ = [
    "AcknowledgedShape",
    "Acknowledgement",
    "JobError",
    "KnowledgeSpace",
    "Purpose",
    "RefState",
    "RunState",
    "SecretObject",
    "Shape",
    "Source",
    "SourceCredentialBackfill",
    "SourceSecretLifecycleRef",
]

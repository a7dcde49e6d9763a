"""The pages of Django's admin: what is where and in which state. No page calls a store."""

from kfs_credentials.admin.acknowledgement import AcknowledgementAdmin
from kfs_credentials.admin.backfill import BackfillAdmin
from kfs_credentials.admin.event import EventAdmin
from kfs_credentials.admin.knowledge_space import KnowledgeSpaceAdmin
from kfs_credentials.admin.ledger import LedgerAdmin
from kfs_credentials.admin.operations import (
    BindingAdmin,
    CheckpointAdmin,
    ClosedKeyAdmin,
    PauseAdmin,
    RefusalAdmin,
    TickAdmin,
)
from kfs_credentials.admin.round import RoundAdmin
from kfs_credentials.admin.secret_object import SecretObjectAdmin
from kfs_credentials.admin.source import SourceAdmin

__all__ = [
    "AcknowledgementAdmin",
    "BackfillAdmin",
    "BindingAdmin",
    "CheckpointAdmin",
    "ClosedKeyAdmin",
    "EventAdmin",
    "KnowledgeSpaceAdmin",
    "LedgerAdmin",
    "PauseAdmin",
    "RefusalAdmin",
    "RoundAdmin",
    "SecretObjectAdmin",
    "SourceAdmin",
    "TickAdmin",
]

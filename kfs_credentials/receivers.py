"""Receivers of the signals: what is logged about moves and workers. Connected when the application is ready."""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import receiver

from kfs_credentials.models import EventKind, RefusalReason, WorkerRole
from kfs_credentials.redaction import short_ref
from kfs_credentials.signals import refs_moved, worker_refused

logger = logging.getLogger("kfs_credentials")

NAMED = 3
"""How many refs of a batch the log names."""


@receiver(refs_moved, dispatch_uid="kfs_credentials.log_moves")
def log_moves(*, kind: EventKind, refs: tuple[str, ...], actor: str, detail: str | None, **_: Any) -> None:
    """Log what has become of refs, and by whom."""
    some = ", ".join(map(short_ref, refs[:NAMED])) + (" and more" if len(refs) > NAMED else "")
    why = f" ({detail})" if detail else ""
    count = "1 ref" if len(refs) == 1 else f"{len(refs):,} refs"
    logger.info("%s%s by %s: %s: %s", kind.value, why, actor, count, some)


@receiver(worker_refused, dispatch_uid="kfs_credentials.log_refusal")
def log_refusal(*, role: WorkerRole, reason: RefusalReason, **_: Any) -> None:
    """Log that a worker does not work, or waits."""
    logger.info("the %s worker does not work now: %s", role.value, reason.value)

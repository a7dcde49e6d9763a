"""A pause of all workers of a database. It lives there: it survives restarts, and needs no living worker.

A worker looks at it in the transaction in which it claims, and when it renews a lease: what it holds then is finished
within that lease, or given back. What applications do through `services` goes on.
"""

from __future__ import annotations

from kfs_credentials import sql
from kfs_credentials.audit import record_act
from kfs_credentials.errors import (
    BindingBroken,
    BindingProblem,
    StoreDenied,
    StoreMisconfigured,
    StoreNotConfigured,
    WorkersPaused,
)
from kfs_credentials.models import EventKind, Pause
from kfs_credentials.moments import in_utc
from kfs_credentials.transactions import short_transaction


def current(using: str) -> Pause | None:
    """Return the pause, None if the workers are not paused. Locks nothing."""
    return Pause.objects.using(using).first()


def check_not_paused(using: str) -> None:
    """Raise `WorkersPaused` if the workers are paused. Call it in the transaction that claims."""
    pause = current(using)
    if pause is not None:
        raise WorkersPaused(
            f"paused by {pause.paused_by} at {in_utc(pause.paused_at):%Y-%m-%d %H:%M:%S %Z}: {pause.reason}"
        )


def pause_workers(using: str, *, by: str, reason: str) -> bool:
    """Pause all workers; return whether they were not paused before: the first pause stands, with its reason.

    `by`: who. `reason`: shown to operators. In a transaction of its own.
    """
    with short_transaction(using):
        paused = bool(sql.query(using, "pause/begin", by=by, reason=reason))
        if paused:
            record_act(using, EventKind.PAUSED, detail=reason)
    return paused


def is_own(denied: StoreDenied | StoreMisconfigured) -> bool:
    """Return whether it is most likely this process's own settings that are wrong: no reason to stop the others."""
    unreadable = isinstance(denied, BindingBroken) and denied.problem is BindingProblem.UNREADABLE
    return unreadable or isinstance(denied, StoreNotConfigured)


def reason_to_pause(denied: StoreDenied | StoreMisconfigured) -> str:
    """Return why a worker pauses all of them: from a fixed list, since what a store says could quote anything."""
    if isinstance(denied, BindingBroken):
        return f"database and store do not know each other ({denied.problem.value.replace('_', ' ')})"
    if isinstance(denied, StoreDenied):
        return "the secret store denies access"
    return "the secret store is not where, or not what, the settings say"


def resume_workers(using: str) -> bool:
    """Let the workers go on; return whether they were paused. In a transaction of its own."""
    with short_transaction(using):
        resumed, _ = Pause.objects.using(using).all().delete()
        if resumed:
            record_act(using, EventKind.RESUMED)
    return bool(resumed)

"""What is measured, and how it is read: one moment, by queries that lock nothing and write nothing.

Labels are from lists in the code. None is ever a tenant, a source, a ref or a worker: there is no end to those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from django.db.models import Count, F, Q
from django.db.models.functions import Now

from kfs_credentials.leases import seconds_from_now
from kfs_credentials.models import (
    Event,
    EventKind,
    JobError,
    Pause,
    RefState,
    Refusal,
    RefusalReason,
    RunState,
    SourceSecretLifecycleRef,
    Tick,
    WorkerRole,
)
from kfs_credentials.models.source import UNSUPPORTED
from kfs_credentials.status import UNFINISHED, Status, read_status, snapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kfs_credentials.models.ledger import LedgerQuerySet

PREFIX = "kfs_credentials_"
OTHER = "other"
"""The label of what is in no list: a newer version of this package, or another program, wrote it."""

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """One metric: its name, what it tells, its labels, and the values that each of them may have."""

    name: str
    help: str
    labels: tuple[tuple[str, Collection[str]], ...] = ()
    type: Literal["gauge", "counter"] = "gauge"


def _by(label: str, *values: str) -> tuple[tuple[str, Collection[str]], ...]:
    return ((label, values),)


ROUNDS = ("sweep", "patrol")

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("kfs_credentials_sources", "Sources, all of them."),
        Family("kfs_credentials_sources_legacy", "Sources whose credentials lie in clear, without a ref."),
        Family("kfs_credentials_sources_movable", "Legacy sources that the backfill would move."),
        Family("kfs_credentials_sources_referenced", "Sources with a ref."),
        Family("kfs_credentials_sources_both", "Sources with a ref and with credentials in clear."),
        Family("kfs_credentials_sources_dangling", "Sources whose ref is not theirs and active in the ledger."),
        Family("kfs_credentials_sources_too_large", "Legacy sources whose credentials are larger than may be stored."),
        Family(
            "kfs_credentials_sources_unsupported",
            "Sources whose credentials are no JSON object, by shape.",
            _by("shape", *(shape.value for shape in UNSUPPORTED)),
        ),
        Family("kfs_credentials_jobs", "Backfill jobs, by state.", _by("state", *RunState.values)),
        Family(
            "kfs_credentials_jobs_oldest_age_seconds",
            "Since the last move of the job that has been in its state for longest; 0 if there is none.",
            _by("state", *(state.value for state in UNFINISHED)),
        ),
        Family("kfs_credentials_jobs_failed", "Failed jobs, by code.", _by("code", *JobError.values, OTHER)),
        Family("kfs_credentials_jobs_expired_leases", "Running jobs whose lease has run out."),
        Family("kfs_credentials_refs", "Refs in the ledger, by state.", _by("state", *RefState.values)),
        Family(
            "kfs_credentials_refs_oldest_age_seconds",
            "Since the last move of the ref that has been in its state for longest; 0 if there is none.",
            _by("state", *RefState.values),
        ),
        Family("kfs_credentials_refs_expired_leases", "Refs that are being erased and whose lease has run out."),
        Family("kfs_credentials_refs_overdue", "Refs whose next move is due and not made."),
        Family("kfs_credentials_refs_overdue_age_seconds", "For how long the oldest move has been due."),
        Family("kfs_credentials_refs_waiting", "Refs whose next move comes later."),
        Family("kfs_credentials_refs_parked", "Refs whose erasure fails, or which the store keeps."),
        Family("kfs_credentials_refs_displaced", "Refs that wait for a person, since an older one was brought back."),
        Family("kfs_credentials_refs_abandoned", "Refs that are not erased, by a person's decision."),
        Family("kfs_credentials_unknown_objects", "Objects of no ledger row that the last patrol found in the store."),
        Family(
            "kfs_credentials_last_round_age_seconds",
            "Since the last round that came to its end; not there if none ever has.",
            _by("round", *ROUNDS),
        ),
        Family("kfs_credentials_events_last_hour", "Events of the last hour, by kind.", _by("kind", *EventKind.values)),
        Family(
            "kfs_credentials_events_last_minute", "Events of the last minute, by kind.", _by("kind", *EventKind.values)
        ),
        Family(
            "kfs_credentials_refusals",
            "How often workers have refused to work or had to wait, by role and class of the reason.",
            (("role", (*WorkerRole.values, OTHER)), ("reason", (*RefusalReason.values, OTHER))),
            type="counter",
        ),
        Family(
            "kfs_credentials_last_tick_age_seconds",
            "Since a worker of this role last came to the end of a step; not there if none ever has.",
            _by("role", *WorkerRole.values, OTHER),
        ),
        Family("kfs_credentials_paused", "1 while the workers are paused, else 0."),
    )
}


class Metrics:
    """The values of all metrics at one moment: by the name of the metric, then by its labels."""

    def __init__(self, status: Status) -> None:
        self.status = status
        self.values: dict[str, dict[Labels, float]] = {name: {} for name in FAMILIES}

    def set(self, name: str, value: float, *labels: str) -> None:
        """Note a value."""
        self.values[PREFIX + name][self._known(name, labels)] = value

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add to a value: those whose labels are in no list are counted together."""
        samples, key = self.values[PREFIX + name], self._known(name, labels)
        samples[key] = samples.get(key, 0) + value

    def set_all(self, name: str, values: Mapping[str, float]) -> None:
        """Note the value of each label that has one; 0 for those in the list that have none."""
        ((_, known),) = FAMILIES[PREFIX + name].labels
        for label in known:
            self.set(name, values.get(label, 0), label)

    def _known(self, name: str, labels: Labels) -> Labels:
        lists = [known for _, known in FAMILIES[PREFIX + name].labels]
        return tuple(label if label in known else OTHER for label, known in zip(labels, lists, strict=True))


def read_metrics(using: str) -> Metrics:
    """Return the values of all metrics for alias `using`: one snapshot, unless the caller has a transaction open.

    Takes as long as `read_status`, which is nearly all of it. Locks nothing and writes nothing.
    """
    with snapshot(using):
        metrics = Metrics(read_status(using))
        _of_status(metrics)
        _of_events(metrics, using)
        _of_workers(metrics, using)
    return metrics


def _of_status(metrics: Metrics) -> None:
    status = metrics.status
    metrics.set("sources", status.sources["total"])
    for name in ("legacy", "movable", "referenced", "both", "dangling", "too_large"):
        metrics.set(f"sources_{name}", status.sources[name])
    metrics.set_all("sources_unsupported", status.unsupported)
    metrics.set_all("jobs", status.backfills)
    metrics.set_all("jobs_oldest_age_seconds", status.ages["backfills"])
    for code in (*JobError.values, OTHER):
        metrics.set("jobs_failed", 0, code)
    for code, count in status.failures.items():
        metrics.add("jobs_failed", count, code)
    metrics.set("jobs_expired_leases", status.backfills["expired_leases"])
    metrics.set_all("refs", status.ledger)
    metrics.set_all("refs_oldest_age_seconds", status.ages["ledger"])
    for name in ("overdue", "waiting", "parked", "displaced", "abandoned"):
        metrics.set(f"refs_{name}", status.ledger[name])
    metrics.set("refs_overdue_age_seconds", status.ledger["oldest_overdue_seconds"])
    metrics.set("unknown_objects", status.rounds["unknown_objects"] or 0)
    for name in ROUNDS:
        age = status.rounds[f"last_{name}_seconds"]
        if age is not None:
            metrics.set("last_round_age_seconds", age, name)


def _of_events(metrics: Metrics, using: str) -> None:
    # The kinds are named one by one: the index has each of them in the order of time.
    recent = Event.objects.using(using).filter(kind__in=EventKind.values, created_at__gt=seconds_from_now(-3600))
    counts = (
        recent.order_by()
        .values_list("kind")
        .annotate(hour=Count("pk"), minute=Count("pk", filter=Q(created_at__gt=seconds_from_now(-60))))
    )
    found = list(counts)
    metrics.set_all("events_last_hour", {kind: hour for kind, hour, _ in found})
    metrics.set_all("events_last_minute", {kind: minute for kind, _, minute in found})


def _of_workers(metrics: Metrics, using: str) -> None:
    refs: LedgerQuerySet = SourceSecretLifecycleRef.objects.using(using)
    metrics.set("refs_expired_leases", refs.expired().count())
    for role, reason, count in Refusal.objects.using(using).values_list("role", "reason", "count"):
        metrics.add("refusals", count, role, reason)
    ticks = Tick.objects.using(using).order_by("ticked_at")  # of several that are in no list the last one counts
    for role, age in ticks.annotate(age=Now() - F("ticked_at")).values_list("role", "age"):
        metrics.set("last_tick_age_seconds", max(0.0, age.total_seconds()), role)
    metrics.set("paused", int(Pause.objects.using(using).exists()))

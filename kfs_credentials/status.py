"""What there is to do, and what there is to look at: counts, by queries that lock nothing."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from django.db import connections, transaction
from django.db.models import Count, Exists, F, Min, OuterRef, Q, Value
from django.db.models.functions import Now

from kfs_credentials.keys import HeldKey, held_keys, missing_from_ring, refs_held, unknown_in_use
from kfs_credentials.leases import seconds_from_now
from kfs_credentials.models import (
    AcknowledgedShape,
    Attention,
    Binding,
    RefState,
    Round,
    RunState,
    SecretObject,
    Shape,
    SourceSecretLifecycleRef,
)
from kfs_credentials.models.secret_object import PARKED
from kfs_credentials.models.source import UNSUPPORTED, CredentialsShape
from kfs_credentials.moments import in_utc
from kfs_credentials.pause import current as current_pause
from kfs_credentials.selection import Selection, is_acknowledged

if TYPE_CHECKING:
    import uuid
    from collections.abc import Iterator

    from django.db.models import QuerySet

    from kfs_credentials.models.ledger import LedgerQuerySet


UNFINISHED = (RunState.QUEUED, RunState.RUNNING, RunState.FAILED)
"""The states of jobs that something is left to do about."""


class PlannedShape(TypedDict):
    """A line of `read_plan`: sources of one tenant without a ref, whose credentials are of one shape."""

    tenant: str
    shape: str
    """A value of `Shape`."""
    sources: int
    """How many there are."""
    movable: int
    """How many of them a backfill would move."""


@dataclass(frozen=True)
class Status:
    """The counts; `as_json` says what each member holds."""

    sources: dict[str, int]
    backfills: dict[str, int]
    ledger: dict[str, int]
    rounds: dict[str, int | None]
    unsupported: dict[str, int]
    failures: dict[str, int]
    acknowledged: dict[str, int]
    ages: dict[str, dict[str, int]]
    pause: dict[str, str] | None
    bindings: dict[str, dict[str, Any]]
    keys: list[HeldKey]

    @property
    def left(self) -> tuple[int, int, int]:
        """What a drain still has to do: movable sources, queued jobs, running jobs."""
        return self.sources["movable"], self.backfills["queued"], self.backfills["running"]

    @property
    def findings(self) -> dict[str, int]:
        """What a person has to look at of sources and jobs.

        `unsupported` and `too_large`, less the acknowledged; `failed`; `both`.
        """
        return {
            "unsupported": self.sources["unsupported"] - self.acknowledged["unsupported"],
            "too_large": self.sources["too_large"] - self.acknowledged["too_large"],
            "failed": self.backfills["failed"] - self.sources["too_large"],
            "both": self.sources["both"],
        }

    @property
    def ref_findings(self) -> dict[str, int]:
        """What a person has to look at of refs: `parked`, `displaced`, `dangling`, `unknown_objects`, `keyless`.

        Keyless are those whose key is not in the ring. `closed_key`: 1 if the first key of the ring is closed.
        """
        return {
            "parked": self.ledger["parked"],
            "displaced": self.ledger["displaced"],
            "dangling": self.sources["dangling"],
            "unknown_objects": self.rounds["unknown_objects"] or 0,
            "keyless": sum(map(refs_held, missing_from_ring(self.keys))),
            "closed_key": sum(key["first"] and key["closed"] for key in self.keys),
        }

    @property
    def unknown_keys(self) -> int:
        """Refs in use of which it is not known under which key they are: `reencrypt_secrets` finds out."""
        return unknown_in_use(self.keys)

    @property
    def moved(self) -> bool:
        """Nothing is left to move, and nothing to look at of what is moved."""
        return not any(self.left) and not any(self.findings.values())

    @property
    def clean(self) -> bool:
        """Nothing is left to do now, and nothing to look at."""
        if self.pause is not None or self.ledger["overdue"]:
            return False
        return self.moved and not any(self.ref_findings.values()) and not self.unknown_keys

    def as_json(self) -> dict[str, Any]:
        """Return what `credential_status --format json` prints.

        `sources`: how many there are in `total`; `legacy`: with legacy credentials and no ref; `movable`: those
        of them without a failed job; `unsupported`: credentials that are no object; `too_large`: legacy ones
        that have failed for their size and still have it; `referenced`: with a ref; `both`: with a ref and
        legacy credentials; `dangling`: with a ref that the ledger does not have as theirs and active. `backfills`:
        jobs by state, `expired_leases` of the running ones, and the age of the oldest queued one. `ledger`: refs by
        state; how many are `overdue`, their next move being due and not made, and for how long the oldest is; how
        many are `waiting` for their time; `parked` (their erasure fails, or the store keeps them), `displaced` (an
        old writer brought back an older ref), `abandoned` (not erased, by a person's decision);
        `erased_last_hour`. `rounds`: `unknown_objects` that the last patrol of the store found, and the seconds since
        the last sweep and patrol that came to their end, None if there was none. `unsupported`: by shape;
        `failures`: failed jobs by code; `acknowledged`: the unsupported and the too large ones that a person has
        settled. `ages`: of the unfinished `backfills` and of the `ledger`, by state: the seconds since the last move
        of the one that has been in its state for longest. `pause`: who has paused the workers, when and why, None if
        nobody has. `bindings`: for each store the environment and epoch that the database knows, who bound it and
        when, and whether that came to its end. `keys`: for each key id, None where it is not known, how many refs are
        under it that are `live`, `retired` (to be erased) and `candidate` (reserved), whether it is in the ring of this
        process, and the first of it, and whether it is closed.

        Sources that are being deleted count in `total`, `legacy` and `referenced` only, and of their jobs only
        those that have succeeded.
        """
        return {
            "sources": self.sources,
            "backfills": self.backfills,
            "ledger": self.ledger,
            "rounds": self.rounds,
            "unsupported": self.unsupported,
            "failures": self.failures,
            "acknowledged": self.acknowledged,
            "ages": self.ages,
            "pause": self.pause,
            "bindings": self.bindings,
            "keys": self.keys,
            "clean": self.clean,
        }


def read_status(using: str, *, tenant: str | None = None, space: uuid.UUID | None = None) -> Status:
    """Return the counts of alias `using`, of one tenant or one space if given.

    Counts what is there at one moment, unless the caller has a transaction open. Takes some seconds for a million
    sources and their refs, all of which it counts.
    """
    with snapshot(using):
        rows = Selection.of(using, tenant=tenant, space=space)
        totals = rows.sources().aggregate(total=Count("pk"), referenced=Count("credential_ref"))
        legacy = rows.sources().legacy().aggregate(all=Count("pk"), open=Count("pk", filter=rows.is_open()))
        shapes, both = _out_of_place(rows)
        jobs, failures, job_ages = _unfinished(rows)
        states, ref_ages = _ref_states(rows)
        oldest = rows.open_jobs().queued().aggregate(age=Now() - Min("updated_at"))["age"]
        too_large = rows.too_large()
        return Status(
            sources={
                "total": totals["total"],
                "legacy": legacy["all"],
                "movable": legacy["open"] - rows.failed_legacy().count(),
                "unsupported": sum(shapes.values()),
                "too_large": too_large.count(),
                "referenced": totals["referenced"],
                "both": both,
                "dangling": _dangling(rows),
            },
            backfills={
                **jobs,
                RunState.SUCCEEDED.value: rows.jobs().filter(run_state=RunState.SUCCEEDED).count(),
                "expired_leases": rows.open_jobs().expired().count(),
                "oldest_queued_seconds": int(oldest.total_seconds()) if oldest else 0,
            },
            ledger={**states, **_ledger(rows)},
            rounds=_rounds(rows),
            unsupported=shapes,
            failures=failures,
            acknowledged={
                "unsupported": rows.unsupported().filter(is_acknowledged("pk", "shape")).count(),
                "too_large": too_large.filter(is_acknowledged("source_id", AcknowledgedShape.TOO_LARGE)).count(),
            },
            ages={"backfills": job_ages, "ledger": ref_ages},
            pause=_pause(using),
            bindings=_bindings(using),
            keys=held_keys(using, tenant=tenant, space=space),
        )


def read_left(using: str, *, tenant: str | None = None, space: uuid.UUID | None = None) -> tuple[int, int, int]:
    """Return `Status.left` alone: one moment, and next to no cost once nothing is left."""
    rows = Selection.of(using, tenant=tenant, space=space)
    counts = {
        "legacy": rows.sources().legacy().filter(rows.is_open()),
        "failed": rows.failed_legacy(),
        "queued": rows.open_jobs().queued(),
        "running": rows.open_jobs().leased(),
    }
    # In one statement: what moves from one count to the next meanwhile would be in neither.
    first, *others = (_named_count(name, found) for name, found in counts.items())
    # A tenant without spaces has no count of sources at all: Django leaves out what cannot find a row.
    found = dict.fromkeys(counts, 0) | dict(first.union(*others, all=True))
    return found["legacy"] - found["failed"], found["queued"], found["running"]


def read_plan(using: str, *, tenant: str | None = None, space: uuid.UUID | None = None) -> list[PlannedShape]:
    """Return what a backfill would find, by tenant and shape; JSON null included, which is no credentials."""
    with snapshot(using):
        rows = Selection.of(using, tenant=tenant, space=space)
        shapes = (
            rows.sources()
            .filter(credential_ref__isnull=True)
            .annotate(shape=CredentialsShape("metadata"), tenant=F("knowledge_space__tenant_id"))
            .filter(shape__isnull=False)
            .values_list("tenant", "shape")
            .annotate(sources=Count("pk"), open=Count("pk", filter=rows.is_open()))
            .order_by("tenant", "shape")
        )
        failed = dict(_grouped(rows.failed_legacy(), "tenant_id"))
        return [
            PlannedShape(
                tenant=owner,
                shape=shape,
                sources=sources,
                movable=is_open - failed.get((owner,), 0) if shape == Shape.OBJECT else 0,
            )
            for owner, shape, sources, is_open in shapes
        ]


def _out_of_place(rows: Selection) -> tuple[dict[str, int], int]:
    """Return how many open sources have unsupported credentials, by shape, and how many a ref and legacy ones."""
    shapes, both = {shape.value: 0 for shape in UNSUPPORTED}, 0
    odd = Q(shape__in=UNSUPPORTED) | Q(shape=Shape.OBJECT, credential_ref__isnull=False)
    found = rows.sources().filter(rows.is_open()).annotate(shape=CredentialsShape("metadata")).filter(odd)
    for (shape,), count in _grouped(found, "shape"):
        if shape == Shape.OBJECT:
            both = count
        else:
            shapes[shape] = count
    return shapes, both


def _unfinished(rows: Selection) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return how many jobs of open sources are in which state, how many have failed with which code, and the ages."""
    jobs, failures = {state.value: 0 for state in RunState}, {}
    ages = {state.value: 0 for state in UNFINISHED}
    # Named one by one: the claim index finds these, and could not find what is not succeeded.
    unfinished = rows.open_jobs().filter(run_state__in=UNFINISHED)
    for (state, code), count, age in _grouped_with_age(unfinished, "run_state", "last_error_code"):
        jobs[state] += count
        ages[state] = max(age, ages[state])
        if state == RunState.FAILED:
            failures[code or "unknown"] = count  # no code: not from this package
    return jobs, failures, ages


def _ref_states(rows: Selection) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many refs are in which state, and the ages."""
    states, ages = {state.value: 0 for state in RefState}, {state.value: 0 for state in RefState}
    for (state,), count, age in _grouped_with_age(rows.refs(), "state"):
        states[state], ages[state] = count, age
    return states, ages


def _dangling(rows: Selection) -> int:
    """Return how many open sources name a ref that is not active in the ledger, or another source's."""
    own = SourceSecretLifecycleRef.objects.filter(
        credential_ref=OuterRef("credential_ref"),
        state=RefState.ACTIVE,
        source_id=OuterRef("pk"),
        knowledge_space_id=OuterRef("knowledge_space_id"),
        tenant_id=OuterRef("knowledge_space__tenant_id"),
    )
    # Right after a backfill PostgreSQL still takes both sides for next to empty, and would compare each with each.
    with _without_nested_loops(rows.using):
        return rows.sources().referenced().filter(rows.is_open()).filter(~Exists(own)).count()


@contextmanager
def _without_nested_loops(using: str) -> Iterator[None]:
    """Let PostgreSQL join by hashing in this block, inside the transaction that is open."""
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT set_config('enable_nestloop', 'off', true)")
    yield
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT set_config('enable_nestloop', 'on', true)")


def _ledger(rows: Selection) -> dict[str, int]:
    overdue, (unfinished, next_move_in) = rows.refs().overdue().count(), rows.refs().ahead()
    objects = SecretObject.objects.using(rows.using)

    def count(**which: Any) -> int:
        return rows.refs().filter(credential_ref__in=objects.filter(**which).values("pk")).count()

    return {
        "overdue": overdue,
        "oldest_overdue_seconds": max(0, -int(next_move_in.total_seconds())) if overdue and next_move_in else 0,
        "waiting": unfinished - overdue,
        "parked": count(attention__in=PARKED),
        "displaced": count(attention=Attention.DISPLACED),
        "abandoned": count(abandoned_at__isnull=False),
        "erased_last_hour": rows.refs().tombstones().filter(deleted_at__gt=seconds_from_now(-3600)).count(),
    }


def _rounds(rows: Selection) -> dict[str, int | None]:
    ages, unknown = {}, 0
    rounds = Round.objects.using(rows.using).annotate(age=Now() - F("completed_at"))
    for name, found, age in rounds.values_list("name", "found", "age"):
        if age is not None:
            ages[name] = int(age.total_seconds())
        if name.startswith(Round.PATROL):
            unknown += found
    patrols = [age for name, age in ages.items() if name.startswith(Round.PATROL)]
    return {
        # Objects are nobody's that could be told from outside.
        "unknown_objects": unknown if rows.tenant is None and rows.space is None else 0,
        "last_sweep_seconds": ages.get(Round.SWEEP),
        "last_patrol_seconds": max(patrols, default=None),
    }


def _pause(using: str) -> dict[str, str] | None:
    pause = current_pause(using)
    if pause is None:
        return None
    return {"by": pause.paused_by, "at": in_utc(pause.paused_at).isoformat(timespec="seconds"), "reason": pause.reason}


def _bindings(using: str) -> dict[str, dict[str, Any]]:
    return {
        binding.store: {
            "environment": str(binding.environment_id),
            "epoch": binding.epoch,
            "bound_by": binding.bound_by,
            "bound_at": in_utc(binding.bound_at).isoformat(timespec="seconds"),
            "confirmed": binding.confirmed_at is not None,
        }
        for binding in Binding.objects.using(using).order_by("store")
    }


def read_cleanup_left(
    using: str, *, tenant: str | None = None, space: uuid.UUID | None = None
) -> tuple[int, float | None]:
    """Return how many refs are on their way to their end, and the seconds until the next of them is due.

    The seconds are below zero if that moment is past, None if there are none.
    """
    refs: LedgerQuerySet = SourceSecretLifecycleRef.objects.using(using)
    refs = refs.of(tenant, space)
    count, next_move_in = refs.ahead()
    return count, None if next_move_in is None else next_move_in.total_seconds()


def _grouped(rows: QuerySet[Any, Any], *columns: str) -> Iterator[tuple[tuple[Any, ...], int]]:
    for *values, count in rows.order_by(*columns).values_list(*columns).annotate(count=Count("pk")):
        yield tuple(values), count


def _grouped_with_age(rows: QuerySet[Any, Any], *columns: str) -> Iterator[tuple[tuple[Any, ...], int, int]]:
    """Yield values, how many rows have them, and the seconds since the last move of the oldest of these."""
    counted = rows.order_by(*columns).values_list(*columns)
    for *values, count, age in counted.annotate(count=Count("pk"), age=Now() - Min("updated_at")):
        yield tuple(values), count, max(0, int(age.total_seconds()))


def _named_count(name: str, rows: QuerySet[Any, Any]) -> QuerySet[Any, tuple[str, int]]:
    counted: Any = rows.order_by().values_list(Value(name)).annotate(count=Count("pk"))
    return counted  # type: ignore[no-any-return]


@contextmanager
def snapshot(using: str) -> Iterator[None]:
    """Let all statements see one moment, and write nothing, unless the caller has a transaction open."""
    connection = connections[using]
    if connection.in_atomic_block or not connection.get_autocommit():
        yield
        return
    with transaction.atomic(using=using):
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield

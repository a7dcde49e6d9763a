"""A child process of the bench: `load NUMBER`, `backfill`, `rotate NUMBER`, `resolve NUMBER`, `cleanup`, or for the
verification `few NUMBER REFS`, `status`, `verify` or `deep`.

Prints one JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import django
from django.core.management import call_command
from django.db import connection, connections, transaction

django.setup()

from example_project import demo_data  # noqa: E402
from kfs_credentials import services  # noqa: E402
from kfs_credentials.backfill import Backfill  # noqa: E402
from kfs_credentials.backfill_worker import BackfillWorker  # noqa: E402
from kfs_credentials.batch import Move  # noqa: E402
from kfs_credentials.cleanup import Cleanup, Outcome  # noqa: E402
from kfs_credentials.cleanup_worker import CleanupWorker  # noqa: E402
from kfs_credentials.conf import settings  # noqa: E402
from kfs_credentials.leases import new_worker_name  # noqa: E402
from kfs_credentials.management.options import check_store  # noqa: E402
from kfs_credentials.models import Source  # noqa: E402
from kfs_credentials.status import read_cleanup_left, read_left, read_status  # noqa: E402
from kfs_credentials.stores import secret_stores  # noqa: E402
from kfs_credentials.verification.run import Run  # noqa: E402

FEW_SPACES = """
INSERT INTO knowledge_spaces (id, tenant_id, slug, name, created_at, updated_at)
SELECT gen_random_uuid(), 'tenant-' || mod(n, 10), 'space-' || n, 'Space', now(), now()
FROM generate_series(0, 999) n
"""
FEW_SOURCES = """
INSERT INTO sources
SELECT gen_random_uuid(), space.id, 'online_drive', 'active', 'Source ' || n, 'https://files.example/' || n,
  jsonb_build_object(
    'title', 'Handbook ' || n, 'pages', mod(n, 500), 'description', repeat('Made up for the bench. ', 5),
    'tags', jsonb_build_array('hr', 'onboarding'), 'schedule', jsonb_build_object('every', 'day', 'at', '03:00')
  ) || CASE WHEN mod(n, %(every)s) = 0
    THEN jsonb_build_object('credentials', jsonb_build_object('access_token', 'made-up-' || n)) ELSE '{}' END,
  '{}', 1, now(), now()
FROM generate_series(1, %(number)s) n
JOIN (SELECT id, row_number() OVER () - 1 AS place FROM knowledge_spaces) space ON space.place = mod(n, 1000)
"""

AWKWARD = 75
"""How many awkward sources a demo begins with; limit.py cannot move them all."""


def load(number: int) -> dict[str, Any]:
    """Migrate and load exactly `number` ordinary sources with legacy credentials."""
    call_command("migrate", verbosity=0)
    generated = int(number * 1.05) + 200
    with transaction.atomic():
        demo_data.load(connection, generated, demo_data.DEFAULT_SEED)
    awkward = [
        source.id for source, _ in zip(demo_data.sources(200, demo_data.DEFAULT_SEED), range(AWKWARD), strict=False)
    ]
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM sources WHERE id = ANY(%s)", [awkward])
        cursor.execute("DELETE FROM sources WHERE jsonb_typeof(metadata -> 'credentials') IS DISTINCT FROM 'object'")
        cursor.execute("DELETE FROM sources WHERE id NOT IN (SELECT id FROM sources ORDER BY id LIMIT %s)", [number])
        cursor.execute("VACUUM (FULL, ANALYZE) sources")
        cursor.execute("VACUUM ANALYZE")
        cursor.execute("SELECT count(*) FROM sources")
        (count,) = cursor.fetchone()
    return {"sources": count}


@contextmanager
def measured() -> Iterator[dict[str, Any]]:
    """Yield a dictionary that has, after the block, how long it took, and what the database was asked meanwhile."""
    result: dict[str, Any] = {"statements": 0, "commits": 0}

    def execute(execute: Callable[..., Any], sql: str, *arguments: Any) -> Any:
        result["statements"] += 1
        return execute(sql, *arguments)

    connection.ensure_connection()
    wrapped: Any = connections["default"]
    commit = wrapped._commit

    def counted_commit() -> None:
        result["commits"] += 1
        commit()

    wrapped._commit = counted_commit
    result["started"] = time.time()
    with connection.execute_wrapper(execute):
        yield result
    result["ended"] = time.time()
    result["peak_memory_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def backfill() -> dict[str, Any]:
    """Run one worker until nothing is left, as the command does."""
    check_store("default")
    steps = Backfill(using="default", store=secret_stores["default"], worker=new_worker_name(), lease=settings.LEASE)
    worker = BackfillWorker(steps, remaining=lambda: read_left("default"), batch_size=settings.BATCH_SIZE)
    with measured() as result:
        summary = worker.run()
    return {**result, "done": summary.moves[Move.ACTIVATE], "empty_claims": summary.empty_claims}


def cleanup() -> dict[str, Any]:
    """Run one worker as `run_secret_cleanup --due` does, sweep and patrol included."""
    steps = Cleanup(using="default", worker=new_worker_name(), lease=settings.LEASE)
    worker = CleanupWorker(
        steps,
        next_move_in=lambda: read_cleanup_left("default"),
        batch_size=settings.BATCH_SIZE,
        due_only=True,
    )
    with measured() as result:
        summary = worker.run()
    return {**result, "done": summary.outcomes[Outcome.ERASED]}


def rotate(number: int) -> dict[str, Any]:
    """Give new credentials to `number` sources, one after the other."""
    sources = _referenced(number)
    with measured() as result:
        for tenant, source in sources:
            services.rotate_credentials(tenant=tenant, source_id=source, credentials={"access_token": "made-up" * 50})
    return {**result, "done": len(sources)}


def resolve(number: int) -> dict[str, Any]:
    """Read the credentials of `number` sources, one after the other."""
    sources = _referenced(number)
    with measured() as result:
        for tenant, source in sources:
            services.resolve_credentials(tenant=tenant, source_id=source)
    return {**result, "done": len(sources)}


def few(number: int, refs: int) -> dict[str, Any]:
    """Migrate, make `number` sources without credentials and `refs` with, and move these."""
    call_command("migrate", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute(FEW_SPACES)
        cursor.execute(FEW_SOURCES, {"number": number, "every": number // refs})
        cursor.execute("VACUUM ANALYZE")
    backfill()
    return {"sources": number}


def verify(*, deep: bool = False) -> dict[str, Any]:
    """Run `verify_credentials` as a command does, with or without the objects."""
    run = Run("default", deep=deep)
    with measured() as result:
        run.run()
    return {**result, **run.looked_at, "done": run.done, "findings": run.findings.total}


def status() -> dict[str, Any]:
    """Read what `credential_status` shows."""
    with measured() as result:
        read = read_status("default")
    return {**result, "sources": read.sources["total"]}


def deep() -> dict[str, Any]:
    """Run it with the objects."""
    return verify(deep=True)


def _referenced(number: int) -> list[tuple[str, Any]]:
    return list(Source.objects.referenced().order_by("pk").values_list("knowledge_space__tenant_id", "pk")[:number])


if __name__ == "__main__":
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "load": load,
        "backfill": backfill,
        "rotate": rotate,
        "resolve": resolve,
        "cleanup": cleanup,
        "few": few,
        "status": status,
        "verify": verify,
        "deep": deep,
    }
    sys.stdout.write(json.dumps(commands[sys.argv[1]](*map(int, sys.argv[2:]))))

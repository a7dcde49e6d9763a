"""A child process of the bench: `load NUMBER` or `backfill`. Prints one JSON object."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import django
from django.core.management import call_command
from django.db import connection, connections, transaction

django.setup()

from example_project import demo_data  # noqa: E402
from kfs_credentials.backfill import Backfill  # noqa: E402
from kfs_credentials.batch import Move  # noqa: E402
from kfs_credentials.conf import settings  # noqa: E402
from kfs_credentials.leases import new_worker_name  # noqa: E402
from kfs_credentials.status import read_left  # noqa: E402
from kfs_credentials.stores import secret_stores  # noqa: E402
from kfs_credentials.worker import BackfillWorker  # noqa: E402

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


def backfill() -> dict[str, Any]:
    """Run one worker until nothing is left, and count its statements."""
    statements = commits = 0

    def counted(execute: Callable[..., Any], sql: str, *arguments: Any) -> Any:
        nonlocal statements
        statements += 1
        return execute(sql, *arguments)

    connection.ensure_connection()
    wrapped: Any = connections["default"]
    commit = wrapped._commit

    def counted_commit() -> None:
        nonlocal commits
        commits += 1
        commit()

    wrapped._commit = counted_commit
    steps = Backfill(using="default", store=secret_stores["default"], worker=new_worker_name(), lease=settings.LEASE)
    worker = BackfillWorker(steps, remaining=lambda: read_left("default"), batch_size=settings.BATCH_SIZE)
    started = time.time()
    with connection.execute_wrapper(counted):
        summary = worker.run()
    return {
        "started": started,
        "ended": time.time(),
        "moved": summary.moves[Move.ACTIVATE],
        "statements": statements,
        "commits": commits,
        "empty_claims": summary.empty_claims,
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(load(int(sys.argv[2])) if sys.argv[1] == "load" else backfill()))

"""A process that has Django loaded and forks others, so that a worker costs milliseconds and not half a second.

    python -m tests.crashes.nursery

Reads one JSON object a line and answers each with another. It has no connection and no thread of its own, so that a
child begins like a process that somebody started, and it ends like one. A child stays a zombie until it is asked
for: its id belongs to nobody else meanwhile. When standard input ends, all children are killed.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import django
from django.conf import settings
from django.core.checks import run_checks
from django.db import connections
from django.utils.module_loading import import_string

NEEDED = [
    "django.db.migrations.executor",
    "example_project.urls",
    "kfs_credentials.management.commands.reencrypt_secrets",
    "kfs_credentials.management.commands.run_credential_backfill",
    "kfs_credentials.management.commands.run_secret_cleanup",
    "psycopg",
    "tests.crashes.application",
    "tests.crashes.stores",
    "tests.torture.applications",
    "tests.torture.store",
]
"""What every child imports: done once, before it is forked."""

PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)


def main() -> None:
    """Serve; in a child, do what was ordered."""
    django.setup()
    for module in NEEDED:
        import_module(module)
    run_checks()  # which import more, and make the template engines: each command of a child makes them
    gc.collect()
    gc.freeze()  # else every child looks through all of this when it ends, and copies it to do so
    order = serve()
    if order is not None:
        work(order)


def serve() -> dict[str, Any] | None:
    """Return the order of a child in that child; None in the nursery, when standard input ends."""
    children: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            children.discard(order["wait"])
            answer = {"code": os.waitstatus_to_exitcode(status)}
        elif child := os.fork():
            children.add(child)
            answer = {"pid": child}
        else:
            assert isinstance(order, dict)
            return order
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return None


def work(order: dict[str, Any]) -> None:
    """Call a function with `order["arguments"]`: by its path, such as `manage.py`'s, or one of the tests' own.

    What it prints goes to the file `order["output"]`.
    """
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    connections.databases["default"].update(order["database"])
    settings.KFS_CREDENTIALS = {**settings.KFS_CREDENTIALS, **order["settings"]}
    with quick_end():
        import_string(order["function"])(order["arguments"])


@contextmanager
def quick_end() -> Iterator[None]:
    """End like any process, but for the modules: to take them apart costs more than many a child's whole work.

    Threads are waited for and everybody's handlers are called before, since this one was registered first.
    """
    code = 1  # of whatever is not caught

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(end)
    try:
        yield
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        raise
    except KeyboardInterrupt:
        atexit.unregister(end)  # it ends by the signal
        raise
    else:
        code = 0


if __name__ == "__main__":
    main()

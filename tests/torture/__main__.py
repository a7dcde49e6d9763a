"""The command: see `--help`."""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django

from example_project import postgres

if TYPE_CHECKING:
    from tests.torture.judge import Verdict
    from tests.torture.run import Torture

CLEAN, WRONG = 0, 1
ROUND = 15.0
"""Seconds of a round."""
LONG = 45.0
"""Seconds after which everything must have happened that is often enough."""

DESCRIPTION = """
Torture kfs_credentials: backfills, cleanups, re-encryptions, applications, and an old application that writes rows by
SQL, share one database and one store, on a PostgreSQL of their own. They are killed and frozen at random, at each step
in the store and in each COMMIT, their connections are cut before and after COMMIT, and the server crashes. After each
round everything is finished and looked at.
"""
EPILOG = """
The last line: `kills` of processes; `moves`, the events of the ledger; `retries`, calls that were made again since
nobody knew what had become of them; `lost`, sources that an application does not get what it must from; `doubled`,
secrets that are there twice; `leaked`, objects that belong to nothing and values that are where they must not be;
`failed`, jobs and refs that need a person, and processes that ended as none should. The exit code is 1 if anything was
lost, doubled or leaked, and if something did not happen that happens again and again in a run of 45 seconds or more.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="how long (default: 60); the round at hand is finished first"
    )
    parser.add_argument("--kills", type=int, help="how many processes to kill, however long that takes")
    parser.add_argument("--seed", type=int, help="of the random choices; moments are not seeded, and two runs differ")
    options = parser.parse_args(arguments)
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    random.seed(seed)
    print(f"seed {seed}; each round takes about {ROUND:.0f} s", flush=True)  # noqa: T201 - the command's output
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    logging.disable(logging.CRITICAL)  # what the judge comes across is told by its verdict
    with _torture() as torture:
        return _run(torture, options.seconds, options.kills)


@contextmanager
def _torture() -> Iterator[Torture]:
    from django.conf import settings

    from kfs_credentials.stores import secret_stores
    from kfs_credentials.stores.encrypted import EncryptedStore
    from tests.bound import bind_at_once
    from tests.crashes.database import ALIAS, fill, new_database
    from tests.crashes.scene import Scene
    from tests.crashes.workers import Nursery
    from tests.torture.run import Torture

    with (
        tempfile.TemporaryDirectory(prefix="kfs-torture-") as directory,
        Nursery() as nursery,
        postgres.temporary(["fsync=off", "max_connections=200"]) as server,
    ):
        secrets = Path(directory, "secrets")
        secrets.mkdir(mode=0o700)
        configured: Any = settings.KFS_CREDENTIALS
        configured["ERASE_GRACE"] = 0  # of what the judge decides as an operator
        configured["STORES"]["default"]["OPTIONS"]["storage"]["OPTIONS"]["location"] = str(secrets)
        settings.DATABASES["default"].update(server.django_database())
        with new_database(ALIAS, server=server.django_database()) as database:
            fill(ALIAS)
            store = secret_stores["default"]
            assert isinstance(store, EncryptedStore)
            scene = Scene(nursery, database, Path(directory), store)
            scene.execute("DELETE FROM sources")
            scene.settings |= {"LEASE": 1, "MAX_ATTEMPTS": 1000, "STORE_TIMEOUT": 5, "LOCK_TIMEOUT": 5}
            torture = Torture(scene, server)
            with torture.ready():
                bind_at_once(ALIAS, store)
                try:
                    yield torture
                finally:
                    torture.crew.end()
                    scene.close()


def _run(torture: Torture, seconds: float, kills: int | None) -> int:
    from tests.move_history import OF_REFS

    started = time.monotonic()
    totals: Counter[str] = Counter()

    def killed() -> int:
        return torture.crew.counts["kills"]

    def left() -> float:
        return ROUND if kills else started + seconds - time.monotonic()

    while (kills is None or killed() < kills) and left() > 0:
        verdict = torture.round(min(ROUND, left()), lambda: kills is not None and killed() >= kills)
        for kind, found in verdict._asdict().items():
            totals[kind] += len(found)
            for what in found:
                print(f"{kind}: {what}", flush=True)  # noqa: T201
        _report(torture, verdict, time.monotonic() - started)
    counts = torture.crew.counts + torture.counts
    for what, count in sorted(counts.items()):
        print(f"{what}: {count}")  # noqa: T201
    never = sorted(_often() - counts.keys()) if time.monotonic() - started > LONG else []
    for what in never:
        print(f"never: {what}")  # noqa: T201
    moves = torture.scene.value("SELECT count(*) FROM kfs_credentials_event WHERE kind = ANY (%s)", [[*OF_REFS]])
    print(  # noqa: T201
        f"kills {killed()} moves {moves} retries {torture.crew.counts['retries']} lost {totals['lost']} "
        f"doubled {totals['doubled']} leaked {totals['leaked']} failed {totals['failed']}"
    )
    return WRONG if totals["lost"] or totals["doubled"] or totals["leaked"] or never else CLEAN


def _often() -> set[str]:
    """Return what happens again and again, in the words in which it is counted."""
    from tests.crashes.stores import AFTER_PUT, BEFORE_PUT, IN_PUT
    from tests.torture.proxy import CUTS, FREEZES, KILLS
    from tests.torture.store import HERE

    at_steps = {f"{HERE}{place}" for place in (BEFORE_PUT, IN_PUT, AFTER_PUT)}
    at_commits = {f"{fate.value} COMMIT" for fate in (*KILLS, *FREEZES, *CUTS)}
    return {"kills", "freezes", "crashes", "terminations", "calls", "retries"} | at_steps | at_commits


def _report(torture: Torture, verdict: Verdict, seconds: float) -> None:
    crew = torture.crew.counts
    state = "well" if verdict.is_good else "NOT WELL"
    line = f"{seconds:5.0f} s: {crew['kills']} kills, {crew['freezes']} freezes, {torture.counts['crashes']} crashes, "
    line += f"{torture.counts['terminations']} terminations, {crew['calls']} changes acknowledged, "
    line += f"{torture.old.acts} writes by the old application, {torture.keys.changes} keys changed: all is {state}"
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())

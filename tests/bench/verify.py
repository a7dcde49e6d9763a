"""How long status and verification take where few of many sources have a secret; prints one line each, as JSON.

    python -m tests.bench.verify [--sources 1000000] [--refs 10000]

On a server like that of the bench.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import environ
from psycopg import sql

from example_project import postgres
from tests.bench.__main__ import ROOT, ROUND, Bench, finished


def main() -> None:
    """Make the database once; verify it twice, the second time from warm caches, then with the objects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=1_000_000)
    parser.add_argument("--refs", type=int, default=10_000)
    options = parser.parse_args()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kfs-bench-", dir=ROOT)))
        if url := os.environ.get("DATABASE_URL"):
            server = environ.Env.db_url_config(url, engine="django.db.backends.postgresql")
        else:
            server = stack.enter_context(postgres.temporary()).django_database()
        bench = Bench(server, scratch, options.sources)
        bench.drop(ROUND)
        stack.callback(bench.drop, ROUND)
        with bench.connect() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(ROUND)))
        secrets = scratch / "secrets"
        secrets.mkdir(mode=0o700)
        finished(bench.child("few", str(options.sources), str(options.refs), database=ROUND, directory=secrets))
        for what in ("status", "verify", "verify", "deep"):
            result = finished(bench.child(what, database=ROUND, directory=secrets))
            result["seconds"] = round(result.pop("ended") - result.pop("started"), 1)
            sys.stdout.write(json.dumps({"what": what, **result}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

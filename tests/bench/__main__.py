"""Rounds of `limit.py` and of our own work, in turn, on a fresh copy of the same database each; prints medians.

A round of ours is a backfill; after the one with a single worker come rotate and resolve on its result, then the
cleanup of all its refs.

    python -m tests.bench [--sources 20000] [--rounds 5] [--workers 1 2 4]

Needs a quiet machine to mean much; the rounds are interleaved so that what disturbs one disturbs the other. The server
is a private one with PostgreSQL's durable defaults, or the one that DATABASE_URL names (its role must be allowed to
create databases). Writes `bench.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import environ
import psycopg
from psycopg import sql
from rich.console import Console
from rich.table import Table

from example_project import postgres
from kfs_credentials.stores.encrypted import PROBE_NAME

ROOT = Path(__file__).resolve().parents[2]
LIMIT = ROOT.parent / "shared" / "bench" / "limit.py"
TEMPLATE = "kfs_bench_template"
ROUND = "kfs_bench_round"
ROTATE = 500
RESOLVE = 2_000
"""How many calls of a service are measured."""


@dataclass
class Row:
    """One line of the result."""

    name: str
    workers: int
    sources: int
    per_second: float
    ratio_to_limit: float | None = None
    ratio_to_backfill: float | None = None
    statements_per_source: float | None = None
    commits_per_source: float | None = None
    empty_claims: int | None = None
    deadlocks: int | None = None
    peak_memory_mb: float | None = None

    @classmethod
    def of(cls, name: str, results: list[dict[str, Any]], **others: Any) -> Row:
        """Make it of what the processes that shared the work printed."""
        seconds = max(result["ended"] for result in results) - min(result["started"] for result in results)
        done = sum(result["done"] for result in results)
        return cls(
            name,
            len(results),
            done,
            round(done / seconds),
            statements_per_source=sum(result["statements"] for result in results) / done,
            commits_per_source=sum(result["commits"] for result in results) / done,
            peak_memory_mb=max(result["peak_memory_mb"] for result in results),
            **others,
        )


class Bench:
    """The server, the template database, and a directory that each round has to itself."""

    def __init__(self, server: dict[str, Any], scratch: Path, sources: int) -> None:
        self.server = server
        self.scratch = scratch
        self.sources = sources

    def connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        """Connect to a database of the server."""
        return psycopg.connect(self.dsn(database), autocommit=True)

    def dsn(self, database: str) -> str:
        """Return the libpq string for a database of the server."""
        parts = {
            "host": self.server.get("HOST"),
            "port": self.server.get("PORT"),
            "user": self.server.get("USER"),
            "password": self.server.get("PASSWORD"),
        }
        return psycopg.conninfo.make_conninfo(
            dbname=database, **{name: value for name, value in parts.items() if value}
        )

    def child(self, *arguments: str, database: str, directory: Path) -> subprocess.Popen[str]:
        """Start a process of ours on a database of the server."""
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.bench.settings",
            "KFS_BENCH_DATABASE": json.dumps({**self.server, "NAME": database}),
            "KFS_BENCH_SECRETS": str(directory),
        }
        command = [sys.executable, "-m", "tests.bench.child", *arguments]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)

    def make_template(self) -> None:
        """Make the database that every round starts from."""
        self.drop(TEMPLATE)
        with self.connect() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
        finished(self.child("load", str(self.sources), database=TEMPLATE, directory=self.scratch))

    def drop(self, database: str) -> None:
        """Drop a database."""
        with self.connect() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database)))

    def fresh_round(self) -> Path:
        """Make the database of a round, and return the empty directory for its secrets."""
        self.drop(ROUND)
        with self.connect() as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(ROUND), sql.Identifier(TEMPLATE))
            )
            connection.execute("CHECKPOINT")
        directory = self.scratch / "secrets"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        return directory

    def limit(self) -> Row:
        """Run the yardstick once, on the seed's tables alone."""
        directory = self.fresh_round()
        with self.connect(ROUND) as connection:
            connection.execute("DROP INDEX kfs_credentials_legacy_idx")
        command = [sys.executable, str(LIMIT), "--dsn", self.dsn(ROUND), "--dir", str(directory)]
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        assert result["sources"] == self.sources, result
        return Row("limit", 1, self.sources, result["per_second"])

    def backfill(self, workers: int) -> Row:
        """Run our backfill once, with that many worker processes."""
        directory = self.fresh_round()
        children = [self.child("backfill", database=ROUND, directory=directory) for _ in range(workers)]
        results = [finished(child) for child in children]
        with self.connect(ROUND) as connection:
            left, deadlocks = connection.execute(
                "SELECT (SELECT count(*) FROM sources WHERE credential_ref IS NULL), deadlocks "
                "FROM pg_stat_database WHERE datname = current_database()"
            ).fetchone() or (None, None)
        row = Row.of(
            "backfill",
            results,
            empty_claims=sum(result["empty_claims"] for result in results),
            deadlocks=deadlocks,
        )
        assert (left, row.sources) == (0, self.sources), (left, row.sources)
        return row

    def services(self) -> list[Row]:
        """Rotate and resolve, one call after the other, on what the last backfill left."""
        directory = self.scratch / "secrets"
        rows = []
        for name, calls in (("rotate", ROTATE), ("resolve", RESOLVE)):
            result = finished(self.child(name, str(calls), database=ROUND, directory=directory))
            rows.append(Row.of(name, [result]))
        return rows

    def cleanup(self, backfill: Row) -> Row:
        """Let no source have a ref any more, and run the cleanup once; `backfill`: what it is compared with."""
        directory = self.scratch / "secrets"
        with self.connect(ROUND) as connection:
            connection.execute("UPDATE sources SET credential_ref = NULL")
            retired = connection.execute(
                "UPDATE source_secret_lifecycle_refs SET state = 'retired', "
                "next_delete_at = now() - interval '1 second', row_version = row_version + 1, updated_at = now()"
            ).rowcount
            connection.execute("CHECKPOINT")
        row = Row.of("cleanup", [finished(self.child("cleanup", database=ROUND, directory=directory))])
        left = [path for path in directory.rglob("*") if path.is_file() and path.name != PROBE_NAME]
        assert (row.sources, left) == (retired, []), (row.sources, retired, left[:3])
        row.ratio_to_backfill = round(row.per_second / backfill.per_second, 3)
        return row


def finished(child: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a child and return what it printed."""
    output, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"a child of the bench failed with {child.returncode}")
    result: dict[str, Any] = json.loads(output)
    return result


def median(rows: list[Row]) -> Row:
    """Return the median of every column of rows of one kind."""
    values: dict[str, Any] = {}
    for name in asdict(rows[0]):
        column = [getattr(row, name) for row in rows]
        values[name] = column[0] if isinstance(column[0], str | None) else round(statistics.median(column), 4)
    return Row(**values)


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kfs-bench-", dir=ROOT)))
        if url := os.environ.get("DATABASE_URL"):
            server = environ.Env.db_url_config(url, engine="django.db.backends.postgresql")
        else:
            server = stack.enter_context(postgres.temporary()).django_database()
        bench = Bench(server, scratch, options.sources)
        stack.callback(bench.drop, TEMPLATE)
        stack.callback(bench.drop, ROUND)
        bench.make_template()
        rows: dict[tuple[str, int], list[Row]] = {}
        for number in range(1, options.rounds + 1):
            started = time.monotonic()
            if LIMIT.exists():
                rows.setdefault(("limit", 1), []).append(bench.limit())
            for workers in options.workers:
                backfill = bench.backfill(workers)
                ours = [backfill, *bench.services(), bench.cleanup(backfill)] if workers == 1 else [backfill]
                for row in ours:
                    rows.setdefault((row.name, row.workers), []).append(row)
            sys.stderr.write(f"round {number} of {options.rounds}: {time.monotonic() - started:.0f} s\n")
    medians = [median(found) for found in rows.values()]
    if ("limit", 1) in rows:
        for row in medians:
            if row.name in ("rotate", "resolve"):
                continue
            row.ratio_to_limit = round(row.per_second / medians[0].per_second, 3)
    (ROOT / "bench.json").write_text(json.dumps([asdict(row) for row in medians], indent=2) + "\n")
    show(medians)
    if ("limit", 1) not in rows:
        sys.stderr.write("limit.py was not found, so there is nothing to compare with.\n")


def show(rows: list[Row]) -> None:
    """Print the medians."""
    table = Table(box=None, pad_edge=False)
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(
            *(
                "" if value is None else f"{value:,}" if not isinstance(value, str) else value
                for value in asdict(row).values()
            )
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

"""A server and processes that write down everything, and all that is left of what happened: the evidence.

What happens is told in `chapters.py`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from example_project import postgres
from tests.crashes.gates import Gate
from tests.crashes.scene import Call
from tests.crashes.workers import MANAGE, Nursery, Worker
from tests.leaks.watch import Sampler
from tests.waiting import until

CLEAN, WRONG_USE, LOOK, STOPPED, UNKNOWN = 0, 1, 3, 4, 5
"""Exit codes."""
FAILED = (WRONG_USE, LOOK, STOPPED, UNKNOWN)
APPLICATION = "tests.leaks.application.perform"

LOGS_EVERYTHING = [
    "fsync=off",
    "log_statement=all",
    "log_min_duration_statement=0",
    "log_parameter_max_length=-1",
    "log_parameter_max_length_on_error=-1",
    "log_error_verbosity=verbose",
    "log_min_error_statement=debug5",
    "log_min_messages=debug1",
    "log_lock_waits=on",
    "debug_print_plan=on",
    "debug_pretty_print=off",
    # A server that lacks one of these does not start: they are in contrib, of Debian and of the wheels.
    "shared_preload_libraries=auto_explain,pg_stat_statements",
    "auto_explain.log_min_duration=0",
    "auto_explain.log_analyze=on",
    "auto_explain.log_verbose=on",
    "auto_explain.log_parameter_max_length=-1",  # since PostgreSQL 16
    "auto_explain.log_nested_statements=on",
    "auto_explain.log_triggers=on",
    "auto_explain.log_settings=on",
    "pg_stat_statements.track=all",
    "pg_stat_statements.track_utility=on",
    "track_activity_query_size=64kB",
]
LOGS_NOTHING = [
    "log_statement=none",
    "log_min_duration_statement=-1",
    "log_min_error_statement=panic",
    "log_min_messages=panic",
    "debug_print_plan=off",
    "auto_explain.log_min_duration=-1",
    "pg_stat_statements.track=none",
    "track_activities=off",
]
STATEMENTS = "SELECT string_agg(query, E'\\n') FROM pg_stat_statements"


@dataclass
class Story:
    """What happens, and what is found afterwards: in `evidence`, by what it is."""

    server: postgres.Server
    nursery: Nursery
    directory: Path
    places: Sequence[Path]
    """Home, temporary files and working directory of all processes."""
    evidence: dict[str, bytes] = field(default_factory=dict)
    keys: list[str] = field(default_factory=lambda: [secrets.token_hex(32)])

    def __post_init__(self) -> None:
        for name in ("secrets", "gates"):
            (self.directory / name).mkdir(mode=0o700)

    # Somebody else.

    @contextmanager
    def session(self, *settings: str) -> Iterator[psycopg.Connection[Any]]:
        """Give a session of somebody else, with these settings of the server."""
        with psycopg.connect(self.server.dsn(), options=" ".join(f"-c {setting}" for setting in settings)) as session:
            yield session

    @contextmanager
    def silently(self) -> Iterator[psycopg.Connection[Any]]:
        """Give a session of which the server notes nothing: what an application wrote long ago."""
        with self.session(*LOGS_NOTHING) as session:
            yield session

    def write(self, statement: str, *parameters: Any) -> None:
        """Run a statement of which the server notes nothing."""
        with self.silently() as session:
            session.execute(statement, parameters or None)

    def ask(self, query: str, *parameters: Any) -> Any:
        """Return the one value that a query finds."""
        with self.silently() as session:
            row = session.execute(query, parameters).fetchone()
        assert row is not None, query
        return row[0]

    def id_of(self, name: str) -> str:
        """Return the id of the source of that name."""
        return str(self.ask("SELECT id FROM sources WHERE name = %s", name))

    def gate(self, name: str) -> Gate:
        """Put up a gate in the store."""
        return Gate(self.directory / "gates", name)

    # Processes.

    def start(
        self,
        *arguments: Any,
        function: str = MANAGE,
        fault: str = "",
        binding: bool = False,
        store: str = "tests.leaks.stores.QuotingStore",
        **settings: Any,
    ) -> Worker:
        """Start a command, as loud as it can be, or a function with these arguments.

        `fault`: of the store, see `stores.py`. `binding`: statements and parameters go to the server apart.
        """
        number = len(list(self.directory.glob("output *")))
        output = self.directory / f"output {number}"
        output.touch()
        what = " ".join(arguments) if function == MANAGE else " ".join(call for call, _ in arguments)
        storage = {
            "BACKEND": "kfs_credentials.stores.files.DurableFileStorage",
            "OPTIONS": {"location": str(self.directory / "secrets")},
        }
        options = {"storage": storage, "gates": str(self.directory / "gates"), "fault": fault}
        name = " ".join(filter(None, [str(number), what, fault]))
        return self.nursery.start(
            name,
            [*arguments, "--verbosity", "3", "--traceback"] if function == MANAGE else arguments,
            function=function,
            output=output,
            database={**self.server.django_database(), "OPTIONS": {"server_side_binding": binding}},
            settings={
                "KEYS": self.keys,
                "STORES": {"default": {"BACKEND": store, "OPTIONS": options}},
                "MAX_SECRET_BYTES": 256,
                "MAX_ATTEMPTS": 1,
                "RETRY_BASE": 0,
                "POLL_INTERVAL": 0.02,
                "ERASE_GRACE": 0,
                "LATE_WRITE_HORIZON": 0,
                "LOCK_TIMEOUT": 60,
                **settings,
            },
        )

    def finish(self, worker: Worker, *codes: int) -> str:
        """Wait for a process, which has to end with one of these exit codes (0 if none is given); keep what it said."""
        expected = codes or (CLEAN,)
        printed = worker.printed if worker.wait() not in expected else ""
        assert worker.code in expected, f"{worker.name} ended with {worker.code}, not {expected}\n{printed[-2000:]}"
        self.evidence[f"printed by {worker.name}"] = worker.output.read_bytes()
        return worker.printed

    def run(self, *arguments: str, code: int | Sequence[int] = CLEAN, **options: Any) -> str:
        """Run a command to its end."""
        codes = (code,) if isinstance(code, int) else code
        return self.finish(self.start(*arguments, **options), *codes)

    def call(self, *calls: Call, **options: Any) -> str:
        """Let an application make these calls, which fail or not, to the end; return what it printed."""
        return self.finish(self.start(*calls, function=APPLICATION, **options))

    @contextmanager
    def held_up(
        self, table: str, start: Callable[[], Worker], sampler: Sampler, code: int = CLEAN
    ) -> Iterator[set[str]]:
        """Start a process, hold it up in the statement that writes this table, and give what it is seen to be at."""
        with self.silently() as session:
            session.execute(f"LOCK TABLE {table} IN SHARE MODE")
            worker = start()
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'RowExclusiveLock'"
            until(lambda: self.ask(waiting) or worker.is_over, "it is held up")
            assert not worker.is_over, worker.printed
            yield sampler.sample()
            session.rollback()
        self.finish(worker, code)

    # What is left.

    def look_around(self) -> dict[str, bytes]:
        """Return what is there now: rows, statements, names and files."""
        found: dict[str, bytes] = {}
        with self.silently() as session:
            names = session.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
            for (table,) in names:
                # Left out is what may hold credentials still: in clear, or never called by that name.
                where = (
                    "WHERE credential_ref IS NOT NULL AND NOT metadata ?| ARRAY['auth', 'credentials']"
                    if table == "sources"
                    else ""
                )
                rows = session.execute(f"SELECT row::text FROM {table} AS row {where}").fetchall()
                found[f"table {table}"] = "\n".join(row for (row,) in rows).encode()
            found["the catalog"] = str(
                session.execute("SELECT relname, obj_description(oid) FROM pg_class").fetchall()
            ).encode()
            found["pg_stat_statements"] = str(session.execute(STATEMENTS).fetchone()).encode()
        objects = sorted(path for path in (self.directory / "secrets").rglob("*"))
        found["names and attributes in the store"] = "\n".join(
            f"{path} {path.stat()} {[(name, os.getxattr(path, name)) for name in os.listxattr(path)]}"
            for path in objects
        ).encode()
        found["objects in the store"] = b"\n".join(path.read_bytes() for path in objects if path.is_file())
        for place in self.places:
            left = sorted(place.rglob("*"))
            content = b"\n".join(path.read_bytes() for path in left if path.is_file())
            found[f"files in {place.name}"] = "\n".join(map(str, left)).encode() + content
        found["the server's log"] = self.server.log_file.read_bytes()
        return found

    def metadata(self, name: str, value: Any) -> None:
        """Give a source another metadata, as an old writer does."""
        self.write("UPDATE sources SET metadata = %s::jsonb WHERE name = %s", json.dumps(value), name)

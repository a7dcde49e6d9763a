"""All commands in turn, on a server and with logging that write down everything, and all that is left of it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from example_project import postgres
from tests.crashes.gates import Gate
from tests.crashes.stores import BEFORE_PUT
from tests.crashes.workers import Nursery, Worker
from tests.leaks.canary import CANARY, CREDENTIALS, OTHER_CANARY

CLEAN, WRONG_USE, LOOK, STOPPED = 0, 1, 3, 4
"""Exit codes."""

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
]
LOGS_NOTHING = [
    "log_statement=none",
    "log_min_duration_statement=-1",
    "log_min_error_statement=panic",
    "log_min_messages=panic",
    "debug_print_plan=off",
]

ROWS = """
INSERT INTO knowledge_spaces (id, tenant_id, slug, name, created_at, updated_at)
SELECT gen_random_uuid(), tenant, 'space', 'Space', now(), now() FROM unnest(ARRAY['tenant', 'rejected']) AS tenant;
ALTER TABLE sources ADD CONSTRAINT kfs_tests_source CHECK (credential_ref IS NULL OR name <> 'rejected');
ALTER TABLE source_credential_backfills ADD CONSTRAINT kfs_tests_job CHECK (tenant_id <> 'rejected');
"""
ROW = """
INSERT INTO sources (id, knowledge_space_id, type, status, name, uri, metadata, permission_scope, version, created_at,
  updated_at)
SELECT gen_random_uuid(), id, 'online_drive', 'active', row.name, 'https://files.example', row.metadata, '[]', 1,
  now(), now()
FROM (VALUES (%s::jsonb, %s, %s)) AS row (metadata, name, tenant)
JOIN knowledge_spaces space ON space.tenant_id = row.tenant
"""
CHANGE = """
UPDATE sources SET metadata = jsonb_set(metadata, '{credentials,access_token}', to_jsonb(%s::text))
WHERE name = 'changed'
"""
SOURCES: dict[str, Any] = {
    "one": {"credentials": CREDENTIALS},
    "two": {"credentials": {**CREDENTIALS, "number": 1, "more": [CANARY, {"deep": CANARY}]}},
    "changed": {"credentials": CREDENTIALS},
    "with another secret": {"credentials": CREDENTIALS, "auth": {"api_key": CANARY}},
    "too large": {"credentials": {"access_token": CANARY * 20}},
    "array": {"credentials": [CANARY]},
    "text": {"credentials": CANARY},
    "rejected": {"credentials": CREDENTIALS},
    "no job": {"credentials": CREDENTIALS},
    "none": {"title": "no credentials"},
}
# Triggers of somebody's that quote a row in their message: then PostgreSQL's own log has it, and nobody else.
QUOTE = """
CREATE FUNCTION kfs_tests_quote() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'not this one: %', (SELECT string_agg(metadata::text, ' ') FROM sources);
END $$;
"""
QUOTE_ON = "CREATE TRIGGER kfs_tests_quote BEFORE UPDATE ON {} FOR EACH ROW EXECUTE FUNCTION kfs_tests_quote()"


@dataclass
class Story:
    """What happens, and what is found afterwards: in `evidence`, by what it is."""

    server: postgres.Server
    nursery: Nursery
    directory: Path
    evidence: dict[str, bytes] = field(default_factory=dict)
    log_that_quotes: bytes = b""
    key: str = field(default_factory=lambda: secrets.token_hex(32))

    def __post_init__(self) -> None:
        for name in ("secrets", "gates"):
            (self.directory / name).mkdir(mode=0o700)

    @contextmanager
    def silently(self) -> Iterator[psycopg.Connection[Any]]:
        """Give a session of which the server logs nothing: what an application wrote long ago."""
        options = " ".join(f"-c {setting}" for setting in LOGS_NOTHING)
        with psycopg.connect(self.server.dsn(), options=options) as session:
            yield session

    def start(self, *arguments: str, fault: str | None = None, binding: bool = False, **settings: Any) -> Worker:
        """Start a command, as loud as it can be."""
        name = f"{len(self.evidence)} {' '.join(arguments)}"
        storage = {
            "BACKEND": "kfs_credentials.stores.files.DurableFileStorage",
            "OPTIONS": {"location": str(self.directory / "secrets")},
        }
        options = {"storage": storage, "gates": str(self.directory / "gates"), "fault": fault}
        return self.nursery.start(
            name,
            [*arguments, "--verbosity", "3", "--traceback"],
            output=self.directory / f"output {len(self.evidence)}",
            database={**self.server.django_database(), "OPTIONS": {"server_side_binding": binding}},
            settings={
                "KEYS": [self.key],
                "STORES": {"default": {"BACKEND": "tests.leaks.stores.QuotingStore", "OPTIONS": options}},
                "MAX_SECRET_BYTES": 256,
                "MAX_ATTEMPTS": 1,
                "RETRY_BASE": 0,
                "POLL_INTERVAL": 0.02,
                **settings,
            },
        )

    def finish(self, worker: Worker, code: int) -> str:
        """Wait for a command, which has to end with this exit code, and keep what it printed."""
        assert worker.wait() == code, worker.printed
        self.evidence[f"printed by {worker.name}"] = worker.output.read_bytes()
        return worker.printed

    def run(self, *arguments: str, code: int = CLEAN, **options: Any) -> str:
        """Run a command to its end."""
        return self.finish(self.start(*arguments, **options), code)

    def tell(self) -> None:
        """Let it all happen."""
        self.run("migrate")
        with self.silently() as session:
            session.execute(ROWS)
            for name, metadata in SOURCES.items():
                session.execute(ROW, [json.dumps(metadata), name, "rejected" if name == "no job" else "tenant"])
        self.run("check")
        self.run("run_credential_backfill", "--dry-run")
        self.run("run_credential_backfill", "--dry-run", "--format", "json")
        self.run("run_credential_backfill", fault="denied", code=STOPPED)
        self.run("run_credential_backfill", code=STOPPED)  # it has paused itself, and all others
        self.run("credential_status")
        self.run("bind_secret_store", "--dry-run")
        self.run("resume_credential_workers")
        self.run("run_credential_backfill", fault="unexpected", code=LOOK)
        self.look()
        self.run("retry_credential_backfill", code=WRONG_USE)
        self.run("retry_credential_backfill", "--all", "--dry-run")
        self.run("retry_credential_backfill", "--all")
        with Gate(self.directory / "gates", BEFORE_PUT) as gate:
            worker = self.start("run_credential_backfill", fault="unavailable", binding=True, MAX_ATTEMPTS=5)
            gate.wait()
            with self.silently() as session:
                session.execute(CHANGE, [OTHER_CANARY])
        self.finish(worker, LOOK)
        self.run("settle_unsupported_credentials", "--all", "--dry-run")
        self.run("settle_unsupported_credentials", "--all")
        self.look()
        self.run("dumpdata", "kfs_credentials", "--exclude", "kfs_credentials.source")
        self.evidence["the server's log"] = self.server.log_file.read_bytes()
        with self.silently() as session:
            session.execute(QUOTE)
        for table, code in (("sources", LOOK), ("source_credential_backfills", WRONG_USE)):
            self.run("retry_credential_backfill", "--all", "--code", "SOURCE_ROW_REJECTED")
            with self.silently() as session:
                session.execute(QUOTE_ON.format(table))
            self.run("run_credential_backfill", code=code)
        self.look()
        self.collect()
        self.log_that_quotes = self.server.log_file.read_bytes()

    def look(self) -> None:
        """Show the status in every way."""
        self.run("credential_status")
        self.run("credential_status", "--format", "json")
        self.run("credential_status", "--format", "prometheus")
        self.run("credential_status", "--check", code=STOPPED)  # one cannot get a job

    def collect(self) -> None:
        """Collect what is left: rows, names and files."""
        with psycopg.connect(self.server.dsn()) as session:
            tables = [
                table for (table,) in session.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
            ]
            for table in tables:
                # Left out is what may hold credentials still: in clear, or never called by that name.
                where = "WHERE credential_ref IS NOT NULL AND NOT metadata ? 'auth'" if table == "sources" else ""
                rows = session.execute(f"SELECT row::text FROM {table} AS row {where}").fetchall()
                self.evidence[f"table {table}"] = "\n".join(row for (row,) in rows).encode()
            self.evidence["the catalog"] = str(session.execute("SELECT relname FROM pg_class").fetchall()).encode()
        files = [path for path in (self.directory / "secrets").rglob("*") if path.is_file()]
        self.evidence["names in the store"] = "\n".join(map(str, files)).encode()
        self.evidence["objects in the store"] = b"\n".join(path.read_bytes() for path in files)
        left = [path for path in (self.directory / "tmp").rglob("*") if path.is_file()]
        self.evidence["temporary files"] = b"\n".join(str(path).encode() + path.read_bytes() for path in left)

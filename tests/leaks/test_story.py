"""The canary is in no statement, parameter, log line, message, column, name or file: only in the store's ciphertext."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import psycopg

from example_project import postgres
from tests.crashes.workers import Nursery
from tests.leaks.canary import CANARY, CREDENTIALS, OTHER_CANARY, hits
from tests.leaks.story import LOGS_EVERYTHING, Story


def test_the_canary_is_nowhere(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with (
        Nursery("tests.leaks.settings", TMPDIR=str(tmp_path / "tmp")) as nursery,
        postgres.temporary(LOGS_EVERYTHING) as server,
    ):
        story = Story(server, nursery, tmp_path)
        story.tell()
        found = {name: list(hits(content)) for name, content in story.evidence.items()}
        assert {name: forms for name, forms in found.items() if forms} == {}
        # So that this means something:
        check_that_everything_happened(story)
        check_that_the_search_finds_it(story)


def check_that_everything_happened(story: Story) -> None:
    """Each kind of trouble is in the evidence."""
    with psycopg.connect(story.server.dsn()) as session:
        rows = session.execute(
            "SELECT name, credential_ref IS NOT NULL, run_state, last_error_code FROM sources src "
            "LEFT JOIN source_credential_backfills job ON job.source_id = src.id"
        )
        ended = {name: (moved, state, code) for name, moved, state, code in rows}
    assert ended == {
        **dict.fromkeys(("one", "two", "changed", "with another secret"), (True, "succeeded", None)),
        "too large": (False, "failed", "SOURCE_SECRET_TOO_LARGE"),
        "rejected": (False, "queued", None),
        **dict.fromkeys(("array", "text", "no job", "none"), (False, None, None)),
    }
    events, refusals = (story.evidence[f"table kfs_credentials_{name}"] for name in ("event", "refusal"))
    for expected in (b"reserved", b"activated", b"retired", b"job_failed", b"job_retried", b"acknowledged"):
        assert expected in events, expected
    for expected in (b"store_denied", b"store_unavailable", b"database_refused"):
        assert expected in refusals, expected
    printed = b"".join(content for name, content in story.evidence.items() if name.startswith("printed"))
    for expected in (
        b"the secret store failed in an unexpected way (RuntimeError)",
        b"the secret store is unavailable, waiting",
        b"the store does not know this key",
        b"1 refreshed",
        b"1 that the database rejects",
        b"the database refused to change a row (RaiseException, SQLSTATE P0001)",
        b"Traceback (most recent call last):",
        b"SOURCE_ROW_REJECTED",
        b"UPDATE sources src SET",  # django.db.backends
        b"kfs_credentials_refusals_total{",
    ):
        assert expected in printed, expected
    log = story.evidence["the server's log"]
    for expected in (
        b"UPDATE sources src SET",
        b"DETAIL:  Failing row contains",
        b"violates check constraint",
        b"arameters: $1 = ",  # "Parameters" since PostgreSQL 16
        b":stmt_len",  # debug_print_plan
        b"duration: ",
        b"LOCATION: ",
    ):
        assert expected in log, expected


def check_that_the_search_finds_it(story: Story) -> None:
    """The same log has it as soon as somebody quotes a row or passes a value."""
    assert list(hits(story.log_that_quotes))  # by the triggers that quote rows
    before = len(story.server.log_file.read_bytes())
    with psycopg.connect(story.server.dsn()) as session:
        session.execute("SELECT length(%s)", [json.dumps(CREDENTIALS)])
    assert list(hits(story.server.log_file.read_bytes()[before:]))


def test_the_search_knows_its_forms() -> None:
    def told(canary: str) -> list[str | bytes]:
        document = f'{{"access_token":"{canary}"}}'.encode()
        return [
            json.dumps({"credentials": {"access_token": canary}}),
            repr({"access_token": canary}),
            canary.upper(),
            document.hex(),
            *(base64.b64encode(b"x" * before + document) for before in range(3)),
            base64.urlsafe_b64encode(document),
            f":constvalue 16 [ 64 0 0 0 {' '.join(map(str, document))} ]",
            hashlib.sha256(canary.encode()).hexdigest(),
            hashlib.md5(document).hexdigest(),
            base64.b64encode(hashlib.sha256(canary.encode()).digest()),
        ]

    for canary in (CANARY, OTHER_CANARY):
        for content in told(canary):
            assert list(hits(content)), content
    for content in told("something else that is no secret"):
        assert not list(hits(content)), content

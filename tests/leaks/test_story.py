"""The canary is in no statement, parameter, log line, message, column, name or file: only in the store's ciphertext."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from example_project import postgres
from tests.crashes.workers import Nursery
from tests.leaks import chapters
from tests.leaks.canary import CANARY, CREDENTIALS, OTHER_CANARY, hits
from tests.leaks.story import LOGS_EVERYTHING, Story
from tests.leaks.watch import Sampler, places, strace
from tests.stores.strace import require_strace


def test_the_canary_is_nowhere(tmp_path: Path) -> None:
    of_processes = [tmp_path / name for name in ("home", "tmp", "cwd")]
    for place in of_processes:
        place.mkdir()
    home, tmp, cwd = of_processes
    trace = tmp_path / "strace.log"
    can_trace = shutil.which("strace") is not None
    with (
        postgres.temporary(LOGS_EVERYTHING) as server,
        Nursery(
            "tests.leaks.settings",
            under=strace(trace) if can_trace or os.environ.get("CI") == "true" else (),
            cwd=cwd,
            environment={"HOME": str(home), "TMPDIR": str(tmp), "PYTHONDONTWRITEBYTECODE": "1"},
        ) as nursery,
    ):
        story = Story(server, nursery, tmp_path, of_processes)
        chapters.begin(story)
        with story.silently() as session, Sampler(session) as sampler:
            chapters.backfill(story, sampler)
            chapters.services(story, sampler)
            chapters.settling(story)
            chapters.cleanup(story)
            chapters.keys(story)
            chapters.operation(story)
            log = story.server.log_file.read_bytes()
            chapters.database_that_quotes(story)
            around = story.look_around()
            quoting = around.pop("the server's log")
            evidence = {
                **story.evidence,
                **around,
                "the server's log": log,
                "pg_stat_activity": "\n".join(sampler.seen).encode(),
            }
            assert {name: found for name, content in evidence.items() if (found := list(hits(content)))} == {}
            # So that this means something:
            check_that_everything_happened(story, evidence)
            assert sampler.samples > 100
            assert found_in(quoting), "the log has what triggers quote"
            check_that_the_search_finds_it(story, sampler)
    if can_trace:
        check_where_was_written(places(trace.read_text()), story)
    else:
        require_strace()


def found_in(content: bytes | str) -> bool:
    """Return whether any form of the canary is there."""
    return next(hits(content), None) is not None


def check_that_everything_happened(story: Story, evidence: Mapping[str, bytes]) -> None:
    """Each kind of trouble is in the evidence."""
    for name, expected in EXPECTED.items():
        content = b"".join(content for key, content in evidence.items() if key.startswith(name))
        assert [text for text in expected if text not in content] == [], name
    moved = story.ask("SELECT count(*) FROM sources WHERE credential_ref IS NOT NULL AND metadata ? 'credentials'")
    assert moved == 2, "one that was rescued, and one that came back: what lies in clear beside is a person's to settle"


EXPECTED = {
    "table kfs_credentials_event": [
        *(b"reserved", b"activated", b"retired", b"job_failed", b"job_retried", b"acknowledged", b"scrubbed", b"held"),
        *(b"erased", b"confirmed", b"rescued", b"reinstated", b"adopted", b"displaced", b"reencrypted", b"key_closed"),
    ],
    "table kfs_credentials_refusal": [
        *(b"store_denied", b"store_unavailable", b"database_refused", b"paused"),
        *(b"backfill", b"cleanup", b"reencrypt"),
    ],
    "printed": [
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
        b"which is refused by the database: rotate its credentials",  # a rescue
        b"services.py",  # of a service's traceback
    ],
    "the server's log": [
        b"UPDATE sources src SET",
        b"DETAIL:  Failing row contains",
        b"violates check constraint",
        b"a source cannot be changed: constraint kfs_tests_rescue",
        b"arameters: $1 = ",  # "Parameters" since PostgreSQL 16
        b":stmt_len",  # debug_print_plan
        b"duration: ",
        b"LOCATION: ",
        b"Query Text: ",  # auto_explain
    ],
    "pg_stat_statements": [
        b"UPDATE sources src SET",
        b"INSERT INTO source_secret_lifecycle_refs",
        b"kfs_credentials.ref",
        b"$kfs_credentials_point$",
        b"ALTER TABLE",
    ],
    "pg_stat_activity": [b"UPDATE sources src SET"],
    "names and attributes in the store": [b"__knowledge-secrets/"],
    "objects in the store": [b'"kid":', b'"ciphertext":'],
    "the catalog": [b"source_secret_lifecycle_refs"],
}


ONLY = {
    "auto_explain": ["log_statement=none", "log_min_duration_statement=-1", "debug_print_plan=off"],
    "debug_print_plan": ["log_statement=none", "log_min_duration_statement=-1", "auto_explain.log_min_duration=-1"],
    "log_statement": ["debug_print_plan=off", "log_min_duration_statement=-1", "auto_explain.log_min_duration=-1"],
}


def check_that_the_search_finds_it(story: Story, sampler: Sampler) -> None:
    """In each kind of evidence, as soon as somebody puts it there."""
    for name, settings in ONLY.items():
        before = len(story.server.log_file.read_bytes())
        with story.session(*settings) as session:
            session.execute(f"SELECT count(*) FROM sources WHERE name = '{CANARY}'")
            assert list(hits("\n".join(sampler.sample()))), "in pg_stat_activity"
        assert found_in(story.server.log_file.read_bytes()[before:]), name
    before = len(story.server.log_file.read_bytes())
    with story.session() as session:
        session.execute("SELECT length(%s)", [json.dumps(CREDENTIALS)])
    assert found_in(story.server.log_file.read_bytes()[before:]), "as a parameter"
    resolve = ("resolve_credentials", {"tenant": "tenant", "source_id": story.id_of("four")})
    printed = story.finish(story.start(resolve, function="tests.crashes.application.perform"))
    assert found_in(printed), "in what an application prints that asks for the value"
    dumped = story.run("dumpdata", "kfs_credentials.source")
    assert found_in(dumped), "in a dump of sources in clear"
    assert "CredentialsInClearWarning" in dumped
    # Whatever else can be looked at.
    with story.session() as session:
        session.execute(f"COMMENT ON TABLE sources IS '{CANARY}'")
        session.execute("UPDATE kfs_credentials_event SET detail = %s", [CANARY])
    for path in (*story.places, story.directory / "secrets"):
        (path / CANARY).write_text(OTHER_CANARY)
    found = {name for name, content in story.look_around().items() if found_in(content)}
    files = {f"files in {path.name}" for path in story.places}
    assert found == files | {
        *("table kfs_credentials_event", "the catalog", "pg_stat_statements", "the server's log"),
        *("names and attributes in the store", "objects in the store"),
    }


def check_where_was_written(found: Collection[str], story: Story) -> None:
    """No process has written, made or connected to anything but the store, the server, and what the test gave it."""
    root = story.directory
    store, gates, outputs = (f"{root}/secrets/", f"{root}/gates/", f"{root}/output ")
    server = f"{story.server.socket_directory}/"
    assert all(any(path.startswith(place) for path in found) for place in (store, outputs, server)), "it is seen"
    ours = (store, gates, outputs, server, "/dev/null", "/var/run/nscd/")
    assert [path for path in found if not path.startswith(ours)] == []


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

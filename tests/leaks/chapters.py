"""What happens in the story, chapter by chapter: each command and each service, and what can go wrong with it."""

from __future__ import annotations

import json
import secrets
from typing import Any
from uuid import uuid4

from tests.crashes.scene import Call
from tests.crashes.stores import BEFORE_DELETE, BEFORE_PUT
from tests.leaks.canary import CANARY, CREDENTIALS, OTHER_CANARY
from tests.leaks.story import CLEAN, FAILED, LOOK, STOPPED, WRONG_USE, Story
from tests.leaks.watch import Sampler

OTHER = {"access_token": OTHER_CANARY}
FAULTS = ("denied", "unavailable", "unexpected")

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
    "three": {"credentials": CREDENTIALS},
    "four": {"credentials": CREDENTIALS},
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
QUOTE_ON = """
CREATE TRIGGER kfs_tests_quote BEFORE INSERT OR UPDATE OR DELETE ON {0} FOR EACH ROW EXECUTE FUNCTION kfs_tests_quote()
"""


def begin(story: Story) -> None:
    """Make the tables, and sources as an application left them."""
    story.write("CREATE EXTENSION pg_stat_statements")
    story.run("migrate")
    with story.silently() as session:
        session.execute(ROWS)
        for name, metadata in SOURCES.items():
            session.execute(ROW, [json.dumps(metadata), name, "rejected" if name == "no job" else "tenant"])
    story.run("check")


def backfill(story: Story, sampler: Sampler) -> None:
    """The backfill, its dry run and its retries; a store that fails in each way."""
    story.run("run_credential_backfill", "--dry-run")
    story.run("run_credential_backfill", "--dry-run", "--format", "json")
    story.run("run_credential_backfill", fault="put denied", code=STOPPED)
    story.run("run_credential_backfill", code=STOPPED)  # it has paused itself, and all others
    story.run("credential_status")
    story.run("bind_secret_store", "--dry-run")
    story.run("resume_credential_workers")
    story.run("run_credential_backfill", fault="put unexpected", code=LOOK)
    look(story)
    story.run("retry_credential_backfill", code=WRONG_USE)
    story.run("retry_credential_backfill", "--all", "--dry-run")
    story.run("retry_credential_backfill", "--all")
    with story.gate(BEFORE_PUT) as gate:
        worker = story.start("run_credential_backfill", fault="put unavailable", binding=True, MAX_ATTEMPTS=5)
        gate.wait()
        story.write(CHANGE, OTHER_CANARY)
    story.finish(worker, LOOK)
    story.write(ROW, json.dumps({"credentials": CREDENTIALS}), "seen from outside", "tenant")
    with story.held_up("sources", lambda: story.start("run_credential_backfill"), sampler, LOOK) as seen:
        assert any("metadata = src.metadata - 'credentials'" in query for query in seen)


def services(story: Story, sampler: Sampler) -> None:
    """Each service, used well and wrongly; a store that fails in each way."""
    space = str(story.ask("SELECT id FROM knowledge_spaces WHERE tenant_id = 'tenant'"))
    first, second = str(uuid4()), str(uuid4())
    new = {"tenant": "tenant", "space_id": space, "type": "web", "uri": "https://files.example"}
    one, clear = {"tenant": "tenant", "source_id": first}, {"tenant": "tenant", "source_id": story.id_of("array")}
    story.call(
        ("create_source", {**new, "name": "created", "source_id": first, "credentials": CREDENTIALS}),
        ("create_source", {**new, "name": "created", "source_id": second, "metadata": {"credentials": CREDENTIALS}}),
        ("create_source", {**new, "name": "none", "credentials": {**CREDENTIALS, "n": float("nan")}}),
        ("create_source", {**new, "name": "none", "credentials": [CANARY]}),
        ("create_source", {**new, "name": "none", "credentials": {"access_token": CANARY * 20}}),
        ("create_source", {**new, "name": "none", "metadata": {"credentials": CANARY}}),
        (
            "create_source",
            {**new, "name": "none", "credentials": CREDENTIALS, "metadata": {"credentials": CREDENTIALS}},
        ),
        ("create_source", {**new, "name": "rejected", "credentials": CREDENTIALS}),
        ("resolve_credentials", one),
        ("resolve_credentials", {**one, "tenant": "another"}),
        ("resolve_credentials", clear),
        ("rotate_credentials", {**one, "credentials": OTHER}),
        ("rotate_credentials", {**one, "credentials": CREDENTIALS, "expected_version": 99}),
        ("rotate_credentials", {"tenant": "tenant", "source_id": story.id_of("rejected"), "credentials": OTHER}),
        ("revoke_credentials", {"tenant": "tenant", "source_id": second}),
        ("delete_source", {"tenant": "tenant", "source_id": second}),
    )
    rotate: Call = ("rotate_credentials", {**one, "credentials": CREDENTIALS})
    for fault in FAULTS:
        story.call(("resolve_credentials", one), fault=f"get {fault}")
        story.call(rotate, ("create_source", {**new, "name": "none", "credentials": CREDENTIALS}), fault=f"put {fault}")
    with story.held_up(
        "sources", lambda: story.start(rotate, function="tests.leaks.application.perform"), sampler
    ) as seen:
        assert any("SET\n  credential_ref" in query for query in seen)
    story.call(rotate, ("resolve_credentials", one), binding=True)


def settling(story: Story) -> None:
    """What lies in clear beside a ref, and what is of no supported shape."""
    story.run("settle_unsupported_credentials", "--all", "--dry-run")
    story.run("settle_unsupported_credentials", story.id_of("text"))
    for fault in ("put denied", "put unexpected"):
        story.run("settle_unsupported_credentials", story.id_of("array"), "--wrap", "token", fault=fault, code=FAILED)
    resume(story)
    story.run("settle_unsupported_credentials", story.id_of("array"), "--wrap", "token")
    story.metadata("one", {"credentials": CREDENTIALS})  # the same, of an old writer
    story.metadata("two", {"credentials": OTHER})
    story.metadata("three", {"credentials": OTHER})
    story.run("verify_credentials", "--skip", "metadata", code=LOOK)
    story.run("verify_credentials", "--format", "json", code=LOOK)
    settle = ("settle_credential_conflict", "--yes", "--source", story.id_of("two"), "--keep")
    for fault in FAULTS:
        story.run("verify_credentials", "--deep", fault=f"get {fault}", code=FAILED)
    for fault in ("denied", "unexpected"):
        story.run(*settle, "ref", fault=f"get {fault}", code=FAILED)
        story.run(*settle, "plaintext", fault=f"put {fault}", code=FAILED)
    story.run("verify_credentials", "--deep", fault="list unexpected", code=FAILED)
    story.run("verify_credentials", "--scrub-same", "--yes", fault="get unexpected", code=FAILED)
    resume(story)
    story.run("verify_credentials", "--scrub-same", "--yes", code=LOOK)
    story.run("settle_credential_conflict", "--yes", "--source", story.id_of("two"), "--keep", "ref")
    story.run("settle_credential_conflict", "--yes", "--source", story.id_of("three"), "--keep", "plaintext")
    story.run("verify_credentials", "--deep", "--skip", "metadata")


def cleanup(story: Story) -> None:
    """Retire, erase, confirm; repair what stale saves did, with credentials in clear beside it; patrol."""
    stale = {name: story.ask("SELECT credential_ref FROM sources WHERE name = %s", name) for name in ("three", "four")}
    rotations: list[Call] = [
        ("rotate_credentials", {"tenant": "tenant", "source_id": story.id_of(name), "credentials": OTHER})
        for name in ("three", "four", "one")
    ]
    story.call(*rotations)
    story.run("run_secret_cleanup", "--dry-run")
    for fault in FAULTS:
        story.run("run_secret_cleanup", "--due", fault=f"delete {fault}", code=(CLEAN, *FAILED))
    resume(story)
    with story.gate(BEFORE_DELETE) as gate:
        worker = story.start("run_secret_cleanup")
        gate.wait()
        worker.kill()
    story.evidence[f"printed by {worker.name}"] = worker.output.read_bytes()
    for name, ref in stale.items():
        story.write("UPDATE sources SET credential_ref = %s WHERE name = %s", ref, name)
        story.metadata(name, {"credentials": CREDENTIALS})
    expire_leases(story)
    story.write("ALTER TABLE sources ADD CONSTRAINT kfs_tests_rescue CHECK (false) NOT VALID")
    story.run("run_secret_cleanup", "--due", code=LOOK)
    story.write("ALTER TABLE sources DROP CONSTRAINT kfs_tests_rescue")
    for fault in ("get denied", "get unexpected", "put unexpected", "list unexpected"):
        story.run("run_secret_cleanup", "--due", fault=fault, code=(CLEAN, *FAILED))
    resume(story)
    expire_leases(story)
    story.run("run_secret_cleanup", "--due", "--format", "json", code=(CLEAN, LOOK))
    # One whose source is gone, one that came back before anybody claimed it, and one that nobody has registered.
    story.write("DELETE FROM sources WHERE name = 'seen from outside'")
    ref = story.ask("SELECT credential_ref FROM sources WHERE name = 'changed'")
    story.call(("rotate_credentials", {"tenant": "tenant", "source_id": story.id_of("changed"), "credentials": OTHER}))
    story.write("UPDATE sources SET credential_ref = %s WHERE name = 'changed'", ref)
    story.metadata("changed", {"credentials": CREDENTIALS})
    ref = story.ask("SELECT credential_ref FROM sources WHERE name = 'with another secret'")
    for table in ("source_secret_lifecycle_refs", "kfs_credentials_secret_object"):
        story.write(f"DELETE FROM {table} WHERE credential_ref = %s", ref)
    story.run("run_secret_cleanup", "--due", code=LOOK)
    look(story)


def keys(story: Story) -> None:
    """A second key, under which everything is sealed anew."""
    story.keys = [secrets.token_hex(32), *story.keys]
    story.run("reencrypt_secrets", "--dry-run")
    for fault in FAULTS:
        story.run("reencrypt_secrets", fault=f"replace {fault}", code=(CLEAN, *FAILED))
    resume(story)
    story.run("reencrypt_secrets", "--recheck", "--format", "json")
    story.keys = story.keys[:1]
    story.run("verify_credentials", "--deep", "--restart", "--format", "json", code=LOOK)


def operation(story: Story) -> None:
    """What is left of the commands."""
    story.run("pause_credential_workers", "--reason", "the story")
    story.run("run_secret_cleanup", code=STOPPED)
    story.run("resume_credential_workers")
    story.run("bind_secret_store", "--yes")
    story.run("generate_secret_key")
    story.run("check", "--deploy")
    story.run("dumpdata", "kfs_credentials", "--exclude", "kfs_credentials.source")


def database_that_quotes(story: Story) -> None:
    """A trigger of somebody's quotes all rows, wherever anybody writes."""
    story.metadata("one", {"credentials": CREDENTIALS})
    story.metadata("two", {"credentials": OTHER})
    story.write(QUOTE)
    space = str(story.ask("SELECT id FROM knowledge_spaces WHERE tenant_id = 'tenant'"))
    new = {"tenant": "tenant", "space_id": space, "type": "web", "uri": "u", "name": "none"}
    one, two = ({"tenant": "tenant", "source_id": story.id_of(name)} for name in ("one", "two"))
    for table in ("sources", "source_secret_lifecycle_refs", "source_credential_backfills"):
        retry = ("retry_credential_backfill", "--all", "--code", "SOURCE_ROW_REJECTED")
        story.run(*retry, code=(CLEAN, WRONG_USE))  # if it did fail
        story.write(QUOTE_ON.format(table))
        story.call(
            ("create_source", {**new, "credentials": CREDENTIALS}),
            ("rotate_credentials", {**one, "credentials": OTHER}),
            ("revoke_credentials", one),
            ("delete_source", {"tenant": "tenant", "source_id": story.id_of("none")}),
        )
        commands: list[tuple[str, ...]] = [
            ("run_credential_backfill",),
            ("run_secret_cleanup", "--due"),
            ("settle_unsupported_credentials", story.id_of("text"), "--wrap", "token"),
            ("verify_credentials", "--scrub-same", "--yes", "--skip", "metadata"),
            ("settle_credential_conflict", "--yes", "--source", two["source_id"], "--keep", "ref"),
            ("settle_credential_conflict", "--yes", "--source", two["source_id"], "--keep", "plaintext"),
            ("reencrypt_secrets", "--recheck"),
        ]
        for command in commands if table != "source_credential_backfills" else commands[:1]:  # nobody else writes it
            story.run(*command, code=(CLEAN, *FAILED))
        story.write(f"DROP TRIGGER kfs_tests_quote ON {table}")


def look(story: Story) -> None:
    """Show the status in every way."""
    story.run("credential_status")
    story.run("credential_status", "--format", "json")
    story.run("credential_status", "--format", "prometheus")
    story.run("credential_status", "--check", code=STOPPED)  # one cannot get a job


def resume(story: Story) -> None:
    """Go on: a store that denies access made somebody pause all workers."""
    story.run("resume_credential_workers")


def expire_leases(story: Story) -> None:
    """Move every lease into the past, so that nobody has to wait for it."""
    for table in ("source_credential_backfills", "source_secret_lifecycle_refs", "kfs_credentials_round"):
        story.write(
            f"UPDATE {table} SET lease_expires_at = now() - interval '1 second' WHERE lease_expires_at < 'infinity'"
        )

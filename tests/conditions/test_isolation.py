"""Whatever the database's default isolation level: every transaction that we open and that writes is READ COMMITTED.

A check after a lock would read an old snapshot otherwise. What joins a caller's transaction has the caller's level: see
tests/services/test_transactions.py.
"""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from django.db import connections, transaction

from kfs_credentials import services
from kfs_credentials.models import SourceCredentialBackfill, SourceSecretLifecycleRef
from kfs_credentials.operations import retry_failed_jobs
from kfs_credentials.pause import pause_workers, resume_workers
from kfs_credentials.ref_operations import erase_again
from kfs_credentials.status import read_left, read_status
from tests.crashes.database import ALIAS
from tests.crashes.scene import CLEAN, KINDS, LOOK, Scene
from tests.crashes.stage import LEDGER, Stage

SOURCES = 24
TABLES = (
    "sources",
    "source_credential_backfills",
    "source_secret_lifecycle_refs",
    *(f"kfs_credentials_{name}" for name in ("secret_object", "round", "event", "binding", "pause", "refusal")),
    *(f"kfs_credentials_{name}" for name in ("closed_key", "checkpoint", "acknowledgement")),
)
"""All that is written but the ticks: those are one statement each, which waits for nobody and checks nothing."""

NOTES_LEVEL = """
CREATE TABLE kfs_tests_levels (who TEXT NOT NULL, level TEXT NOT NULL);
CREATE FUNCTION kfs_tests_note_level() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO kfs_tests_levels VALUES (TG_TABLE_NAME, current_setting('transaction_isolation'));
  RETURN NULL;
END $$;
"""
ON_TABLE = """
CREATE TRIGGER kfs_tests_level AFTER INSERT OR UPDATE OR DELETE ON {table}
  FOR EACH STATEMENT EXECUTE FUNCTION kfs_tests_note_level();
"""

LEVELS = ("repeatable read", "serializable")


def watch(scene: Scene, level: str) -> None:
    """Let the database have that default, and note the level of each transaction that writes a row of ours."""
    scene.execute(NOTES_LEVEL)
    for table in TABLES:
        scene.execute(ON_TABLE.format(table=table))
    scene.configure(f"SET default_transaction_isolation = '{level}'")
    connections[ALIAS].close()
    assert scene.value("SHOW default_transaction_isolation") == level


def check(scene: Scene, *written: str) -> None:
    """It was always READ COMMITTED; these tables were written, at least."""
    levels = scene.rows("SELECT DISTINCT who, level FROM kfs_tests_levels")
    assert [one for one in levels if one[1] != "read committed"] == []
    assert set(written) <= {who for who, _ in levels}


@pytest.mark.parametrize("level", LEVELS)
def test_backfills(scene: Scene, level: str) -> None:
    watch(scene, level)
    for worker in [scene.start(BATCH_SIZE=size) for size in (8, 10, 12)]:
        assert worker.wait() == LOOK, worker.printed
    check(scene, *TABLES[:4])
    scene.check_end()
    assert scene.attempts() == 0


@pytest.mark.parametrize("level", LEVELS)
def test_cleanups_applications_and_another_key(scene: Scene, level: str) -> None:
    """Several of each at once, which are after the same rows."""
    stage = Stage(scene, SOURCES)
    stage.orphans()
    stage.orphans()
    watch(scene, level)
    (tenant, source, _), *_ = stage.sources
    (space,) = scene.new_spaces(tenant, 1)
    made = {
        "tenant": tenant,
        "space_id": space,
        "type": "web",
        "name": "n",
        "uri": "u",
        "credentials": {"token": "new"},
    }
    rotated = [stage.sources.pop()[:2] for _ in range(4)]
    stage.values |= {one: {"token": "new"} for one in rotated}
    revoked = {"tenant": tenant, "source_id": source}
    stage.values[tenant, source] = None
    running = [
        *(scene.start_cleanup(BATCH_SIZE=size) for size in (1, 2)),
        *(scene.start_application(*[stage.rotation(*one) for one in rotated]) for _ in range(2)),
        scene.start_application(("create_source", made), ("revoke_credentials", revoked), ("delete_source", revoked)),
    ]
    for worker in running:
        assert worker.wait() in (CLEAN, LOOK), worker.printed
        assert not [answer for answer in worker.answers if "error" in answer], worker.answers
    ((new, _),) = scene.rows("SELECT id::text, name FROM sources WHERE knowledge_space_id = %s", [space])
    stage.values[tenant, new] = {"token": "new"}
    assert scene.value(f"SELECT sum(delete_attempts) FROM {LEDGER}") == 0
    scene.keys.insert(0, secrets.token_bytes(32).hex())
    reencryption = scene.start_reencryption()
    assert reencryption.wait() == CLEAN, reencryption.printed
    scene.keys.pop()
    verification = scene._start("django.core.management.execute_from_command_line", VERIFY, {})
    assert verification.wait() == CLEAN, verification.printed
    check(scene, *TABLES[:7], "kfs_credentials_closed_key", "kfs_credentials_checkpoint")
    scene.check_values(stage.values)


VERIFY = ("verify_credentials", "--deep", "--skip", "metadata", "--erase-unknown", "--yes")


@pytest.mark.parametrize("level", LEVELS)
def test_status_and_what_a_person_does(scene: Scene, level: str) -> None:
    """As the commands and the admin's actions do it."""
    scene.drain()
    watch(scene, level)
    before = read_status(ALIAS)
    assert before.backfills["failed"] == KINDS["too_large"]
    assert read_left(ALIAS) == (0, 0, 0)
    failed = list(SourceCredentialBackfill.objects.using(ALIAS).failed().values_list("pk", flat=True))
    assert retry_failed_jobs(ALIAS, [(pk, None) for pk in failed]).queued == len(failed)
    source, tenant = scene.rows(
        "SELECT src.id::text, tenant_id FROM sources src JOIN knowledge_spaces space ON space.id = knowledge_space_id "
        "WHERE credential_ref IS NOT NULL LIMIT 1"
    )[0]
    services.revoke_credentials(tenant=tenant, source_id=source, using=ALIAS)
    row = SourceSecretLifecycleRef.objects.using(ALIAS).get(source_id=source, state="retired")
    parked = "UPDATE kfs_credentials_secret_object SET attention = 'erasure_fails' WHERE credential_ref = %s"
    with scene.session() as session:
        session.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        session.execute(parked, [row.credential_ref])
        session.commit()
    assert erase_again(ALIAS, [(row.pk, None)]).done == 1
    assert pause_workers(ALIAS, by="tests", reason="a look")
    assert read_status(ALIAS).pause is not None
    assert resume_workers(ALIAS)
    scene.drain()
    check(scene, *TABLES[:3], "kfs_credentials_event", "kfs_credentials_pause")


@pytest.mark.parametrize("level", LEVELS)
def test_in_a_transaction_of_the_caller(scene: Scene, level: str, kfs_settings: Any) -> None:
    """What joins it does its work at the caller's level, whole or not at all."""
    kfs_settings(ERASE_GRACE=0)
    stage = Stage(scene, SOURCES)
    scene.configure(f"SET default_transaction_isolation = '{level}'")
    connections[ALIAS].close()
    first, second, third = stage.sources[:3]

    def join() -> None:
        assert scene.value("SHOW transaction_isolation") == level
        services.revoke_credentials(tenant=first[0], source_id=first[1], using=ALIAS)
        services.delete_source(tenant=second[0], source_id=second[1], using=ALIAS)
        found = services.resolve_credentials(tenant=third[0], source_id=third[1], using=ALIAS)
        assert dict(found) == {"token": third[1]}

    with transaction.atomic(using=ALIAS):
        join()
        transaction.set_rollback(True, using=ALIAS)
    scene.check_values(stage.values)
    with transaction.atomic(using=ALIAS):
        join()
    stage.values |= {first[:2]: None, second[:2]: None}
    scene.recover()
    stage.check()

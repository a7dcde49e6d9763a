"""Migration 0005: refs that are not in the ledger are registered, then both directions are checked.

It aborts whole, before it is recorded, on every collision and every partial registry; after repair it passes.
"""

import re
import uuid
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import DatabaseError

from kfs_credentials import sql

from .conftest import MakeHost
from .hosts import MIGRATIONS, SEED, SEED_MESSAGES, STARTS, Host, refusal

MISSING, ORPHANED = SEED_MESSAGES
GUARD = "0005_register_refs"

HINTS = {
    MISSING: "Repair the rows of source_secret_lifecycle_refs or sources.credential_ref, then migrate again; "
    "nothing was recorded.",
    ORPHANED: "Set these ledger rows to retired, or repair their sources, then migrate again; nothing was recorded.",
}


def source(number: int) -> str:
    return f"a0000000-0000-4000-8000-{number:012}"


def space(number: int) -> str:
    return f"50000000-0000-4000-8000-{number:012}"


def ref(number: int) -> str:
    return f"source-secret:v1:b0000000-0000-4000-8000-{number:012}"


def ledger_row(number: int, **columns: Any) -> str:
    """Return the statement that adds an active ledger row for ref `number` of source `number`."""
    values = {
        "id": str(uuid.uuid4()),
        "tenant_id": "tenant-a",
        "knowledge_space_id": space(1 + number % 3),
        "source_id": source(number),
        "credential_ref": ref(number),
        "operation_id": f"operation-{number}",
        "purpose": "create",
        "state": "active",
        "recover_after": "2025-06-07 08:14:10+00",
        "delete_attempts": "0",
        "row_version": "0",
        "created_at": "2025-06-07 08:09:10+00",
        "updated_at": "2025-06-07 08:09:10+00",
    } | columns
    listed = ", ".join(f"'{value}'" for value in values.values())
    return f"INSERT INTO source_secret_lifecycle_refs ({', '.join(values)}) VALUES ({listed})"


@dataclass(frozen=True)
class Fault:
    """What makes the migration refuse a seeded database, what it says of it, and a repair."""

    sql: str
    message: str
    repair: str


LEASE = "worker_id = 'node-1', lease_token = gen_random_uuid(), lease_expires_at = now(), heartbeat_at = now()"
ACTIVE_AGAIN = f"""
UPDATE source_secret_lifecycle_refs SET state = 'active', worker_id = NULL, lease_token = NULL,
  lease_expires_at = NULL, heartbeat_at = NULL, deleted_at = NULL
WHERE credential_ref = '{ref(2)}'
"""


def set_ledger(number: int, change: str) -> str:
    return f"UPDATE source_secret_lifecycle_refs SET {change} WHERE credential_ref = '{ref(number)}'"


def both(first: str, second: str) -> str:
    return f"{first}; {second}"


NOT_ACTIVE = f"{MISSING}: 1 source(s) (1 whose ledger row is not active)"
FAULTS = {
    # A source names a ref, and the ledger says otherwise.
    "staged": Fault(set_ledger(2, "state = 'staged'"), NOT_ACTIVE, ACTIVE_AGAIN),
    "candidate": Fault(set_ledger(2, "state = 'candidate'"), NOT_ACTIVE, ACTIVE_AGAIN),
    "retired": Fault(set_ledger(2, "state = 'retired'"), NOT_ACTIVE, ACTIVE_AGAIN),
    "deleting": Fault(set_ledger(2, f"state = 'deleting', {LEASE}"), NOT_ACTIVE, ACTIVE_AGAIN),
    "deleted": Fault(set_ledger(2, "state = 'deleted', deleted_at = now()"), NOT_ACTIVE, ACTIVE_AGAIN),
    "another tenant": Fault(
        set_ledger(1, "tenant_id = 'tenant-b'"),
        f"{MISSING}: 1 source(s) (1 of another tenant)",
        set_ledger(1, "tenant_id = 'tenant-a'"),
    ),
    "another space": Fault(
        set_ledger(1, f"knowledge_space_id = '{space(1)}'"),
        f"{MISSING}: 1 source(s) (1 of another knowledge space)",
        set_ledger(1, f"knowledge_space_id = '{space(2)}'"),
    ),
    "another source": Fault(
        set_ledger(1, f"source_id = '{source(4)}'"),
        f"{MISSING}: 1 source(s) (1 of another source)",
        set_ledger(1, f"source_id = '{source(1)}'"),
    ),
    "refs that were exchanged": Fault(
        both(set_ledger(1, f"source_id = '{source(4)}'"), set_ledger(4, f"source_id = '{source(1)}'")),
        f"{MISSING}: 2 source(s) (2 of another source)",
        both(set_ledger(1, f"source_id = '{source(1)}'"), set_ledger(4, f"source_id = '{source(4)}'")),
    ),
    "several at once": Fault(
        both(
            set_ledger(1, f"tenant_id = '', knowledge_space_id = '{space(3)}', source_id = '{source(2)}'"),
            set_ledger(4, "tenant_id = '', state = 'retired'"),
        ),
        f"{MISSING}: 2 source(s) (1 whose ledger row is not active, 2 of another tenant, "
        "1 of another knowledge space, 1 of another source)",
        both(
            set_ledger(1, f"tenant_id = 'tenant-a', knowledge_space_id = '{space(2)}', source_id = '{source(1)}'"),
            set_ledger(4, "tenant_id = 'tenant-a', state = 'active'"),
        ),
    ),
    # A rule of the host's keeps the registration out, and ON CONFLICT DO NOTHING says nothing.
    "not registered": Fault(
        both(
            "CREATE UNIQUE INDEX theirs ON source_secret_lifecycle_refs (operation_id)",
            ledger_row(90, state="retired", operation_id=f"legacy-source:{source(5)}:1"),
        ),
        f"{MISSING}: 1 source(s) (1 without a ledger row)",
        "DROP INDEX theirs",
    ),
    # The ledger says that a ref is active, and its source does not name it.
    "source gone": Fault(
        f"DELETE FROM sources WHERE id = '{source(4)}'",
        f"{ORPHANED}: 1 ref(s) (1 whose source is gone)",
        set_ledger(4, "state = 'retired'"),
    ),
    "source without ref": Fault(
        f"UPDATE sources SET credential_ref = NULL WHERE id = '{source(4)}'",
        f"{ORPHANED}: 1 ref(s) (1 whose source has no ref)",
        set_ledger(4, "state = 'retired'"),
    ),
    "source with another ref": Fault(
        f"UPDATE sources SET credential_ref = '{ref(94)}' WHERE id = '{source(4)}'",
        f"{ORPHANED}: 1 ref(s) (1 whose source has another ref)",
        set_ledger(4, "state = 'retired'"),
    ),
    "space gone": Fault(
        f"DELETE FROM knowledge_spaces WHERE id = '{space(2)}'",
        f"{ORPHANED}: 2 ref(s) (2 whose source is gone, 2 whose knowledge space is gone)",
        both(set_ledger(1, "state = 'retired'"), set_ledger(4, "state = 'retired'")),
    ),
    "source in another space": Fault(
        ledger_row(90, source_id=source(13), knowledge_space_id=space(1)),
        f"{ORPHANED}: 1 ref(s) (1 whose source is in another knowledge space, 1 whose source has no ref)",
        set_ledger(90, "state = 'retired'"),
    ),
    "orphan of another tenant": Fault(
        ledger_row(90, source_id=source(13), knowledge_space_id=space(2), tenant_id="tenant-z"),
        f"{ORPHANED}: 1 ref(s) (1 whose source has no ref, 1 of another tenant)",
        f"DELETE FROM source_secret_lifecycle_refs WHERE credential_ref = '{ref(90)}'",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_aborts_it_all_and_can_be_repaired(make_host: MakeHost, fault: Fault) -> None:
    host = make_host(*STARTS["seeded"], fault.sql)
    before = everything(host)
    # The seed's own guard refuses the same databases, and our message begins as its message does.
    with pytest.raises(DatabaseError) as caught:
        host.run(SEED)
    begins = str(caught.value).splitlines()[0]
    assert fault.message.startswith(f"{begins}: ")

    for _ in range(2):
        assert refusal(host) == (fault.message, HINTS[begins])
        assert host.recorded() == MIGRATIONS[: MIGRATIONS.index(GUARD)]
        assert everything(host) == before

    host.run(fault.repair)
    host.migrate()
    assert host.recorded() == MIGRATIONS
    assert host.value(UNREGISTERED) == 0


def test_a_source_without_a_space_is_not_passed_over(make_host: MakeHost) -> None:
    """The seed, whose foreign key forbids such sources, joins them away when it registers and checks."""
    host = make_host(*STARTS["seeded"], "ALTER TABLE sources DROP CONSTRAINT sources_knowledge_space_id_fkey")
    host.run(f"DELETE FROM source_secret_lifecycle_refs WHERE source_id = '{source(2)}'")
    host.run(f"DELETE FROM knowledge_spaces WHERE id = '{space(3)}'")
    host.run(SEED)
    error, _ = refusal(host)
    assert error == f"{MISSING}: 2 source(s) (2 without a ledger row, 2 without a knowledge space)"


UNREGISTERED = """
SELECT count(*) FROM sources WHERE credential_ref IS NOT NULL
AND credential_ref NOT IN (SELECT credential_ref FROM source_secret_lifecycle_refs WHERE state = 'active')
"""


def everything(host: Host) -> list[Any]:
    return [
        host.dump(table)
        for table in (
            "knowledge_spaces",
            "sources",
            "source_credential_backfills",
            "source_secret_lifecycle_refs",
        )
    ]


ROW = """
SELECT id::text, operation_id, purpose, state, source_version FROM source_secret_lifecycle_refs
WHERE credential_ref = %s
"""


def test_a_deterministic_id_that_is_taken_gives_way_to_a_random_one(make_host: MakeHost) -> None:
    host = make_host(*STARTS["seeded"], ledger_row(90, id=source(5), source_id=source(5), state="retired"))
    with pytest.raises(DatabaseError, match=MISSING):
        host.run(SEED)
    host.migrate()
    ((identity, *rest),) = host.rows(ROW, [ref(5)])
    assert uuid.UUID(identity).version == 4
    assert identity != source(5)
    assert rest == [f"legacy-source:{source(5)}:1", "rotate", "active", 1]
    assert host.rows(ROW, [ref(90)]) == [(source(5), "operation-90", "create", "retired", None)]
    assert host.rows(ROW, [ref(6)])[0][0] == source(6)


@pytest.mark.parametrize("version", [0, -3])
def test_a_version_below_one_is_stored_as_null(make_host: MakeHost, version: int) -> None:
    host = make_host(*STARTS["seeded"], f"UPDATE sources SET version = {version} WHERE id = '{source(6)}'")
    with pytest.raises(DatabaseError, match="source_secret_lifecycle_refs_source_version_ck"):
        host.run(SEED)
    host.migrate()
    assert host.rows(ROW, [ref(6)]) == [(source(6), f"legacy-source:{source(6)}:{version}", "rotate", "active", None)]
    assert host.value("SELECT version FROM sources WHERE id = %s", [source(6)]) == version


def test_refs_that_somebody_else_registered_are_left_alone(make_host: MakeHost) -> None:
    theirs = str(uuid.uuid4())
    host = make_host(*STARTS["seeded"], ledger_row(6, id=theirs, source_version="41", operation_id="of-a-service"))
    before = host.dump("source_secret_lifecycle_refs")
    host.migrate()
    assert set(before) < set(host.dump("source_secret_lifecycle_refs"))
    assert host.rows(ROW, [ref(6)]) == [(theirs, "of-a-service", "create", "active", 41)]


def test_registration_again_changes_nothing(make_host: MakeHost) -> None:
    host = make_host(*STARTS["seeded"])
    host.migrate()
    before = everything(host)
    host.run(sql.read(f"schema/{GUARD}"))
    host.run(SEED)
    assert everything(host) == before


def test_the_messages_begin_as_the_seeds_do() -> None:
    assert re.findall(r"RAISE EXCEPTION\s+'([^']+)'", SEED) == [MISSING, ORPHANED]

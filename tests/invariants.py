"""What is always true, whatever happened before: the invariants of the design, looked at from outside.

The queries are written out here and share nothing with those of the package, so that a mistake there cannot hide
itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from django.db import connections

from kfs_credentials.crypto import Credentials, Scope, object_name
from kfs_credentials.stores import Address
from kfs_credentials.stores.encrypted import EncryptedStore

LIMIT = 10
"""The most rows that are shown for one finding."""

CHECKS = {
    "a source has a ref without a ledger row that is active and of the same tenant, space and source": """
        SELECT src.id, ledger.state FROM sources src
        LEFT JOIN knowledge_spaces space ON space.id = src.knowledge_space_id
        LEFT JOIN source_secret_lifecycle_refs ledger ON ledger.credential_ref = src.credential_ref
        WHERE src.credential_ref IS NOT NULL
          AND (ledger.state, ledger.tenant_id, ledger.knowledge_space_id, ledger.source_id)
            IS DISTINCT FROM ('active', space.tenant_id, src.knowledge_space_id, src.id)""",
    "a ledger row is active, and no source has its ref": """
        SELECT ledger.source_id, ledger.credential_ref FROM source_secret_lifecycle_refs ledger
        LEFT JOIN sources src ON src.id = ledger.source_id AND src.credential_ref = ledger.credential_ref
        WHERE ledger.state = 'active' AND src.id IS NULL""",
    "a source has both a ref and legacy credentials": """
        SELECT id FROM sources
        WHERE credential_ref IS NOT NULL AND jsonb_typeof(metadata -> 'credentials') = 'object'""",
    "a job is not over, and not to be claimed now or at a known time": """
        SELECT job.id, job.run_state, ledger.state FROM source_credential_backfills job
        LEFT JOIN source_secret_lifecycle_refs ledger ON ledger.credential_ref = job.candidate_credential_ref
          AND ledger.source_id = job.source_id
        WHERE job.run_state NOT IN ('succeeded', 'failed') AND NOT (
          ledger.state = 'candidate' AND CASE job.run_state
            WHEN 'queued' THEN num_nonnulls(job.worker_id, job.lease_token, job.lease_expires_at) = 0
              AND job.retry_count >= 0 AND job.updated_at <= clock_timestamp()
            WHEN 'running' THEN num_nulls(job.worker_id, job.lease_token, job.lease_expires_at) = 0
          END) IS TRUE""",
    "a job is over, and its candidate is neither in use nor given up": """
        SELECT job.id, ledger.state FROM source_credential_backfills job
        LEFT JOIN source_secret_lifecycle_refs ledger ON ledger.credential_ref = job.candidate_credential_ref
        WHERE job.run_state IN ('succeeded', 'failed')
          AND (ledger.state IN ('active', 'retired', 'deleting', 'deleted')) IS NOT TRUE
          -- Nor erased for good, and forgotten since.
          AND NOT EXISTS (
            SELECT FROM kfs_credentials_event event
            WHERE event.credential_ref = job.candidate_credential_ref AND event.kind = 'forgotten'
          )""",
    "a ledger row is not final, and its next move is at no known time": """
        SELECT ledger.credential_ref, ledger.state FROM source_secret_lifecycle_refs ledger
        LEFT JOIN kfs_credentials_secret_object object ON object.credential_ref = ledger.credential_ref
        WHERE CASE ledger.state
          WHEN 'retired' THEN ledger.next_delete_at IS NULL
            AND num_nonnulls(object.attention, object.abandoned_at) = 0
            -- Held, until the source that names it is repaired: that is another finding.
            AND NOT EXISTS (SELECT FROM sources src WHERE src.credential_ref = ledger.credential_ref)
          WHEN 'deleting' THEN ledger.lease_expires_at IS NULL
          WHEN 'active' THEN FALSE
          WHEN 'deleted' THEN FALSE
          ELSE ledger.recover_after IS NULL
        END""",
    "a ref was claimed for erasure, and is in use": """
        SELECT ledger.credential_ref, ledger.delete_attempts FROM source_secret_lifecycle_refs ledger
        JOIN kfs_credentials_secret_object object ON object.credential_ref = ledger.credential_ref
        WHERE ledger.state IN ('staged', 'candidate', 'active')
          AND (object.first_claimed_at IS NOT NULL OR ledger.delete_attempts > 0)""",
    "a ledger row has nothing in kfs_credentials_secret_object, or the other way round": """
        SELECT ledger.credential_ref, object.credential_ref FROM source_secret_lifecycle_refs ledger
        FULL JOIN kfs_credentials_secret_object object ON object.credential_ref = ledger.credential_ref
        WHERE ledger.credential_ref IS NULL
          OR (object.credential_ref IS NULL AND ledger.purpose = 'backfill')""",
}


def check_invariants(using: str, store: EncryptedStore) -> list[str]:
    """Return what is not as it always has to be, in sentences that name rows and no value; empty if all is well.

    `using`: the database alias. `store`: the store of its secrets, which is read whole.
    """
    return [_sentence(finding, rows) for finding, rows in findings(using, store).items()]


def findings(using: str, store: EncryptedStore) -> dict[str, list[tuple[Any, ...]]]:
    """Return the same with all the rows of each finding, for whoever knows which of them may be there."""
    return dict([*_in_database(using), *_unreadable(using, store), *_unknown_objects(using, store)])


def objects_in_use(using: str, store: EncryptedStore) -> Counter[str]:
    """Return how many objects the store holds under refs of each state.

    After a backfill that has come to its end no other states than `active` and `retired` may be there: raises
    AssertionError.
    """
    names = set(store.list())
    states = {
        object_name(ref, prefix=store.prefix): state
        for ref, state in _rows(using, "SELECT credential_ref, state FROM source_secret_lifecycle_refs")
    }
    counts = Counter(states.get(name, "no row") for name in names)
    assert counts.keys() <= {"active", "retired"}, counts
    return counts


def _in_database(using: str) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    # All at once first: as a rule there is nothing, and some look after every step of a long story.
    (there,) = _rows(using, "SELECT " + ", ".join(f"EXISTS ({query})" for query in CHECKS.values()))
    for is_there, (finding, query) in zip(there, CHECKS.items(), strict=True):
        if is_there and (rows := _rows(using, query)):
            yield finding, rows


def _unreadable(using: str, store: EncryptedStore) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Every ref that is active, or kept until a person chooses, reads back in the scope that the ledger gives it."""
    for kept, condition in {
        "an active ref": "state = 'active'",
        "a displaced ref": "state = 'retired' AND credential_ref IN "
        "(SELECT credential_ref FROM kfs_credentials_secret_object WHERE attention = 'displaced')",
    }.items():
        rows = _rows(
            using,
            "SELECT tenant_id, knowledge_space_id, source_id, credential_ref FROM source_secret_lifecycle_refs "
            f"WHERE {condition} ORDER BY credential_ref",
        )
        outcomes = store.get_many([Address(Scope(*scope), ref) for *scope, ref in rows]) if rows else []
        broken = [
            (ref, type(outcome).__name__)
            for (*_, ref), outcome in zip(rows, outcomes, strict=True)
            if not isinstance(outcome, Credentials)
        ]
        if broken:
            yield f"{kept} does not read back", broken


def _unknown_objects(using: str, store: EncryptedStore) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Every object has a ledger row, and none that is final."""
    names = list(store.list())  # before the ledger: a row comes before its object
    rows = _rows(using, "SELECT credential_ref, state, next_delete_at IS NULL FROM source_secret_lifecycle_refs")
    final = {object_name(ref, prefix=store.prefix): state == "deleted" and last for ref, state, last in rows}
    if unknown := [(name,) for name in names if name not in final]:
        yield "an object in the store has no ledger row", unknown
    if erased := [(name,) for name in names if final.get(name)]:
        yield "an object is in the store, and its ledger row is final", erased


def _rows(using: str, query: str) -> list[tuple[Any, ...]]:
    with connections[using].cursor() as cursor:
        cursor.execute(query)
        return list(cursor.fetchall())


def _sentence(finding: str, rows: list[tuple[Any, ...]]) -> str:
    shown = ", ".join(" ".join(map(str, row)) for row in rows[:LIMIT])
    return f"{finding}: {shown}{' and more' if len(rows) > LIMIT else ''} ({len(rows)})"

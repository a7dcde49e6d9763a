"""Thousands of refs at once, with failures in the middle of answers that look fine."""

from __future__ import annotations

from typing import Any

import pytest

from kfs_credentials.cleanup import Cleanup, Outcome
from kfs_credentials.crypto import Plaintext, Scope, new_ref
from kfs_credentials.errors import SecretStoreError
from kfs_credentials.models import Receipt, RefError, RefState, SecretObject
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.stores.values import Entry
from tests.cleanup.rows import SECRET, add_ref, in_database, make_due, make_source, pass_horizon
from tests.cleanup.runs import Files, erase, erase_all, patrol
from tests.invariants import check_invariants

pytestmark = pytest.mark.django_db(transaction=True)

MANY, PAGE, EVERY = 2500, 1000, 7

COPIES = """
INSERT INTO source_secret_lifecycle_refs
SELECT (jsonb_populate_record(row, jsonb_build_object('id', gen_random_uuid(), 'credential_ref', ref))).*
FROM source_secret_lifecycle_refs row, unnest(%s::text[]) ref
WHERE row.id = %s
"""


def add_many(store: EncryptedStore, situation: str) -> list[str]:
    """Insert as many rows of one source that is gone, each with an object; return their refs in order."""
    row, refs = add_ref(situation=situation), sorted(new_ref() for _ in range(MANY))
    in_database(COPIES, refs, row.pk)
    scope, plaintext = Scope(row.tenant_id, row.knowledge_space_id, row.source_id), Plaintext.of(SECRET)
    store.put_many([Entry(scope, ref, plaintext) for ref in refs])
    LedgerRow.objects.filter(pk=row.pk).delete()
    SecretObject.objects.filter(pk=row.credential_ref).delete()
    return refs


def test_only_what_the_store_confirmed_is_marked_and_the_rest_is_retried(
    steps: Cleanup, store: EncryptedStore, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = add_many(store, "retired, due")
    failing = set(refs[::EVERY])
    real = store._delete_many

    def delete_many(addresses: Any, *, deadline: Any) -> list[Any]:
        done = iter(real([one for one in addresses if one.ref not in failing], deadline=deadline))
        return [SecretStoreError("InternalError") if one.ref in failing else next(done) for one in addresses]

    monkeypatch.setattr(store, "_delete_many", delete_many)
    batches = [erase(steps, PAGE) for _ in range(3)]
    assert sum(batches, start=batches[0] - batches[0]) == {
        Outcome.ERASED: MANY - len(failing),
        Outcome.RETRY: len(failing),
    }
    assert steps.claim(PAGE) is None
    assert len(files()) == len(failing)
    retried = LedgerRow.objects.filter(credential_ref__in=failing)
    assert set(retried.values_list("state", "delete_attempts", "last_error_code")) == {
        (RefState.RETIRED, 1, RefError.DELETE_FAILED)
    }
    assert LedgerRow.objects.tombstones().count() == MANY - len(failing)
    assert SecretObject.objects.filter(receipt=Receipt.ERASED).count() == MANY - len(failing)
    failing.clear()
    make_due(*retried.values_list("credential_ref", flat=True))
    assert erase(steps, PAGE)[Outcome.ERASED] == retried.count()
    assert files() == []
    pass_horizon()
    assert erase_all(steps, PAGE) == {Outcome.CONFIRMED: MANY}
    assert check_invariants("default", store) == []


def test_a_patrol_of_many_pages_sees_every_object(
    steps: Cleanup, store: EncryptedStore, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kfs_credentials.stores.encrypted.PAGE", PAGE)
    make_source()
    refs = add_many(store, "final")
    in_database("DELETE FROM source_secret_lifecycle_refs WHERE credential_ref = ANY (%s)", refs[::EVERY])
    position = patrol(steps, PAGE)
    # What our own table does not know is found in the ledger at the end, and from then on by the index.
    assert position.found == len(refs[::EVERY])
    assert patrol(steps, PAGE).found == len(refs[::EVERY])
    assert erase_all(steps, PAGE)[Outcome.ERASED] == MANY - len(refs[::EVERY])
    assert len(files()) == len(refs[::EVERY]) + 1

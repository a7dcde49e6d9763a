"""The invariants find what is wrong: each kind of damage is done once, and undone."""

from __future__ import annotations

from django.db import transaction

from tests.crashes.database import ALIAS
from tests.crashes.scene import Scene
from tests.invariants import check_invariants

ONE = "(SELECT credential_ref FROM sources WHERE credential_ref IS NOT NULL ORDER BY id LIMIT 1)"
DAMAGE = {
    "a source has a ref without a ledger row": f"DELETE FROM source_secret_lifecycle_refs WHERE credential_ref = {ONE}",
    "a ledger row is active, and no source has its ref": (
        f"UPDATE sources SET credential_ref = NULL WHERE credential_ref = {ONE}"
    ),
    "a source has both a ref and legacy credentials": (
        f"UPDATE sources SET metadata = metadata || '{{\"credentials\": {{}}}}' WHERE credential_ref = {ONE}"
    ),
    "a job is not over, and not to be claimed": (
        "UPDATE source_credential_backfills SET run_state = 'queued', completed_at = NULL "
        f"WHERE candidate_credential_ref = {ONE}"
    ),
    "a job is over, and its candidate is neither": (
        f"UPDATE source_secret_lifecycle_refs SET state = 'candidate' WHERE credential_ref = {ONE}"
    ),
    "a ledger row is not final, and its next move is at no known time": (
        "UPDATE source_secret_lifecycle_refs SET next_delete_at = NULL WHERE state = 'retired'"
    ),
    "a ref was claimed for erasure, and is in use": (
        f"UPDATE kfs_credentials_secret_object SET first_claimed_at = now() WHERE credential_ref = {ONE}"
    ),
    "a displaced ref does not read back": (
        "UPDATE source_secret_lifecycle_refs SET state = 'retired', tenant_id = 'another' "
        f"WHERE credential_ref = {ONE}; "
        f"UPDATE kfs_credentials_secret_object SET attention = 'displaced' WHERE credential_ref = {ONE}"
    ),
    "a ledger row has nothing in kfs_credentials_secret_object": (
        f"DELETE FROM kfs_credentials_secret_object WHERE credential_ref = {ONE}"
    ),
    "an active ref does not read back": (
        f"UPDATE source_secret_lifecycle_refs SET tenant_id = 'another' WHERE credential_ref = {ONE}"
    ),
    "an object in the store has no ledger row": (
        f"DELETE FROM source_secret_lifecycle_refs WHERE credential_ref = {ONE}"
    ),
    "an object is in the store, and its ledger row is final": (
        f"UPDATE source_secret_lifecycle_refs SET state = 'deleted', deleted_at = now() WHERE credential_ref = {ONE}"
    ),
}


def test_each_kind_of_damage_is_found(scene: Scene) -> None:
    scene.drain()
    scene.check_always()
    for finding, statement in DAMAGE.items():
        with transaction.atomic(using=ALIAS):
            scene.execute(statement)
            found = check_invariants(ALIAS, scene.store)
            transaction.set_rollback(True, using=ALIAS)
        assert [text for text in found if text.startswith(finding)], (finding, found)
    scene.check_always()
    next(path for path in scene.secrets.rglob("*.enc")).unlink()
    (unreadable,) = check_invariants(ALIAS, scene.store)
    assert unreadable.startswith("an active ref does not read back: source-secret:v1:")
    assert unreadable.endswith(" SecretNotFound (1)")

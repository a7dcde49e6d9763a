"""Revoke: the ref and what lies in clear leave the source, and the secret is on its way to erasure."""

from __future__ import annotations

from typing import Any

import pytest

from kfs_credentials import services
from kfs_credentials.errors import BeingDeleted, MutationFailed, NoCredentials, SourceNotFound, VersionConflict
from kfs_credentials.models import KnowledgeSpace, RefState, Source, SourceCredentialBackfill, SourceSecretLifecycleRef
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory
from tests.invariants import check_invariants
from tests.management.rows import JobFactory, table_contents
from tests.services.conftest import (
    OLD,
    TENANT,
    Files,
    being_deleted,
    execute,
    plaintext_left,
    resolve,
    row_of,
    set_state,
    states,
    trigger,
)

pytestmark = pytest.mark.django_db(transaction=True)


def revoke(source: Source, **more: Any) -> Source:
    return services.revoke_credentials(**{"tenant": TENANT, "source_id": source.pk, **more})


def test_the_ref_goes_and_its_object_is_to_be_erased_after_the_grace(
    source: Source, store: EncryptedStore, files: Files
) -> None:
    revoked = revoke(source, expected_version=1)
    assert (revoked.credential_ref, revoked.version) == (None, 2)
    assert revoked.updated_at > source.updated_at
    old = row_of(source.credential_ref)
    assert (old.state, old.source_version, old.row_version) == (RefState.RETIRED, 1, 2)
    assert old.next_delete_at is not None
    assert len(files()) == 1
    with pytest.raises(NoCredentials):
        resolve(source)
    assert check_invariants("default", store) == []


def test_nothing_is_reserved_and_nothing_put(source: Source, files: Files) -> None:
    before = [(path, path.stat().st_mtime_ns) for path in files()]
    revoke(source)
    assert states() == ["retired"]
    assert [(path, path.stat().st_mtime_ns) for path in files()] == before


@pytest.mark.parametrize("expected", [None, 1, 2, 9])
def test_doing_it_again_changes_nothing(source: Source, expected: int | None) -> None:
    """Whatever version the caller has read: there is nothing to take away any more."""
    revoke(source)
    before = table_contents()
    assert revoke(source, expected_version=expected).version == 2
    assert table_contents() == before


@pytest.mark.parametrize("in_clear", [OLD, {}, None, "text", [OLD], 5])
def test_what_lies_in_clear_goes_too(space: KnowledgeSpace, store: EncryptedStore, in_clear: Any) -> None:
    source = revoke(SourceFactory.create(knowledge_space=space, credentials=in_clear))
    assert (source.version, source.metadata, source.credential_ref) == (2, {"title": "Handbook"}, None)
    assert (plaintext_left(), states()) == (0, [])


@pytest.mark.parametrize("metadata", ['["credentials"]', '"credentials"', "5", "null", '{"a": 1}'])
def test_metadata_without_credentials_is_no_change(space: KnowledgeSpace, store: EncryptedStore, metadata: str) -> None:
    source = SourceFactory.create(knowledge_space=space)
    execute("UPDATE sources SET metadata = %s", metadata)
    before = table_contents()
    assert revoke(source).version == 1
    assert table_contents() == before


def test_a_ref_and_plaintext_both_go(source: Source) -> None:
    execute("""UPDATE sources SET metadata = '{"credentials": {"a": 1}, "b": 2}'""")
    revoked = revoke(source)
    assert (revoked.metadata, revoked.credential_ref, revoked.version) == ({"b": 2}, None, 2)


def test_a_failed_job_is_over(space: KnowledgeSpace, store: EncryptedStore) -> None:
    job = JobFactory.create(source=SourceFactory.create(knowledge_space=space))
    revoke(job.source)
    assert SourceCredentialBackfill.objects.get().run_state == "succeeded"


@pytest.mark.parametrize("state", ["retired", "deleting", "deleted"])
def test_what_is_on_its_way_to_erasure_stays_there(source: Source, state: str) -> None:
    set_state(source.credential_ref, state)
    before = row_of(source.credential_ref)
    assert revoke(source).credential_ref is None
    after = row_of(source.credential_ref)
    assert (after.state, after.row_version) == (state, before.row_version)


def test_a_ref_that_the_ledger_does_not_know_is_erased_too(source: Source) -> None:
    SourceSecretLifecycleRef.objects.all().delete()
    execute("DELETE FROM kfs_credentials_secret_object")
    revoke(source)
    assert row_of(source.credential_ref).state == RefState.RETIRED
    assert row_of(source.credential_ref).next_delete_at is not None


@pytest.mark.parametrize("deletion", ["of the source", "of the space", "by its status"])
def test_a_deletion_at_work(source: Source, deletion: str) -> None:
    if deletion == "by its status":
        execute("UPDATE sources SET status = 'deleting'")
    with being_deleted({"of the source": source, "of the space": source.knowledge_space}.get(deletion, Source())):
        before = table_contents()
        with pytest.raises(BeingDeleted):
            revoke(source)
        assert table_contents() == before


def test_another_version(source: Source) -> None:
    before = table_contents()
    with pytest.raises(VersionConflict, match=r"^the source has version 1, not 3: somebody else has changed it$"):
        revoke(source, expected_version=3)
    assert table_contents() == before


def test_a_source_that_there_is_not(transactional_db: None) -> None:
    with pytest.raises(SourceNotFound):
        revoke(SourceFactory.build())


@pytest.mark.parametrize("body", ["RAISE 'canary: %', NEW.metadata;", "RETURN NULL;"])
def test_what_the_database_refuses(source: Source, body: str) -> None:
    before = table_contents()
    with trigger("UPDATE", body), pytest.raises(MutationFailed) as caught:
        revoke(source)
    assert "canary" not in str(caught.value)
    assert caught.value.code == "SOURCE_CREDENTIAL_MUTATION_FAILED"
    assert table_contents() == before


def test_a_check_that_the_change_violates_shows_no_row(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    """PostgreSQL's own message quotes the start of every column."""
    execute("UPDATE sources SET metadata = metadata || %s, version = 1", '{"note": "canary-5d1f"}')
    execute("ALTER TABLE sources ADD CONSTRAINT kfs_tests_ck CHECK (version < 2)")
    try:
        with pytest.raises(MutationFailed) as caught:
            revoke(source)
    finally:
        execute("ALTER TABLE sources DROP CONSTRAINT kfs_tests_ck")
    assert str(caught.value) == (
        "the database refused the change (CheckViolation, SQLSTATE 23514): a constraint, a trigger or a foreign key"
    )
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert "canary" not in caplog.text

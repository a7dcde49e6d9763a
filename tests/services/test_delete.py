"""Delete a source or a space: the rows go, and every secret of theirs is on its way to erasure."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.apps import apps
from django.db import connection, models, transaction
from django.test.utils import isolate_apps
from django.utils import timezone

from kfs_credentials import services
from kfs_credentials.backfill import Backfill
from kfs_credentials.errors import (
    BeingDeleted,
    MutationFailed,
    OperationOver,
    SourceBusy,
    SourceNotFound,
    SpaceNotFound,
    VersionConflict,
)
from kfs_credentials.models import (
    KnowledgeSpace,
    RefError,
    RefState,
    SecretObject,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from kfs_credentials.models.secret_object import Attention
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory, SpaceFactory
from tests.invariants import check_invariants
from tests.management.rows import table_contents
from tests.services.conftest import (
    NEW,
    TENANT,
    Change,
    Files,
    Other,
    after_put,
    being_deleted,
    create,
    execute,
    put,
    resolve,
    row_of,
    states,
    trigger,
)

pytestmark = pytest.mark.django_db(transaction=True)


def delete(source: Source, **more: Any) -> None:
    services.delete_source(**{"tenant": TENANT, "source_id": source.pk, **more})


def delete_space(space: KnowledgeSpace, tenant: str = TENANT) -> None:
    services.delete_knowledge_space(tenant=tenant, space_id=space.pk)


# A source.


def test_the_source_goes_and_all_its_secrets_are_to_be_erased(
    source: Source, store: EncryptedStore, files: Files
) -> None:
    other = create(source.knowledge_space)
    services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW)
    delete(source, expected_version=2)
    assert list(Source.objects.all()) == [other]
    rows = SourceSecretLifecycleRef.objects.filter(source_id=source.pk)
    assert {(row.state, row.next_delete_at is None) for row in rows} == {(RefState.RETIRED, False)}
    assert (len(rows), len(files())) == (2, 3)
    assert row_of(other.credential_ref).state == RefState.ACTIVE
    assert check_invariants("default", store) == []


@pytest.mark.parametrize("bare", [True, False])
def test_a_source_without_a_ref(space: KnowledgeSpace, store: EncryptedStore, bare: bool) -> None:
    delete(SourceFactory.create(knowledge_space=space, bare=bare))
    assert (Source.objects.count(), states()) == (0, [])


def test_the_backfills_job_and_its_candidate(space: KnowledgeSpace, steps: Backfill) -> None:
    """A worker that has put it finds nothing more to do, and the candidate is not left to its recovery."""
    source = SourceFactory.create(knowledge_space=space)
    batch = put(steps)
    delete(source)
    assert (SourceCredentialBackfill.objects.count(), states()) == (0, ["retired"])
    assert steps.settle(batch) == {}
    assert states() == ["retired"]


def test_a_rotation_that_is_on_its_way(source: Source, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    after_put(store, monkeypatch, lambda: delete(source))
    with pytest.raises(SourceNotFound):
        services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW)
    assert states() == ["retired", "retired"]


def test_a_ref_that_waits_for_a_person_waits_no_more(source: Source) -> None:
    """It was kept until somebody chooses between two refs of a source. Now there is no source."""
    services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW)
    SourceSecretLifecycleRef.objects.filter(state="retired").keep(RefError.DISPLACED)
    SecretObject.objects.all().mark([str(source.credential_ref)], Attention.DISPLACED)
    delete(source)
    assert row_of(source.credential_ref).next_delete_at is not None
    assert SecretObject.objects.needing_attention().count() == 0


def test_an_abandoned_ref_stays_abandoned(source: Source) -> None:
    services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW)
    SourceSecretLifecycleRef.objects.filter(state="retired").keep(RefError.ABANDONED)
    SecretObject.objects.filter(pk=source.credential_ref).update(abandoned_at=timezone.now())
    delete(source)
    assert row_of(source.credential_ref).next_delete_at is None


def test_doing_it_again_finds_nothing(source: Source) -> None:
    delete(source)
    with pytest.raises(SourceNotFound, match=r"^this tenant has no such source$"):
        delete(source)


def test_another_version(source: Source) -> None:
    before = table_contents()
    with pytest.raises(VersionConflict, match=r"^the source has version 1, not 2: somebody else has changed it$"):
        delete(source, expected_version=2)
    assert table_contents() == before


@pytest.mark.parametrize("deletion", ["of the source", "of the space", "by its status"])
def test_a_deletion_at_work(source: Source, deletion: str) -> None:
    if deletion == "by its status":
        execute("UPDATE sources SET status = 'deleting'")
    with being_deleted({"of the source": source, "of the space": source.knowledge_space}.get(deletion, Source())):
        before = table_contents()
        with pytest.raises(BeingDeleted):
            delete(source)
        assert table_contents() == before


@pytest.mark.parametrize("body", ["RAISE 'canary: %', OLD.metadata;", "RETURN NULL;"])
def test_what_the_database_refuses(source: Source, body: str) -> None:
    before = table_contents()
    with trigger("DELETE", body), pytest.raises(MutationFailed) as caught:
        delete(source)
    assert str(caught.value) in (
        "the database refused the change (RaiseException, SQLSTATE P0001): a constraint, a trigger or a foreign key",
        "a trigger of the database left the row as it was",
    )
    assert table_contents() == before
    assert resolve(source)


def test_a_row_of_the_project_that_refers_to_it_in_the_database(source: Source) -> None:
    execute("CREATE TABLE kfs_tests_notes (source_id UUID REFERENCES sources (id))")
    try:
        execute("INSERT INTO kfs_tests_notes VALUES (%s)", source.pk)
        with pytest.raises(MutationFailed, match="ForeignKeyViolation, SQLSTATE 23503"):
            delete(source)
        with pytest.raises(MutationFailed, match="ForeignKeyViolation, SQLSTATE 23503"):
            delete_space(source.knowledge_space)
    finally:
        execute("DROP TABLE kfs_tests_notes")
    assert resolve(source)


@pytest.fixture
def notes(transactional_db: None) -> Iterator[type[models.Model]]:
    """A model of the project that refers to sources, and protects them."""
    with isolate_apps("example_project"):

        class Note(models.Model):
            source = models.ForeignKey(Source, models.PROTECT, related_name="+")

            class Meta:
                app_label = "example_project"

            def __str__(self) -> str:
                return "a note"

        with connection.schema_editor() as editor:
            editor.create_model(Note)
        # The related objects of Source are those of the real registry.
        apps.all_models["example_project"]["note"] = Note
        apps.clear_cache()
        yield Note
        del apps.all_models["example_project"]["note"]
        apps.clear_cache()
        with connection.schema_editor() as editor:
            editor.delete_model(Note)


def test_a_row_of_the_project_that_protects_it_in_django(source: Source, notes: Any) -> None:
    notes.objects.create(source=source)
    with pytest.raises(MutationFailed) as caught:
        delete(source)
    assert str(caught.value) == (
        "the database refused the change (rows that are protected refer to it): a constraint, a trigger or a foreign "
        "key"
    )
    assert resolve(source)


# A space.


def test_the_space_goes_with_its_sources_and_all_their_secrets_are_to_be_erased(
    space: KnowledgeSpace, store: EncryptedStore, steps: Backfill
) -> None:
    stays = create(SpaceFactory.create())
    for _ in range(2):
        create(space)
    create(space, None)
    SourceFactory.create(knowledge_space=space)
    put(steps)
    SourceFactory.create(knowledge_space=space)
    delete_space(space)
    assert list(Source.objects.all()) == [stays]
    assert list(KnowledgeSpace.objects.all()) == [stays.knowledge_space]
    assert SourceCredentialBackfill.objects.count() == 0
    assert states() == ["active", "retired", "retired", "retired"]
    assert SourceSecretLifecycleRef.objects.filter(state="retired", next_delete_at=None).count() == 0
    assert check_invariants("default", store) == []


def test_an_empty_space(space: KnowledgeSpace) -> None:
    delete_space(space)
    assert KnowledgeSpace.objects.count() == 0
    with pytest.raises(SpaceNotFound, match=r"^this tenant has no such knowledge space$"):
        delete_space(space)


def test_a_space_that_there_is_not(transactional_db: None) -> None:
    for space_id in (uuid.uuid4(), "no-uuid", ""):
        with pytest.raises(SpaceNotFound):
            services.delete_knowledge_space(tenant=TENANT, space_id=space_id)


def test_a_space_that_is_being_deleted(source: Source) -> None:
    with being_deleted(source.knowledge_space), pytest.raises(BeingDeleted):
        delete_space(source.knowledge_space)
    assert resolve(source)


@pytest.mark.parametrize("table", ["sources", "knowledge_spaces"])
def test_a_trigger_that_keeps_the_rows(source: Source, table: str) -> None:
    before = table_contents()
    execute("CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$")
    execute(f"CREATE TRIGGER skip BEFORE DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION skip()")
    try:
        with pytest.raises(MutationFailed):
            delete_space(source.knowledge_space)
    finally:
        execute("DROP FUNCTION skip CASCADE")
    assert table_contents() == before


def test_a_create_that_is_on_its_way(
    space: KnowledgeSpace, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot finish any more, and its secret is to be erased with the others."""
    after_put(store, monkeypatch, lambda: delete_space(space))
    with pytest.raises(OperationOver):
        create(space)
    assert (states(), Source.objects.count()) == (["retired"], 0)


def test_a_ref_that_somebody_is_at_work_on_is_left_to_the_sweep(source: Source, other: Other) -> None:
    other.execute("SELECT FROM source_secret_lifecycle_refs FOR UPDATE")
    delete_space(source.knowledge_space)
    other.rollback()
    assert (states(), Source.objects.count()) == (["active"], 0)


@pytest.mark.parametrize("of_the_space", [False, True])
def test_a_job_that_a_worker_has_locked_is_not_waited_for(
    space: KnowledgeSpace, steps: Backfill, other: Other, kfs_settings: Change, of_the_space: bool
) -> None:
    """By the cascade of the DELETE it would be: while the source is locked, and the worker waits for that."""
    kfs_settings(LOCK_TIMEOUT=0.01)
    source = SourceFactory.create(knowledge_space=space)
    put(steps)
    other.execute("SELECT FROM source_credential_backfills FOR UPDATE")
    with transaction.atomic():
        execute("SET LOCAL statement_timeout = '5s'")
        with pytest.raises(SourceBusy):
            delete_space(space) if of_the_space else delete(source)
    assert Source.objects.count() == 1

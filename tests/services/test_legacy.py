"""Every moment of the migration: the services work at once, whether a source is moved, half-moved or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.utils import timezone

from kfs_credentials import services
from kfs_credentials.backfill import Backfill
from kfs_credentials.errors import NoCredentials
from kfs_credentials.models import KnowledgeSpace, RunState, Source, SourceCredentialBackfill, SourceSecretLifecycleRef
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory
from tests.invariants import check_invariants
from tests.services.conftest import NEW, OLD, TENANT, create, execute, plaintext_left, put, resolve

pytestmark = pytest.mark.django_db(transaction=True)

# Each brings a legacy source, and the steps of a worker, to a moment; the value: what the worker does after it.
After = Callable[[], object]
Moment = Callable[[Source, Backfill], After]


def nothing() -> None:
    """No worker is at work on it."""


def not_found_yet(source: Source, steps: Backfill) -> After:
    return nothing


def reserved(source: Source, steps: Backfill) -> After:
    batch = steps.discover(1)
    assert batch is not None

    def go_on() -> None:
        steps.start_put(batch)
        steps.finish_put(batch)
        steps.settle(batch)

    return go_on


def queued(source: Source, steps: Backfill) -> After:
    batch = steps.discover(1)
    assert batch is not None
    steps.release(batch)

    return lambda: claim_and_settle(steps)


def was_put(source: Source, steps: Backfill) -> After:
    batch = put(steps)
    return lambda: steps.settle(batch)


def worker_died(source: Source, steps: Backfill) -> After:
    put(steps)
    SourceCredentialBackfill.objects.update(lease_expires_at=timezone.now())
    return lambda: claim_and_settle(steps)


def claim_and_settle(steps: Backfill) -> None:
    if (claimed := steps.claim(1)) is not None:
        steps.start_put(claimed)
        steps.finish_put(claimed)
        steps.settle(claimed)


def failed(source: Source, steps: Backfill) -> After:
    put(steps)
    SourceCredentialBackfill.objects.update(
        run_state=RunState.FAILED,
        completed_at=timezone.now(),
        **dict.fromkeys(("worker_id", "lease_token", "lease_expires_at", "heartbeat_at")),
    )
    SourceSecretLifecycleRef.objects.all().retire()
    return nothing


def moved(source: Source, steps: Backfill) -> After:
    steps.settle(put(steps))
    return nothing


def moved_and_back_in_clear(source: Source, steps: Backfill) -> After:
    """An old writer has saved the whole row that it had read before."""
    steps.settle(put(steps))
    source.save()
    return nothing


def back_in_clear_without_a_ref(source: Source, steps: Backfill) -> After:
    steps.settle(put(steps))
    source.save()
    execute("UPDATE sources SET credential_ref = NULL WHERE id = %s", source.pk)
    return nothing


def moved_by_the_node_service(source: Source, steps: Backfill) -> After:
    """It writes no row into a table of ours."""
    steps.settle(put(steps))
    execute("DELETE FROM kfs_credentials_secret_object")
    return nothing


MOMENTS: list[Moment] = [
    not_found_yet,
    reserved,
    queued,
    was_put,
    worker_died,
    failed,
    moved,
    moved_and_back_in_clear,
    back_in_clear_without_a_ref,
    moved_by_the_node_service,
]


@pytest.fixture(params=MOMENTS, ids=lambda moment: moment.__name__)
def at_moment(request: pytest.FixtureRequest, space: KnowledgeSpace, steps: Backfill) -> tuple[Source, After]:
    """A source whose credentials were in clear at first, and what the backfill does next."""
    source = SourceFactory.create(knowledge_space=space, credentials=OLD)
    return source, request.param(source, steps)


def test_resolve(at_moment: tuple[Source, After]) -> None:
    source, go_on = at_moment
    assert resolve(source) == OLD
    go_on()
    assert resolve(source) == OLD


def test_rotate(at_moment: tuple[Source, After]) -> None:
    """The plaintext goes in the same commit, and whatever the worker does after that leaves the new value alone."""
    source, go_on = at_moment
    rotated = services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW)
    assert (rotated.metadata, resolve(source), plaintext_left()) == ({"title": "Handbook"}, NEW, 0)
    go_on()
    assert (resolve(source), plaintext_left(), Source.objects.get().version) == (NEW, 0, rotated.version)
    assert not SourceCredentialBackfill.objects.exclude(run_state=RunState.SUCCEEDED).exists()


def test_revoke(at_moment: tuple[Source, After]) -> None:
    source, go_on = at_moment
    revoked = services.revoke_credentials(tenant=TENANT, source_id=source.pk)
    assert (revoked.metadata, revoked.credential_ref, plaintext_left()) == ({"title": "Handbook"}, None, 0)
    go_on()
    with pytest.raises(NoCredentials):
        resolve(source)
    assert Source.objects.get().version == revoked.version
    assert not SourceCredentialBackfill.objects.exclude(run_state=RunState.SUCCEEDED).exists()


@pytest.mark.parametrize("of_the_space", [False, True])
def test_delete(at_moment: tuple[Source, After], of_the_space: bool) -> None:
    source, go_on = at_moment
    if of_the_space:
        services.delete_knowledge_space(tenant=TENANT, space_id=source.knowledge_space_id)
    else:
        services.delete_source(tenant=TENANT, source_id=source.pk)
    go_on()
    assert (Source.objects.count(), SourceCredentialBackfill.objects.count()) == (0, 0)
    in_use = SourceSecretLifecycleRef.objects.exclude(state="retired")
    assert not in_use.exists()
    assert not SourceSecretLifecycleRef.objects.filter(next_delete_at=None).exists()


def test_an_edit_by_the_project(at_moment: tuple[Source, After]) -> None:
    """A save of the other columns, as an admin or a form of the project's does it."""
    source, go_on = at_moment
    fresh = Source.objects.get(pk=source.pk)
    fresh.name = "Renamed"
    fresh.save(update_fields=["name"])
    go_on()
    assert (resolve(source), Source.objects.get().name) == (OLD, "Renamed")


# Writers beside the services (what the original's PATCH does).


@pytest.fixture
def new_source(space: KnowledgeSpace, store: EncryptedStore) -> Source:
    """A source whose credentials were in the store from the first moment on."""
    return create(space, metadata={"title": "Handbook", "n": 1})


def test_a_change_of_other_members_keeps_the_ref(new_source: Source, store: EncryptedStore) -> None:
    new_source.metadata = {**new_source.metadata, "n": 2, "more": True}
    new_source.save(update_fields=["metadata"])
    saved = Source.objects.get()
    assert saved.metadata == {"title": "Handbook", "n": 2, "more": True}
    assert (saved.credential_ref, resolve(saved)) == (new_source.credential_ref, OLD)
    assert check_invariants("default", store) == []


@pytest.mark.parametrize("fields", [None, ["metadata", "permission_scope", "name"]])
def test_what_was_read_and_is_saved_back_keeps_the_credentials(
    new_source: Source, store: EncryptedStore, fields: list[str] | None
) -> None:
    """What a page shows of a source has no credentials in it, and saving it takes none away."""
    read = Source.objects.get()
    assert "credentials" not in read.metadata
    read.save(update_fields=fields)
    assert (Source.objects.get().credential_ref, resolve(read)) == (new_source.credential_ref, OLD)
    assert check_invariants("default", store) == []


def test_a_stale_whole_row_save_does_not_bring_back_the_old_ref(new_source: Source, store: EncryptedStore) -> None:
    rotated = services.rotate_credentials(tenant=TENANT, source_id=new_source.pk, credentials=NEW)
    new_source.name = "Renamed"
    new_source.save()
    saved = Source.objects.get()
    assert (saved.name, saved.credential_ref, resolve(saved)) == ("Renamed", rotated.credential_ref, NEW)
    assert check_invariants("default", store) == []

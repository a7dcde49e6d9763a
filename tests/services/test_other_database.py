"""The services with `using=`: everything happens on that database, also where the default one knows nothing of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connections, transaction
from pytest_django import DjangoDbBlocker, Settings

from kfs_credentials import services
from kfs_credentials.errors import (
    BeingDeleted,
    ImproperlyPrepared,
    NoCredentials,
    SourceBusy,
    SourceNotFound,
    SpaceNotFound,
)
from kfs_credentials.models import KnowledgeSpace, Source, SourceSecretLifecycleRef
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SpaceFactory
from tests.invariants import check_invariants
from tests.migrations.hosts import BASE, LATER, SEED, Host, throw_away
from tests.services.conftest import NEW, OLD, TENANT, Change


@pytest.fixture
def host(django_db_blocker: DjangoDbBlocker) -> Iterator[Host]:
    """The database of a later version of knowledge-fs, by another alias than `default`, which is out of reach."""
    with django_db_blocker.unblock(), throw_away("host") as host:
        host.run(BASE, SEED, LATER)
        host.migrate()
        default = connections.databases["default"]
        name = default["NAME"]
        connections["default"].close()
        default["NAME"] = "kfs_no_such_database"
        try:
            yield host
        finally:
            connections["default"].close()
            default["NAME"] = name


@pytest.fixture
def space(host: Host) -> KnowledgeSpace:
    """A space in that database."""
    space = SpaceFactory.build(tenant_id=TENANT)
    space.save(using=host.alias)
    return space


def create(space: KnowledgeSpace, using: str | None) -> Source:
    return services.create_source(
        tenant=TENANT,
        space_id=space.pk,
        type="drive",
        name="A source",
        uri="https://files.example",
        credentials=OLD,
        using=using,
    )


def resolve(source: Source, using: str | None) -> object:
    return services.resolve_credentials(tenant=TENANT, source_id=source.pk, using=using)


class OnHost:
    """A project's router that sends sources to the other database."""

    def db_for_write(self, model: type, **hints: object) -> str | None:
        """Send all of ours there; what reads may be sent elsewhere, and is not asked for."""
        return "host" if model.__module__.startswith("kfs_credentials") else None


@pytest.fixture(params=["by argument", "by the routers"])
def using(request: pytest.FixtureRequest, settings: Settings) -> str | None:
    """How the services learn which database it is."""
    if request.param == "by argument":
        return "host"
    settings.DATABASE_ROUTERS = ["tests.services.test_other_database.OnHost"]
    return None


def test_all_of_them(host: Host, space: KnowledgeSpace, store: EncryptedStore, using: str | None) -> None:
    source = create(space, using)
    assert (source._state.db, resolve(source, using)) == ("host", OLD)
    rotated = services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW, using=using)
    assert (rotated.version, resolve(source, using)) == (2, NEW)
    assert services.revoke_credentials(tenant=TENANT, source_id=source.pk, using=using).version == 3
    with pytest.raises(NoCredentials):
        resolve(source, using)
    services.delete_source(tenant=TENANT, source_id=source.pk, using=using)
    create(space, using)
    assert check_invariants("host", store) == []
    services.delete_knowledge_space(tenant=TENANT, space_id=space.pk, using=using)
    assert host.rows("SELECT DISTINCT state FROM source_secret_lifecycle_refs") == [("retired",)]
    assert host.rows("SELECT id FROM sources UNION SELECT id FROM knowledge_spaces") == []
    with pytest.raises(SpaceNotFound):
        services.delete_knowledge_space(tenant=TENANT, space_id=space.pk, using=using)
    with pytest.raises(SourceNotFound):
        services.delete_source(tenant=TENANT, source_id=source.pk, using=using)


def test_transactions_and_locks_are_that_databases(
    host: Host, space: KnowledgeSpace, store: EncryptedStore, kfs_settings: Change
) -> None:
    kfs_settings(LOCK_TIMEOUT=0.01)
    source = create(space, "host")
    with transaction.atomic(using="host"):
        with pytest.raises(ImproperlyPrepared, match=r"DATABASES\['host'\] must set neither ATOMIC_REQUESTS"):
            services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW, using="host")
        services.revoke_credentials(tenant=TENANT, source_id=source.pk, using="host")
        transaction.set_rollback(True, using="host")
    assert resolve(source, "host") == OLD
    with host.session() as session:
        session.execute("SELECT FROM sources FOR UPDATE")
        with pytest.raises(SourceBusy):
            services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW, using="host")
    assert resolve(source, "host") == OLD


def test_a_deletion_that_a_later_version_is_at_work_on(
    host: Host, space: KnowledgeSpace, store: EncryptedStore
) -> None:
    source = create(space, "host")
    host.run("UPDATE knowledge_spaces SET lifecycle_state = 'deleting', deletion_job_id = id, deleting_at = now()")
    refs = SourceSecretLifecycleRef.objects.using("host")
    before = list(refs.values())
    for act in (
        lambda: create(space, "host"),
        lambda: services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=NEW, using="host"),
        lambda: services.revoke_credentials(tenant=TENANT, source_id=source.pk, using="host"),
        lambda: services.delete_source(tenant=TENANT, source_id=source.pk, using="host"),
        lambda: services.delete_knowledge_space(tenant=TENANT, space_id=space.pk, using="host"),
    ):
        with pytest.raises(BeingDeleted):
            act()
    assert list(refs.values()) == before
    assert resolve(source, "host") == OLD

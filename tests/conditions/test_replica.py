"""Reads are routed to a replica that lags behind: what we do goes by the writer, and never by the replica."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connections, router
from django.test import Client
from pytest_django import DjangoDbBlocker

from example_project import postgres
from kfs_credentials import services
from kfs_credentials.errors import SourceNotFound
from kfs_credentials.metrics import metrics_view
from kfs_credentials.models import KnowledgeSpace, Source
from kfs_credentials.pause import pause_workers, resume_workers
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.admin.conftest import list_page, page_of
from tests.bound import bind_at_once
from tests.conditions.routers import REPLICA
from tests.conditions.standby import standby_of, stop_replaying
from tests.crashes.database import new_database
from tests.factories import SourceFactory, SpaceFactory
from tests.keys import NEW, OLD
from tests.management.commands import Run, runner

OURS = re.compile(r"\b(sources|knowledge_spaces|source_\w+|kfs_credentials_\w+)\b")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `manage.py` with these arguments."""
    return runner(capsys)


@pytest.fixture
def asked(
    store: EncryptedStore, kfs_settings: Any, settings: Any, django_db_blocker: DjangoDbBlocker
) -> Iterator[list[str]]:
    """Three sources, which the replica knows, and everything that was asked of the replica from here on."""
    kfs_settings(KEYS=[OLD], ERASE_GRACE=0, LATE_WRITE_HORIZON=0)
    before = connections["default"].settings_dict.copy()
    with (
        postgres.temporary(["fsync=off"]) as server,
        django_db_blocker.unblock(),
        new_database("writer", server=server.django_database()) as entry,
    ):
        connections["default"].close()
        connections["default"].settings_dict.update(entry)
        try:
            call_command("migrate", verbosity=0)
            bind_at_once("default", store)
            SourceFactory.create_batch(3, knowledge_space=SpaceFactory.create())
            with standby_of(server) as replica:
                stop_replaying(server, replica)
                connections.databases[REPLICA] = {**connections.databases["default"], **replica, "NAME": entry["NAME"]}
                settings.DATABASE_ROUTERS = ["tests.conditions.routers.ReadsFromReplica"]
                statements: list[str] = []

                def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
                    statements.append(sql)
                    return execute(sql, params, many, context)

                with connections[REPLICA].execute_wrapper(note):
                    yield statements
                connections[REPLICA].close()
                del connections[REPLICA]
                del connections.databases[REPLICA]
        finally:
            connections["default"].close()
            connections["default"].settings_dict.clear()
            connections["default"].settings_dict.update(before)


def check(asked: list[str]) -> None:
    """Nobody has asked the replica for anything of ours; it is there, and it is behind."""
    assert [statement for statement in asked if OURS.search(statement)] == []
    asked.clear()
    assert router.db_for_read(Source) == REPLICA
    assert Source.objects.filter(credential_ref=None).count() == 3, "it is behind"
    assert OURS.search(asked[-1])
    assert Source.objects.using("default").filter(credential_ref=None).count() != 3


def test_it_works_by_the_writer(asked: list[str], store: EncryptedStore, kfs_settings: Any, run: Run) -> None:
    space = KnowledgeSpace.objects.using("default").get()
    tenant = space.tenant_id
    # Commands.
    outcome = run("run_credential_backfill", "--format", "json")
    assert outcome.code == 0, outcome
    assert outcome.json["result"]["moved"] == 3
    # Services: each sees what the one before has done.
    made = services.create_source(
        tenant=tenant, space_id=space.pk, type="web", name="n", uri="u", credentials={"token": "first"}
    )
    assert services.resolve_credentials(tenant=tenant, source_id=made.pk) == {"token": "first"}
    rotated = services.rotate_credentials(tenant=tenant, source_id=made.pk, credentials={"token": "second"})
    assert rotated.version == 2
    assert services.resolve_credentials(tenant=tenant, source_id=made.pk) == {"token": "second"}
    assert services.revoke_credentials(tenant=tenant, source_id=made.pk).credential_ref is None
    services.delete_source(tenant=tenant, source_id=made.pk)
    with pytest.raises(SourceNotFound):
        services.resolve_credentials(tenant=tenant, source_id=made.pk)
    outcome = run("run_secret_cleanup")
    assert outcome.code == 0, outcome
    kfs_settings(KEYS=[NEW, OLD], ERASE_GRACE=0, LATE_WRITE_HORIZON=0)
    outcome = run("reencrypt_secrets")
    assert outcome.code == 0, outcome
    for command, *arguments in (
        ("verify_credentials", "--deep", "--erase-unknown", "--yes"),
        ("run_credential_backfill", "--dry-run"),
        ("run_secret_cleanup", "--dry-run"),
        ("retry_credential_backfill", "--all", "--dry-run"),
        ("settle_unsupported_credentials", "--all", "--dry-run"),
        ("bind_secret_store", "--dry-run"),
        ("credential_status", "--check"),
    ):
        outcome = run(command, *arguments)
        assert outcome.code == 0, outcome
    status = run("credential_status", "--format", "json").json
    assert (status["sources"]["referenced"], status["ledger"]["active"], status["ledger"]["deleted"]) == (3, 3, 2)
    pause_workers("default", by="tests", reason="a look")
    assert run("run_secret_cleanup").code == 4
    resume_workers("default")
    call_command("check", deploy=True, databases=["default"], fail_level="ERROR")
    check(asked)


def test_the_pages_show_the_writer(asked: list[str], run: Run, rf: Any) -> None:
    assert run("run_credential_backfill").code == 0
    client = Client()
    client.force_login(User.objects.db_manager("default").create_superuser("root"))
    shown = 0
    for model in apps.get_app_config("kfs_credentials").get_models():
        page = client.get(list_page(model))
        assert page.status_code == 200
        rows = list(page.context["cl"].result_list)
        assert len(rows) == model._default_manager.using("default").count(), model
        for row in rows:
            assert client.get(page_of(row)).status_code == 200
            shown += 1
    assert shown > 12
    source = Source.objects.using("default").earliest("id")
    assert client.get(list_page(Source, f"?q={source.pk}")).context["cl"].result_list[0].credential_ref
    request = rf.get("/metrics")
    request.user = User.objects.using("default").get()
    assert b"kfs_credentials_sources_referenced 3" in metrics_view(request).content
    check(asked)

"""Nobody changes anything here, and a page asks the database and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin import ModelAdmin
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection
from django.http import HttpRequest
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from kfs_credentials.models import KnowledgeSpace, Source, SourceCredentialBackfill, SourceSecretLifecycleRef
from kfs_credentials.stores import secret_stores
from tests.admin.conftest import MakeClient, list_page, page_of
from tests.admin.rows import OPERATIONS, AcknowledgementFactory, JobFactory, ObjectFactory, RefFactory, RoundFactory

OWN = (
    *("kfs_credentials_secret_object", "kfs_credentials_acknowledgement", "kfs_credentials_round"),
    *("kfs_credentials_binding", "kfs_credentials_checkpoint", "kfs_credentials_closed_key", "kfs_credentials_event"),
    *("kfs_credentials_pause", "kfs_credentials_refusal", "kfs_credentials_tick"),
)
MAKERS = (AcknowledgementFactory, JobFactory, ObjectFactory, RefFactory, RoundFactory, *OPERATIONS)


@pytest.fixture
def rows(db: None) -> list[Any]:
    made: list[Any] = [maker.create() for maker in MAKERS]
    return [*made, Source.objects.get(), KnowledgeSpace.objects.get()]


def everything() -> list[Any]:
    tables = ("knowledge_spaces", "sources", "source_credential_backfills", "source_secret_lifecycle_refs")
    found = []
    with connection.cursor() as cursor:
        for table in (*tables, *OWN):
            cursor.execute(f"SELECT {table}::text FROM {table} ORDER BY 1")
            found.append(cursor.fetchall())
    return found


def test_every_model_is_registered_and_the_checks_pass() -> None:
    from django.apps import apps

    ours = set(apps.get_app_config("kfs_credentials").get_models())
    assert len(ours) == 14
    assert ours <= set(admin.site._registry)
    call_command("check", "--tag", "admin", "--fail-level", "WARNING")


def test_nothing_can_be_added_changed_or_deleted(rows: list[Any], admin_client: Client) -> None:
    before = everything()
    for row in rows:
        add = reverse(f"admin:kfs_credentials_{row._meta.model_name}_add")
        for page in (add, page_of(row, "delete")):
            assert admin_client.get(page).status_code == 403
            assert admin_client.post(page, {"post": "yes"}).status_code == 403
        assert admin_client.post(page_of(row), {"name": "other", "tenant_id": "other"}).status_code == 403
        admin_client.post(
            list_page(type(row)), {"action": "delete_selected", "_selected_action": str(row.pk), "post": "y"}
        )
        admin_client.post(list_page(type(row)), {"_save": "Save", "form-TOTAL_FORMS": "1", "form-INITIAL_FORMS": "1"})
    assert everything() == before


def test_pages_have_no_fields_to_edit(rows: list[Any], admin_client: Client) -> None:
    for row in rows:
        text = admin_client.get(page_of(row)).text
        form = text[text.index(f'id="{row._meta.model_name}_form"') :]
        assert "<textarea" not in form
        assert "<select" not in form
        assert 'type="text"' not in form
        assert 'name="_save"' not in form


@pytest.mark.parametrize("model", [SourceCredentialBackfill, SourceSecretLifecycleRef, Source])
def test_actions_of_the_host_do_not_reach_our_rows(
    model: Any, rows: list[Any], admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export of the host's would print whatever is in a row, metadata first of all."""

    def export(modeladmin: ModelAdmin[Any], request: HttpRequest, queryset: Any) -> None:
        raise AssertionError("exported")

    monkeypatch.setitem(admin.site._actions, "export", export)
    assert 'value="export"' not in admin_client.get(list_page(model)).text
    row = model.objects.first()
    admin_client.post(list_page(model), {"action": "export", "index": "0", "_selected_action": str(row.pk)})


def test_others_see_only_what_they_may_view(rows: list[Any], db: None) -> None:
    client = Client()
    client.force_login(User.objects.create_user("nobody", is_staff=True))
    for row in rows:
        assert client.get(list_page(type(row))).status_code == 403
        assert client.get(page_of(row)).status_code == 403
        assert client.get(page_of(row, "history")).status_code == 403


@pytest.mark.usefixtures("settings")
def test_no_page_needs_the_store_or_a_key(
    rows: list[Any], admin_client: Client, kfs_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's directory does not exist (tests/settings.py), no key is set, and nobody asks for a store."""

    def refuse(alias: str) -> None:
        raise AssertionError("a page asked for a store")

    kfs_settings(KEYS=[])
    monkeypatch.setattr(type(secret_stores), "__getitem__", lambda self, alias: refuse(alias))
    for row in rows:
        for page in (list_page(type(row)), page_of(row), page_of(row, "history")):
            assert admin_client.get(page).status_code == 200


def test_what_is_shown_comes_from_the_database_that_is_written(
    rows: list[Any], client_with: MakeClient, settings: Any
) -> None:
    """A replica may be behind. This one does not even exist."""
    settings.DATABASE_ROUTERS = ["tests.admin.routers.ReadsElsewhere"]
    client = client_with()
    for row in rows:
        for page in (list_page(type(row)), f"{list_page(type(row))}?q={row.pk}", page_of(row)):
            if row._meta.model_name == "secretobject" and page == page_of(row):
                continue
            assert client.get(page).status_code == 200, page


def test_lists_do_not_load_what_they_do_not_show(rows: list[Any], admin_client: Client) -> None:
    for row in rows:
        filters: Any = admin.site._registry[type(row)].list_filter
        for query in ["", f"?q={row.pk}", *(f"?{chosen.parameter_name}=legacy" for chosen in filters)]:
            with CaptureQueriesContext(connection) as captured:
                admin_client.get(list_page(type(row), query))
            columns = [statement["sql"].partition(' FROM "')[0] for statement in captured]
            loaded = " ".join(part for part in columns if part.startswith("SELECT"))
            for column in ('"sources"."metadata"', "permission_scope", "secret_fingerprint", "lease_token"):
                assert column not in loaded
            assert "last_error_message" not in loaded

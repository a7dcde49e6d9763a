"""Lists: their filters, their order, and that they stay cheap."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from kfs_credentials.admin import filters
from kfs_credentials.admin.paginator import BoundedPaginator
from kfs_credentials.crypto import new_ref
from kfs_credentials.models import (
    AcknowledgedShape,
    Acknowledgement,
    Attention,
    Binding,
    Checkpoint,
    ClosedKey,
    Event,
    EventKind,
    KnowledgeSpace,
    Pause,
    RefError,
    RefState,
    Refusal,
    Round,
    RunState,
    SecretObject,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
    Tick,
)
from tests.admin.conftest import list_page
from tests.admin.rows import (
    AcknowledgementFactory,
    EventFactory,
    JobFactory,
    ObjectFactory,
    RefFactory,
    RoundFactory,
    set_ref,
)
from tests.factories import SourceFactory, SpaceFactory

MODELS = (
    *(Acknowledgement, KnowledgeSpace, Round, SecretObject, Source, SourceCredentialBackfill),
    *(SourceSecretLifecycleRef, Binding, Checkpoint, ClosedKey, Event, Pause, Refusal, Tick),
)
AN_HOUR = dt.timedelta(hours=1)


def listed(client: Client, model: Any, query: str = "") -> list[Any]:
    return [row.pk for row in client.get(list_page(model, query)).context["cl"].result_list]


def test_jobs_by_state(admin_client: Client) -> None:
    failed, queued = JobFactory.create(), JobFactory.create(queued=True)
    running = JobFactory.create(leased=True)
    expired = JobFactory.create(leased=True, lease_expires_at=timezone.now() - AN_HOUR)
    assert listed(admin_client, SourceCredentialBackfill, "?state=failed") == [failed.pk]
    assert listed(admin_client, SourceCredentialBackfill, "?state=queued") == [queued.pk]
    assert listed(admin_client, SourceCredentialBackfill, "?state=running") == [expired.pk, running.pk]
    assert listed(admin_client, SourceCredentialBackfill, "?state=expired") == [expired.pk]
    assert listed(admin_client, SourceCredentialBackfill, "?state=succeeded") == []
    assert listed(admin_client, SourceCredentialBackfill, "?state=nonsense") == []
    assert listed(admin_client, SourceCredentialBackfill) == [failed.pk, queued.pk, expired.pk, running.pk]


def test_refs_by_state(admin_client: Client) -> None:
    by_state = {
        state: RefFactory.create(state=state, deleted_at=timezone.now() if state == RefState.DELETED else None)
        for state in RefState
        if state != RefState.DELETING
    }
    expired = RefFactory.create(leased=True, lease_expires_at=timezone.now() - AN_HOUR)
    for state, row in by_state.items():
        assert listed(admin_client, SourceSecretLifecycleRef, f"?state={state}") == [row.pk]
    assert listed(admin_client, SourceSecretLifecycleRef, "?state=deleting") == [expired.pk]
    assert listed(admin_client, SourceSecretLifecycleRef, "?state=expired") == [expired.pk]


def test_refs_by_attention(admin_client: Client) -> None:
    by_reason = {reason: RefFactory.create(state=RefState.RETIRED) for reason in Attention}
    for reason, row in by_reason.items():
        ObjectFactory.create(credential_ref=row.credential_ref, attention=reason)
    given_up = RefFactory.create(state=RefState.RETIRED, last_error_code=RefError.ABANDONED)
    ObjectFactory.create(credential_ref=given_up.credential_ref, abandoned_reason="the bucket is gone")
    RefFactory.create(state=RefState.RETIRED)
    for reason, row in by_reason.items():
        assert listed(admin_client, SourceSecretLifecycleRef, f"?attention={reason}") == [row.pk]
    everything = {row.pk for row in by_reason.values()}
    assert set(listed(admin_client, SourceSecretLifecycleRef, "?attention=any")) == everything
    assert listed(admin_client, SourceSecretLifecycleRef, "?attention=abandoned") == [given_up.pk]
    assert listed(admin_client, SourceSecretLifecycleRef, "?attention=nonsense") == []
    text = admin_client.get(list_page(SourceSecretLifecycleRef)).text
    for reason in Attention:
        assert f">{reason.label}</td>" in text
    assert "A person gave up on the erasure: the object was not erased." in text


def test_refs_that_are_due_come_first(admin_client: Client) -> None:
    now = timezone.now()
    later, due, never = (
        RefFactory.create(state=RefState.RETIRED, next_delete_at=at) for at in (now + AN_HOUR, now - AN_HOUR, None)
    )
    assert listed(admin_client, SourceSecretLifecycleRef, "?state=retired") == [due.pk, later.pk, never.pk]


def test_by_tenant(admin_client: Client) -> None:
    space = SpaceFactory.create(tenant_id="tenant & <b>")
    source = SourceFactory.create(knowledge_space=space)
    job, ref = JobFactory.create(source=source), RefFactory.create(source=source)
    JobFactory.create()
    RefFactory.create()
    for row in (space, source, job, ref):
        model = type(row)
        assert listed(admin_client, model, "?tenant=tenant+%26+%3Cb%3E") == [row.pk]
        assert listed(admin_client, model, "?tenant=nobody") == []
        assert listed(admin_client, model, "?tenant=a%00b") == []
        text = admin_client.get(list_page(model)).text
        assert '"?tenant=tenant+%26+%3Cb%3E"' in text
        assert "tenant &amp; &lt;b&gt;" in text


def test_many_tenants(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "MOST_TENANTS", 3)
    for name in "badec":
        for _ in range(2):
            SpaceFactory.create(tenant_id=f"tenant-{name}")
    text = admin_client.get(list_page(KnowledgeSpace)).text
    assert re.findall(r'href="\?tenant=([^"]*)"', text) == ["tenant-a", "tenant-b", "tenant-c"]
    assert "tenant (the first 3)" in text
    assert len(listed(admin_client, KnowledgeSpace, "?tenant=tenant-e")) == 2


def test_sources_by_credentials(admin_client: Client) -> None:
    legacy, referenced, both, none, unsupported = (
        SourceFactory.create(),
        SourceFactory.create(bare=True),
        SourceFactory.create(),
        SourceFactory.create(bare=True),
        SourceFactory.create(credentials="text"),
    )
    for source in (referenced, both):
        set_ref(source, new_ref())
    assert listed(admin_client, Source, "?credentials=legacy") == [legacy.pk]
    assert set(listed(admin_client, Source, "?credentials=referenced")) == {referenced.pk, both.pk}
    assert listed(admin_client, Source, "?credentials=nonsense") == []
    rows = re.findall(r"<tr>.*?</tr>", admin_client.get(list_page(Source)).text, re.DOTALL)
    shown = {pk: next(row for row in rows if str(pk) in row) for pk in Source.objects.values_list("pk", flat=True)}
    assert ">in clear<" in shown[legacy.pk]
    assert ">in the secret store<" in shown[referenced.pk]
    assert "in clear" not in shown[none.pk] + shown[unsupported.pk]


def test_acknowledgements_by_shape(admin_client: Client) -> None:
    text, large = AcknowledgementFactory.create(), AcknowledgementFactory.create(shape=AcknowledgedShape.TOO_LARGE)
    assert listed(admin_client, Acknowledgement, "?shape=string") == [text.pk]
    assert listed(admin_client, Acknowledgement, "?shape=too_large") == [large.pk]
    assert listed(admin_client, Acknowledgement, "?shape=object") == []


def test_events_by_kind_the_newest_first(admin_client: Client) -> None:
    first, other, last = (EventFactory.create(kind=kind) for kind in ("retired", "erased", "retired"))
    assert listed(admin_client, Event) == [last.pk, other.pk, first.pk]
    assert listed(admin_client, Event, "?kind=retired") == [last.pk, first.pk]
    assert listed(admin_client, Event, "?kind=nonsense") == []
    text = admin_client.get(list_page(Event)).text
    assert all(f'"?kind={kind.value}"' in text for kind in EventKind)


def test_a_long_list_is_counted_and_paged_only_so_far(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedPaginator, "MOST", 60)
    for number in range(62):
        ObjectFactory.create(credential_ref=f"source-secret:v1:{number:08}-0000-4000-8000-000000000000")
    with CaptureQueriesContext(connection) as captured:
        response = admin_client.get(list_page(SecretObject))
    assert "Only the first 60 are counted and listed. Filter or search to see the others." in response.text
    counts = [statement["sql"] for statement in captured if "COUNT(" in statement["sql"]]
    assert len(counts) == 1
    assert "LIMIT 61" in counts[0]
    assert response.context["cl"].result_count == 60
    assert len(listed(admin_client, SecretObject, "?p=2")) == 10
    assert admin_client.get(list_page(SecretObject, "?p=3")).status_code == 302


def test_a_short_list_is_counted_in_full(admin_client: Client) -> None:
    ObjectFactory.create()
    response = admin_client.get(list_page(SecretObject))
    assert response.context["cl"].result_count == 1
    assert "Only the first" not in response.text


@pytest.mark.parametrize("model", MODELS)
def test_lists_keep_an_order_that_an_index_has(model: Any, admin_client: Client) -> None:
    def order(query: str) -> tuple[Any, ...]:
        return tuple(admin_client.get(list_page(model, query)).context["cl"].queryset.query.order_by)

    usual = order("")
    indexes = [index.fields for index in model._meta.indexes]
    indexes += [list(constraint.fields) for constraint in model._meta.constraints if hasattr(constraint, "fields")]
    indexes += [[model._meta.pk.name], ["pk"]]
    assert [column.removeprefix("-") for column in usual] in indexes
    for column in range(8):
        assert order(f"?o={column}") == order(f"?o=-{column}") == usual


@pytest.mark.parametrize("model", MODELS)
def test_lists_take_the_same_few_queries_however_long_they_are(
    model: Any, admin_client: Client, django_assert_max_num_queries: Any
) -> None:
    for _ in range(30):
        job = JobFactory.create()
        ref = RefFactory.create(source=job.source)
        ObjectFactory.create(credential_ref=ref.credential_ref, attention=Attention.DISPLACED)
        AcknowledgementFactory.create()
        RoundFactory.create(name=f"patrol:{job.pk}")
        EventFactory.create(credential_ref=ref.credential_ref)
    # Session, user, pause; tenants, count, rows. A search looks up a source and a space first, and what is gone.
    with django_assert_max_num_queries(6):
        admin_client.get(list_page(model))
    with django_assert_max_num_queries(9):
        admin_client.get(list_page(model, f"?q={job.source_id}"))


@pytest.mark.parametrize("model", MODELS)
def test_lists_without_rows(model: Any, admin_client: Client) -> None:
    assert admin_client.get(list_page(model)).status_code == 200


def test_states_and_ages_by_the_clock_of_the_database(admin_client: Client) -> None:
    JobFactory.create(queued=True, updated_at=timezone.now() - dt.timedelta(hours=3, minutes=5))
    JobFactory.create(leased=True, lease_expires_at=timezone.now() - dt.timedelta(minutes=4, seconds=30))
    JobFactory.create(leased=True, lease_expires_at=timezone.now() + dt.timedelta(minutes=40, seconds=30))
    text = admin_client.get(list_page(SourceCredentialBackfill)).text.replace("\xa0", " ")
    assert ">3 hours ago<" in text
    assert '<span class="kfs-badge kfs-bad">lease expired</span>' in text
    assert ">4 minutes ago<" in text
    assert "lease ends" in text
    assert ">in 40 minutes<" in text


@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/St_Johns"])
def test_ages_do_not_depend_on_time_zones(admin_client: Client, settings: Any, use_tz: bool, zone: str) -> None:
    """In neither of them is it always the same number of hours from one moment to another, on the wall."""
    job = JobFactory.create(queued=True)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE source_credential_backfills SET updated_at = now() - interval '4000 hours 30 minutes'")
    settings.USE_TZ, settings.TIME_ZONE = use_tz, zone
    row = admin_client.get(list_page(SourceCredentialBackfill, f"?q={job.pk}")).context["cl"].result_list[0]
    assert row.age // AN_HOUR == 4000
    assert row.run_state == RunState.QUEUED

"""Metrics for Prometheus: what they say, where they are had, and what they never tell."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.views.decorators import staff_member_required
from django.contrib.auth.models import User
from django.db import connection, connections
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import include, path
from prometheus_client.parser import text_string_to_metric_families

from kfs_credentials.errors import ImproperlyPrepared
from kfs_credentials.leases import seconds_from_now
from kfs_credentials.metrics import FAMILIES, metrics_view, read_metrics, render
from kfs_credentials.models import (
    Attention,
    Event,
    EventKind,
    JobError,
    Pause,
    Refusal,
    Round,
    SecretObject,
    SourceCredentialBackfill,
    Tick,
)
from kfs_credentials.status import read_status
from tests.cleanup.rows import PAST, add_ref, in_database, make_source, name_ref
from tests.factories import SourceFactory
from tests.management.commands import ROOT, Run, environment, runner
from tests.management.rows import JobFactory

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("store")]

MINUTE, HOUR = 60.0, 3600.0
CANARY = "made-up-canary-of-a-metric"
DOCUMENTED = ROOT / "docs" / "operating.md"

urlpatterns = [
    path("open/", include("kfs_credentials.metrics.urls")),
    path("closed/", staff_member_required(metrics_view)),
    path("admin/", admin.site.urls),
]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `manage.py` with these arguments."""
    return runner(capsys)


@pytest.fixture
def mounted(settings: Any) -> Iterator[None]:
    """Let a project have mounted the view twice: as it is, and for its staff."""
    with override_settings(ROOT_URLCONF="tests.test_metrics"):
        yield


Samples = dict[tuple[str, ...], float]


def parsed(text: str) -> dict[str, Samples]:
    """Return what Prometheus's own parser reads: by the name of the sample, by the values of its sorted labels."""
    found: dict[str, Samples] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
    return found


def scraped() -> dict[str, Samples]:
    """Return the metrics of now, as Prometheus reads them."""
    return parsed(render(read_metrics("default")))


def one(name: str, *labels: str) -> float:
    """Return the value of one metric now."""
    return scraped()[f"kfs_credentials_{name}"][labels]


# What they say.


def test_every_metric_is_there_with_its_help_its_type_and_its_labels() -> None:
    text = render(read_metrics("default"))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families.keys() == FAMILIES.keys()
    for name, family in FAMILIES.items():
        assert (families[name].documentation, families[name].type) == (family.help, family.type)
        assert re.fullmatch(r"kfs_credentials_[a-z]+(_[a-z]+)*", name)
        assert family.help.endswith(".")


def test_sources_by_where_their_credentials_are() -> None:
    SourceFactory.create_batch(3)
    SourceFactory.create(credentials="a string")
    SourceFactory.create(credentials=[1])
    make_source()
    both = SourceFactory.create()
    name_ref(both, add_ref(both, "active").credential_ref)
    dangling = SourceFactory.create(bare=True)
    name_ref(dangling, add_ref(dangling, "retired").credential_ref)
    large = SourceFactory.create(credentials={"token": "x" * 70_000})
    JobFactory.create(source=large, last_error_code=JobError.TOO_LARGE)
    found = scraped()
    counts = {name: found[f"kfs_credentials_sources_{name}"][()] for name in ("legacy", "movable", "referenced")}
    assert counts == {"legacy": 4, "movable": 3, "referenced": 3}
    assert found["kfs_credentials_sources"][()] == 9
    assert [found[f"kfs_credentials_sources_{name}"][()] for name in ("both", "dangling", "too_large")] == [1, 1, 1]
    assert found["kfs_credentials_sources_unsupported"] == {
        ("string",): 1,
        ("number",): 0,
        ("boolean",): 0,
        ("array",): 1,
    }


def test_jobs_and_the_oldest_of_each_state() -> None:
    JobFactory.create(queued=True)
    oldest = JobFactory.create(queued=True)
    running = JobFactory.create(running=True)
    JobFactory.create()
    jobs = SourceCredentialBackfill.objects
    jobs.filter(pk=oldest.pk).update(updated_at=seconds_from_now(-HOUR))
    jobs.filter(pk=running.pk).update(updated_at=seconds_from_now(-2 * HOUR), lease_expires_at=PAST)
    found = scraped()
    states = {("queued",): 2, ("running",): 1, ("succeeded",): 0, ("failed",): 1}
    assert found["kfs_credentials_jobs"] == states
    ages = found["kfs_credentials_jobs_oldest_age_seconds"]
    assert ages.keys() == {("queued",), ("running",), ("failed",)}
    assert HOUR <= ages["queued",] < HOUR + MINUTE
    assert 2 * HOUR <= ages["running",] < 2 * HOUR + MINUTE
    assert ages["failed",] < MINUTE
    assert found["kfs_credentials_jobs_expired_leases"][()] == 1
    assert found["kfs_credentials_jobs_failed"][JobError.UNEXPECTED.value,] == 1


def test_refs_and_the_oldest_of_each_state() -> None:
    add_ref(situation="retired, due", updated_at=seconds_from_now(-HOUR))
    add_ref(situation="retired")
    add_ref(situation="deleting, expired")
    for attention in (Attention.ERASURE_FAILS, Attention.RETAINED, Attention.DISPLACED):
        SecretObject.objects.mark([add_ref(situation="retired").credential_ref], attention)
    given_up = add_ref(situation="retired", next_delete_at=None)
    SecretObject.objects.filter(pk=given_up.credential_ref).update(abandoned_at=PAST)
    found = scraped()
    states = {"staged": 0, "candidate": 0, "active": 0, "retired": 6, "deleting": 1, "deleted": 0}
    assert found["kfs_credentials_refs"] == {(state,): count for state, count in states.items()}
    assert HOUR <= found["kfs_credentials_refs_oldest_age_seconds"]["retired",] < HOUR + MINUTE
    assert found["kfs_credentials_refs_oldest_age_seconds"]["active",] == 0
    names = ("expired_leases", "overdue", "waiting", "parked", "displaced", "abandoned")
    assert [found[f"kfs_credentials_refs_{name}"][()] for name in names] == [1, 2, 4, 2, 1, 1]
    assert found["kfs_credentials_refs_overdue_age_seconds"][()] >= 1


def test_rounds_and_what_the_patrol_has_found() -> None:
    assert "kfs_credentials_last_round_age_seconds" not in scraped(), "there was none yet"
    Round.objects.create(name=Round.SWEEP, completed_at=seconds_from_now(-HOUR), found=0)
    Round.objects.create(name=Round.patrol("default"), completed_at=seconds_from_now(-MINUTE), found=5)
    found = scraped()
    ages = found["kfs_credentials_last_round_age_seconds"]
    assert HOUR <= ages["sweep",] < HOUR + MINUTE
    assert MINUTE <= ages["patrol",] < 2 * MINUTE
    assert found["kfs_credentials_unknown_objects"][()] == 5


def test_completions_of_the_last_minute_and_hour_by_kind() -> None:
    for age, kind in ((0, "activated"), (30, "activated"), (90, "activated"), (4000, "activated"), (90, "erased")):
        Event.objects.create(created_at=seconds_from_now(-age), kind=kind, actor="tests")
    found = scraped()
    hour, minute = (found[f"kfs_credentials_events_last_{name}"] for name in ("hour", "minute"))
    assert (hour["activated",], minute["activated",]) == (3, 2)
    assert (hour["erased",], minute["erased",]) == (1, 0)
    assert hour.keys() == minute.keys() == {(kind.value,) for kind in EventKind}


def test_refusals_ticks_and_the_pause() -> None:
    assert one("paused") == 0
    Refusal.objects.create(role="cleanup", reason="store_denied", count=7, refused_at=PAST)
    Tick.objects.create(role="backfill", worker_id="a worker", ticked_at=seconds_from_now(-MINUTE))
    Pause.objects.create(paused_at=PAST, paused_by="tests", reason=CANARY)
    found = scraped()
    assert found["kfs_credentials_refusals_total"] == {("store_denied", "cleanup"): 7}
    assert MINUTE <= found["kfs_credentials_last_tick_age_seconds"]["backfill",] < 2 * MINUTE
    assert found["kfs_credentials_last_tick_age_seconds"].keys() == {("backfill",)}
    assert found["kfs_credentials_paused"][()] == 1


def test_a_dead_queue_does_not_look_healthy() -> None:
    """A worker that hangs is told by its tick, by its lease, and by what is not completed; not by how busy it looks."""
    JobFactory.create(running=True, updated_at=seconds_from_now(-150), lease_expires_at=seconds_from_now(-90))
    Tick.objects.create(role="backfill", worker_id="hung", ticked_at=seconds_from_now(-150))
    lease = 60
    assert one("last_tick_age_seconds", "backfill") > 2 * lease
    assert one("jobs_oldest_age_seconds", "running") > 2 * lease
    assert one("jobs_expired_leases") == 1
    assert one("events_last_minute", "activated") == 0


def test_labels_are_from_lists_whatever_the_rows_say() -> None:
    """A newer version of this package, or another program, may have written anything."""
    for number in range(3):
        Refusal.objects.create(role=f"{CANARY}-{number}", reason=CANARY, count=2, refused_at=PAST)
        Tick.objects.create(role=f"{CANARY}-{number}", worker_id=CANARY, ticked_at=seconds_from_now(-number * HOUR))
        JobFactory.create(last_error_code=f"{CANARY}-{number}")
        Event.objects.create(created_at=PAST, kind=CANARY, actor=CANARY, tenant_id=CANARY, detail=CANARY)
    text = render(read_metrics("default"))
    found = parsed(text)
    assert CANARY not in text
    assert found["kfs_credentials_refusals_total"] == {("other", "other"): 6}
    assert found["kfs_credentials_last_tick_age_seconds"]["other",] < MINUTE
    assert found["kfs_credentials_jobs_failed"]["other",] == 3


def test_the_number_of_samples_does_not_grow_with_the_rows() -> None:
    SourceFactory.create()
    before = len(render(read_metrics("default")).splitlines())
    for number in range(20):
        make_source(SourceFactory.create(knowledge_space__tenant_id=f"tenant-{number}").knowledge_space)
        Event.objects.create(created_at=PAST, kind="retired", actor=f"worker-{number}", source_id=uuid.uuid4())
    text = render(read_metrics("default"))
    assert len(text.splitlines()) == before
    assert "tenant-" not in text
    assert "source-secret" not in text


# How they are read.


def test_a_scrape_is_one_snapshot_and_writes_nothing() -> None:
    make_source()
    seen: list[str] = []

    def meanwhile(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        seen.append(sql)
        if len(seen) == 5:

            def act() -> None:
                SourceFactory.create_batch(3)
                Pause.objects.create(paused_at=PAST, paused_by="tests", reason="made-up")
                connections.close_all()

            thread = threading.Thread(target=act)
            thread.start()
            thread.join()
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(meanwhile):
        metrics = read_metrics("default")
    assert "READ ONLY" in seen[0]
    assert metrics.values["kfs_credentials_paused"][()] == 0
    assert metrics.values["kfs_credentials_sources_legacy"][()] == 0
    assert one("paused") == 1


def test_a_scrape_asks_hardly_more_than_the_status(django_assert_max_num_queries: Any) -> None:
    with CaptureQueriesContext(connection) as status:
        read_status("default")
    # Events, expired leases, refusals, ticks, the pause.
    with django_assert_max_num_queries(len(status) + 5):
        read_metrics("default")


def test_the_events_of_an_hour_are_found_by_an_index() -> None:
    Event.objects.bulk_create(
        [Event(created_at=seconds_from_now(-10 * HOUR), kind="retired", actor="tests") for _ in range(3000)]
    )
    in_database("VACUUM ANALYZE kfs_credentials_event")
    with CaptureQueriesContext(connection) as asked:
        read_metrics("default")
    (query,) = [query["sql"] for query in asked if 'FROM "kfs_credentials_event"' in query["sql"]]
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {query}")
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "kfs_credentials_event_kind_idx" in plan
    assert "Index Cond: ((kind = ANY" in plan


# Where they are had.


def test_the_command_prints_them_and_its_last_line_on_standard_error(run: Run) -> None:
    SourceFactory.create()
    outcome = run("credential_status", "--format", "prometheus")
    assert outcome.code == 0
    assert parsed(outcome.out)["kfs_credentials_sources_movable"][()] == 1
    assert (
        outcome.err == "Not finished: 1 to move, 0 jobs queued, 0 running. Run `manage.py run_credential_backfill`.\n"
    )
    assert run("credential_status", "--format", "prometheus", "--check").code == 4


def test_the_command_counts_the_whole_database(run: Run) -> None:
    SourceFactory.create()
    outcome = run("credential_status", "--format", "prometheus", "--tenant", "tenant-a")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "CommandError: Metrics are about the whole database: leave out --tenant and --space, or use --format json.\n"
    )


@pytest.mark.usefixtures("mounted")
def test_a_project_mounts_the_view_and_says_who_may_see_it(client: Client) -> None:
    SourceFactory.create()
    response = client.get("/open/")
    assert response.status_code == 200
    assert response["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "no-store" in response["Cache-Control"]
    assert parsed(response.text)["kfs_credentials_sources_legacy"][()] == 1
    assert client.post("/open/").status_code == 405
    assert client.get("/closed/").status_code == 302
    client.force_login(User.objects.create_user("ada", is_staff=True))
    assert client.get("/closed/").status_code == 200


@pytest.mark.usefixtures("mounted")
def test_the_view_is_not_in_a_transaction_of_the_requests(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one that is open already it could not read a snapshot."""
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    with CaptureQueriesContext(connection) as asked:
        assert client.get("/open/").status_code == 200
    assert any("REPEATABLE READ, READ ONLY" in query["sql"] for query in asked)


@pytest.mark.usefixtures("mounted")
def test_a_database_that_refuses_is_told_without_its_words(client: Client) -> None:
    in_database("ALTER TABLE kfs_credentials_tick RENAME TO elsewhere")
    try:
        response = client.get("/open/")
    finally:
        in_database("ALTER TABLE elsewhere RENAME TO kfs_credentials_tick")
    assert response.status_code == 503
    assert response.text == "The database did not answer (UndefinedTable, SQLSTATE 42P01).\n"


def test_without_the_package_the_message_says_what_to_install() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(ImproperlyPrepared) as refused:
            render(read_metrics("default"))
    assert str(refused.value) == (
        "Metrics for Prometheus need the package prometheus_client: pip install 'kfs-credentials[prometheus]'."
    )


def test_nothing_of_the_package_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, django; django.setup(); import kfs_credentials.metrics.urls; "
        "sys.exit('prometheus_client' in sys.modules)"
    )
    variables = environment(DJANGO_SETTINGS_MODULE="tests.settings", PYTHONPATH=":".join(sys.path))
    assert subprocess.run([sys.executable, "-c", code], env=variables, cwd=ROOT, check=False).returncode == 0


# What is written about them.


def test_the_documentation_has_each_metric_and_no_other() -> None:
    section = DOCUMENTED.read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(kfs_credentials_\w+)(?:\{(\w+(?:, \w+)*)\})?` \| (.+) \|$", section, re.MULTILINE)
    described = {name: (labels, text) for name, labels, text in rows}
    expected = {
        f"{name}_total" if family.type == "counter" else name: (
            ", ".join(label for label, _ in family.labels),
            family.help.rstrip("."),
        )
        for name, family in FAMILIES.items()
    }
    assert described == expected


def test_the_documentation_has_each_kind_of_event() -> None:
    section = DOCUMENTED.read_text().partition("\n## Events\n")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)`", "".join(line.split(" | ")[0] for line in section.splitlines() if line[:3] == "| `"))
    assert sorted(named) == sorted(EventKind.values)

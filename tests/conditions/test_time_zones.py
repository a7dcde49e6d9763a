"""Whatever time zone the project, its database or the session has, and whether or not USE_TZ is on: the same rows.

Where the clocks change, see test_daylight_saving.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection
from django.test import Client

from kfs_credentials import services
from kfs_credentials.backfill import Backfill
from kfs_credentials.cleanup import Cleanup
from kfs_credentials.metrics import read_metrics, render
from kfs_credentials.models import Source, SourceSecretLifecycleRef
from kfs_credentials.pause import pause_workers, resume_workers
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.admin.conftest import list_page
from tests.bound import seal_anew
from tests.cleanup.rows import make_source
from tests.cleanup.runs import sweep
from tests.factories import SourceFactory, SpaceFactory
from tests.keys import NEW, OLD, execute
from tests.management.commands import Run, dsn, runner
from tests.verification.test_objects import unknown

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = 3600
EXPIRED = "lease_expires_at = now() - interval '1 second'"
ABOUT = 90
"""Seconds that a run may take."""

CHATHAM = "Pacific/Chatham"
PLACES = [
    (True, "UTC", CHATHAM),
    (True, "Europe/Berlin", None),
    (True, "America/St_Johns", CHATHAM),
    (False, "UTC", None),
    (False, "Europe/Berlin", CHATHAM),
    (False, "America/St_Johns", None),
]
"""USE_TZ, TIME_ZONE, and the time zone that the database gives to a session that asks for none."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `manage.py` with these arguments."""
    return runner(capsys)


@pytest.fixture
def database_zone(request: pytest.FixtureRequest, transactional_db: None) -> Iterator[str | None]:
    """The time zone of the database."""
    name = connection.ops.quote_name(connection.settings_dict["NAME"])
    if request.param:
        execute(f"ALTER DATABASE {name} SET timezone = '{request.param}'")
        connection.close()
        with psycopg.connect(dsn()) as session:
            assert session.execute("SHOW timezone").fetchone() == (request.param,)
    yield request.param
    if request.param:
        execute(f"ALTER DATABASE {name} RESET timezone")
        connection.close()


@pytest.mark.parametrize(("use_tz", "zone", "database_zone"), PLACES, indirect=["database_zone"])
def test_the_same_comes_of_it(
    use_tz: bool,
    zone: str,
    database_zone: str | None,
    settings: Any,
    kfs_settings: Any,
    store: EncryptedStore,
    secrets_directory: Path,
    run: Run,
    admin_client: Client,
    intervals: list[str],
) -> None:
    """From the first source to the last erasure, with leases that hold and leases that have run out."""
    kfs_settings(KEYS=[OLD], ERASE_GRACE=0, LATE_WRITE_HORIZON=0)
    seal_anew("default", store)
    settings.USE_TZ, settings.TIME_ZONE = use_tz, zone
    with connection.cursor() as cursor:
        cursor.execute("SHOW timezone")
        assert cursor.fetchone() == ("UTC" if use_tz else zone,)
    # A backfill: one job whose lease has run out, and one whose lease holds, for a while.
    space = SpaceFactory.create()
    SourceFactory.create_batch(3, knowledge_space=space)
    backfill = Backfill(using="default", store=store, worker="dead", lease=60.0)
    assert backfill.discover(1) is not None
    assert backfill.claim(1) is None, "its lease holds"
    execute(f"UPDATE source_credential_backfills SET {EXPIRED}")
    outcome = run("run_credential_backfill", "--format", "json")
    assert outcome.code == 0, outcome
    assert outcome.json["result"]["moved"] == 3
    # The services, and a cleanup of what they leave: one erasure under a lease that has run out.
    first, second, third = Source.objects.order_by("id")
    services.rotate_credentials(tenant=space.tenant_id, source_id=first.pk, credentials={"token": "new"})
    services.revoke_credentials(tenant=space.tenant_id, source_id=second.pk)
    services.delete_source(tenant=space.tenant_id, source_id=third.pk)
    fourth = make_source(space)
    cleanup = Cleanup(using="default", worker="dead", lease=60.0)
    assert cleanup.claim(1) is not None
    others = cleanup.claim(10)
    assert others is not None
    assert len(others.items) == 2, "its lease holds"
    cleanup.release(others)
    execute(f"UPDATE source_secret_lifecycle_refs SET {EXPIRED} WHERE state = 'deleting'")
    outcome = run("run_secret_cleanup")
    assert outcome.code == 0, outcome
    # Verification, which erases what nobody knows and what is an hour old; and another key.
    kfs_settings(KEYS=[NEW, OLD], ERASE_GRACE=0.9 * HOUR, LATE_WRITE_HORIZON=0)
    old, young = unknown(store, secrets_directory, HOUR), unknown(store, secrets_directory, 0.5 * HOUR)
    outcome = run("verify_credentials", "--deep", "--erase-unknown", "--yes")
    assert (secrets_directory / young).exists()
    assert not (secrets_directory / old).exists(), outcome
    (secrets_directory / young).unlink()
    outcome = run("reencrypt_secrets")
    assert outcome.code == 0, outcome
    # How long ago.
    execute("UPDATE source_secret_lifecycle_refs SET updated_at = now() - interval '90 minutes' WHERE state = 'active'")
    execute("UPDATE kfs_credentials_round SET completed_at = now() - interval '30 minutes'")
    execute("UPDATE kfs_credentials_tick SET ticked_at = now() - interval '10 minutes'")
    pause_workers("default", by="tests", reason="a look at the time")
    moment = "SELECT to_char(paused_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') FROM kfs_credentials_pause"
    with connection.cursor() as cursor:
        cursor.execute(moment)
        (paused_at,) = cursor.fetchone()
    status = run("credential_status", "--format", "json").json
    assert status["pause"]["at"] == paused_at.replace(" ", "T") + "+00:00"
    assert f"at {paused_at} UTC" in run("run_secret_cleanup").out
    resume_workers("default")
    assert status["sources"]["referenced"] == 2
    assert status["backfills"]["succeeded"] == 2
    assert {state: status["ledger"][state] for state in ("active", "retired", "deleted")} == {
        "active": 2,
        "retired": 0,
        "deleted": 3,
    }
    assert status["ages"]["ledger"]["active"] == pytest.approx(1.5 * HOUR, abs=ABOUT)
    assert status["rounds"]["last_sweep_seconds"] == pytest.approx(0.5 * HOUR, abs=ABOUT)
    ticks = re.findall(r"^kfs_credentials_last_tick_age_seconds\{[^}]*backfill[^}]*\} (\d+)", metrics(), re.MULTILINE)
    assert [int(age) for age in ticks] == [pytest.approx(HOUR / 6, abs=ABOUT)]
    text = admin_client.get(list_page(SourceSecretLifecycleRef, "?state=active")).text.replace("\xa0", " ")
    assert text.count(">1 hour ago<") == 2
    assert services.resolve_credentials(tenant=space.tenant_id, source_id=fourth.pk) == {"token": "made-up"}
    sweep(Cleanup(using="default", worker="tests", lease=60.0))
    outcome = run("verify_credentials", "--deep")
    assert outcome.code == 0, outcome
    assert intervals == []


def lengths(value: Any) -> Iterator[timedelta]:
    """Yield the lengths of time in the parameters of a statement."""
    if isinstance(value, timedelta):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from lengths(one)


@pytest.fixture
def intervals(transactional_db: None) -> Iterator[list[str]]:
    """Every statement with a length of time among its parameters: psycopg writes its days as days on a wall."""
    found: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if list(lengths(params)):
            found.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        yield found


def test_a_length_of_time_would_be_seen(intervals: list[str]) -> None:
    execute("SELECT now() - %s", timedelta(days=1))
    assert intervals == ["SELECT now() - %s"]


def metrics() -> str:
    """Return the metrics as they are scraped."""
    return render(read_metrics("default"))

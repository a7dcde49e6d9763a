"""Pause and resume: what an operator types and reads."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from kfs_credentials.models import Pause
from tests.factories import SourceFactory
from tests.management.commands import Run
from tests.management.rows import table_contents

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("store")]

PAUSE = ("pause_credential_workers", "--reason", "moving the volume", "--by", "somebody")


def test_a_pause_and_its_end(run: Run) -> None:
    SourceFactory.create_batch(2)
    outcome = run(*PAUSE)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == (
        "Paused. What workers hold now is finished or given back within 60 s. `manage.py resume_credential_workers` "
        "lets them go on.\n"
    )
    before = table_contents()
    for command in ("run_credential_backfill", "run_secret_cleanup"):
        outcome = run(command)
        at = f"{Pause.objects.get().paused_at:%Y-%m-%d %H:%M:%S %Z}"
        assert outcome.code == 4
        assert f"Ended early: paused by somebody at {at}: moving the volume." in outcome.last_line
        assert outcome.last_line.endswith(
            f"When they may go on, run `manage.py resume_credential_workers`, then `manage.py {command}`."
        )
    assert table_contents() == before

    outcome = run("resume_credential_workers")
    assert outcome.code == 0
    assert outcome.out == "Resumed. They were paused by somebody: moving the volume.\n"
    assert run("run_credential_backfill").out.startswith("2 moved ")


def test_the_status_shows_who_and_why(run: Run) -> None:
    run(*PAUSE)
    pause = Pause.objects.get()
    at = pause.paused_at.isoformat(timespec="seconds")
    assert run("credential_status").last_line == (
        "Clean: nothing is left to move or to look at. The workers are paused, since "
        f"{at} by somebody: moving the volume. `manage.py resume_credential_workers` lets them go on."
    )
    assert run("credential_status", "--format", "json").json["pause"] == {
        "by": "somebody",
        "at": at,
        "reason": "moving the volume",
    }
    assert run("credential_status", "--check").code == 3


def test_a_second_pause(run: Run) -> None:
    run(*PAUSE)
    outcome = run("pause_credential_workers", "--reason", "another")
    assert outcome.code == 1
    assert outcome.err == (
        "CommandError: The workers are paused already, by somebody: moving the volume. That pause stands; "
        "`manage.py resume_credential_workers` ends it.\n"
    )


def test_nothing_to_resume(run: Run) -> None:
    outcome = run("resume_credential_workers")
    assert (outcome.code, outcome.out) == (0, "The workers were not paused. Nothing was changed.\n")


@pytest.mark.parametrize(("option", "value"), [("--reason", " "), ("--reason", "a\0b"), ("--by", "")])
def test_texts_that_cannot_be_stored(run: Run, option: str, value: str) -> None:
    outcome = run("pause_credential_workers", "--reason", "why", option, value)
    assert outcome.code == 1
    assert outcome.err == f"CommandError: {option} must be a text, without the character U+0000.\n"
    assert not Pause.objects.exists()


def test_a_reason_is_needed(run: Run) -> None:
    outcome = run("pause_credential_workers")
    assert outcome.code == 1
    assert "the following arguments are required: --reason" in outcome.err


def test_the_admin_shows_who_and_why(client: Client, run: Run, admin_user: User) -> None:
    """On every list; a secret that somebody gave as a reason is not shown."""
    client.force_login(admin_user)
    page = reverse("admin:kfs_credentials_sourcecredentialbackfill_changelist")
    assert b"The workers are paused" not in client.get(page).content
    run("pause_credential_workers", "--by", "somebody", "--reason", "moved; password=made-up-secret")
    shown: Any = client.get(page).content.decode()
    assert "The workers are paused, by somebody: moved; password=[hidden]" in shown
    assert "made-up-secret" not in shown

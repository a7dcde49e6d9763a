"""`credential_status`: what it prints, and what its exit code tells a script."""

from __future__ import annotations

import re
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from kfs_credentials.conf import key_ring
from kfs_credentials.keys import close_keys
from kfs_credentials.models import Attention, JobError, Round
from tests.factories import SourceFactory, SpaceFactory
from tests.management.commands import Admin, Run
from tests.management.rows import (
    JobFactory,
    RefFactory,
    directory_contents,
    give_ref,
    ledger_row,
    object_row,
    table_contents,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

BACKFILL = "`manage.py run_credential_backfill`"
CLEANUP = "`manage.py run_secret_cleanup`"
SETTLE = "`manage.py settle_unsupported_credentials --all --dry-run`"
RETRY = "`manage.py retry_credential_backfill --all`"

LEFT = f"Not finished: 4 to move, 1 job queued, 1 running. Run {BACKFILL}."
BOTH = (
    "with both a ref and credentials in clear (an old application writes them back: stop it, then "
    "`manage.py verify_credentials` says what to do)"
)


def empty() -> None:
    pass


def clean() -> None:
    give_ref(SourceFactory.create(bare=True))
    SourceFactory.create(bare=True)


def left() -> None:
    SourceFactory.create_batch(2)
    JobFactory.create(queued=True)
    JobFactory.create(running=True)
    SourceFactory.create(credentials="token")


def only_a_job_left() -> None:
    JobFactory.create(source=SourceFactory.create(bare=True), running=True)


def hung() -> None:
    for expires in (past(), timezone.now() + timedelta(hours=1)):
        JobFactory.create(source=SourceFactory.create(bare=True), running=True, lease_expires_at=expires)


def to_settle() -> None:
    SourceFactory.create(credentials=["token"])
    large = SourceFactory.create(credentials={"bundle": "x" * 66_000})
    JobFactory.create(source=large, last_error_code=JobError.TOO_LARGE)


def one_to_settle() -> None:
    large = SourceFactory.create(credentials={"bundle": "x" * 66_000})
    JobFactory.create(source=large, last_error_code=JobError.TOO_LARGE)


def failed() -> None:
    JobFactory.create()


def both() -> None:
    give_ref(SourceFactory.create())


def overdue() -> None:
    for _ in range(2):
        ledger_row(SourceFactory.create(bare=True), next_delete_at=past())


def one_overdue_and_more_to_do() -> None:
    SourceFactory.create()
    ledger_row(SourceFactory.create(bare=True), next_delete_at=past())
    give_ref(SourceFactory.create(bare=True), in_ledger=False)


def later() -> None:
    ledger_row(SourceFactory.create(bare=True), next_delete_at=timezone.now() + timedelta(hours=1))
    ledger_row(SourceFactory.create(bare=True), state="deleted", deleted_at=past())


def dangling() -> None:
    for _ in range(2):
        give_ref(SourceFactory.create(bare=True), in_ledger=False)


def parked() -> None:
    attended(Attention.ERASURE_FAILS)
    attended(Attention.RETAINED)


def displaced() -> None:
    attended(Attention.DISPLACED)


def unknown() -> None:
    Round.objects.create(name=Round.patrol("default"), found=3, completed_at=past())


def every_kind_of_ref() -> None:
    for rows in (dangling, parked, displaced, unknown):
        rows()


def attended(attention: Attention) -> None:
    row = ledger_row(SourceFactory.create(bare=True), next_delete_at=timezone.now() + timedelta(hours=1))
    object_row(row.credential_ref, attention=attention)


def past() -> datetime:
    return timezone.now() - timedelta(minutes=1)


DANGLING = f"2 whose ref is not in use by the ledger ({CLEANUP} repairs what can be repaired, and names the others)"
PARKED = "2 refs whose erasure fails (the admin shows them, and can try again)"
DISPLACED = "1 displaced ref (the admin can restore or discard them)"
MORE_TO_DO = (
    f"Not finished: 1 to move, 0 jobs queued, 0 running. Run {BACKFILL}. 1 ref overdue. Run {CLEANUP}. "
    f"To look at besides: {DANGLING.replace('2 whose', '1 whose')}."
)
UNKNOWN = "3 objects in the store that no ledger row accounts for (`manage.py verify_credentials --deep` lists them)"


@pytest.mark.parametrize(
    ("rows", "code", "line"),
    [
        (empty, 0, "Clean: nothing is left to move or to look at."),
        (clean, 0, "Clean: nothing is left to move or to look at."),
        (
            left,
            4,
            f"{LEFT} To look at besides: 1 unsupported ({SETTLE} lists them).",
        ),
        (only_a_job_left, 4, f"Not finished: 0 to move, 0 jobs queued, 1 running. Run {BACKFILL}."),
        (
            hung,
            4,
            (
                "Not finished: 0 to move, 0 jobs queued, 2 running (1 expired lease: the worker died or hangs). "
                f"Run {BACKFILL}."
            ),
        ),
        (
            to_settle,
            3,
            f"Nothing is left to move. To look at: 1 unsupported; 1 too large ({SETTLE} lists them).",
        ),
        (one_to_settle, 3, f"Nothing is left to move. To look at: 1 too large ({SETTLE} lists them)."),
        (failed, 3, f"Nothing is left to move. To look at: 1 failed ({RETRY} once their cause is gone)."),
        (
            both,
            3,
            f"Nothing is left to move. To look at: 1 {BOTH}.",
        ),
        (overdue, 4, f"Not finished: 2 refs overdue. Run {CLEANUP}."),
        (
            one_overdue_and_more_to_do,
            4,
            MORE_TO_DO,
        ),
        (later, 0, "Clean: nothing is left to move or to look at."),
        (dangling, 3, f"Nothing is left to move. To look at: {DANGLING}."),
        (parked, 3, f"Nothing is left to move. To look at: {PARKED}."),
        (displaced, 3, f"Nothing is left to move. To look at: {DISPLACED}."),
        (unknown, 3, f"Nothing is left to move. To look at: {UNKNOWN}."),
        (
            every_kind_of_ref,
            3,
            f"Nothing is left to move. To look at: {DANGLING}; {PARKED}; {DISPLACED}; {UNKNOWN}.",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_last_line_and_the_exit_codes(run: Run, rows: Any, code: int, line: str) -> None:
    rows()
    shown, checked = run("credential_status"), run("credential_status", "--check")
    assert (shown.code, shown.last_line, shown.err) == (0, line, "")
    assert (checked.code, checked.out, checked.err) == (code, shown.out, "")
    as_json = run("credential_status", "--check", "--format", "json")
    assert (as_json.code, as_json.err) == (code, f"{line}\n")
    assert as_json.json["clean"] == (code == 0)


def test_settled_ones_are_clean_and_are_counted(run: Run) -> None:
    to_settle()
    assert run("settle_unsupported_credentials", "--all").code == 0
    outcome = run("credential_status", "--check")
    assert outcome.code == 0
    assert outcome.last_line == (
        "Clean: nothing is left to move or to look at (2 that stay in clear are acknowledged)."
    )


def test_the_json_has_every_member(run: Run) -> None:
    left()
    to_settle()
    RefFactory.create(job=JobFactory.create(queued=True), state="candidate", next_delete_at=None)
    status = run("credential_status", "--format", "json").json
    age = status["backfills"].pop("oldest_queued_seconds")
    ages = status.pop("ages")
    assert list(ages["backfills"]) == ["queued", "running", "failed"]
    assert list(ages["ledger"]) == ["staged", "candidate", "active", "retired", "deleting", "deleted"]
    every = (age, *ages["backfills"].values(), *ages["ledger"].values())
    assert all(isinstance(one, int) and one >= 0 for one in every)
    assert status == {
        "sources": {
            "total": 8,
            "legacy": 6,
            "movable": 5,
            "unsupported": 2,
            "too_large": 1,
            "referenced": 0,
            "both": 0,
            "dangling": 0,
        },
        "backfills": {"queued": 2, "running": 1, "succeeded": 0, "failed": 1, "expired_leases": 0},
        "ledger": {
            "staged": 0,
            "candidate": 1,
            "active": 0,
            "retired": 0,
            "deleting": 0,
            "deleted": 0,
            "overdue": 0,
            "oldest_overdue_seconds": 0,
            "waiting": 0,
            "parked": 0,
            "displaced": 0,
            "abandoned": 0,
            "erased_last_hour": 0,
        },
        "rounds": {"unknown_objects": 0, "last_sweep_seconds": None, "last_patrol_seconds": None},
        "unsupported": {"string": 1, "number": 0, "boolean": 0, "array": 1},
        "failures": {"SOURCE_SECRET_TOO_LARGE": 1},
        "acknowledged": {"unsupported": 0, "too_large": 0},
        "pause": None,
        "bindings": {
            "default": {**status["bindings"]["default"], "epoch": 0, "bound_by": "tests", "confirmed": True},
        },
        "keys": [
            {
                "key_id": key_id,
                "live": 0,
                "retired": 0,
                "candidate": candidate,
                "in_ring": key_id is not None,
                "first": key_id is not None,
                "closed": False,
            }
            for key_id, candidate in ((key_ring().primary.id, 0), (None, 1))
        ],
        "clean": False,
        "stores": {"default": None},
    }


def test_the_table_has_what_the_json_has(run: Run) -> None:
    left()
    to_settle()
    JobFactory.create(last_error_code="CODE\x1b[2J")
    status = run("credential_status", "--format", "json").json
    out = run("credential_status").out
    for name, count in status["sources"].items():
        assert re.search(rf" {name.replace('_', ' ')} +{count}( |$)", out, re.MULTILINE)
    assert re.search(r"^  by code +CODE\\x1b\[2J +1$", out, re.MULTILINE)
    assert re.search(r"^ +SOURCE_SECRET_TOO_LARGE +1$", out, re.MULTILINE)


def test_tenant_and_space_narrow_it_down_and_the_hints_with_it(run: Run) -> None:
    here = SpaceFactory.create(tenant_id="tenant one")
    SourceFactory.create(knowledge_space=here)
    SourceFactory.create_batch(2, knowledge_space=SpaceFactory.create(tenant_id="tenant one"))
    SourceFactory.create_batch(4)
    by_tenant = run("credential_status", "--tenant", "tenant one", "--check")
    assert by_tenant.code == 4
    assert by_tenant.last_line == (
        "Not finished: 3 to move, 0 jobs queued, 0 running. "
        "Run `manage.py run_credential_backfill --tenant 'tenant one'`."
    )
    by_space = run("credential_status", "--tenant", "tenant one", "--space", here.pk)
    assert by_space.last_line == (
        "Not finished: 1 to move, 0 jobs queued, 0 running. "
        f"Run `manage.py run_credential_backfill --tenant 'tenant one' --space {here.pk}`."
    )


def test_how_long_ago_in_words_for_what_never_was(run: Run) -> None:
    assert re.search(r"^ +last patrol seconds +never  since all objects", run("credential_status").out, re.MULTILINE)
    unknown()
    out = run("credential_status").out
    assert re.search(r"^rounds +unknown objects +3  objects that no ledger row", out, re.MULTILINE)
    assert re.search(r"^ +last patrol seconds +\d+  since all objects", out, re.MULTILINE)
    assert re.search(r"^ +last sweep seconds +never  since all refs", out, re.MULTILINE)


def test_a_tenant_is_told_of_its_own_refs_only(run: Run) -> None:
    here = SourceFactory.create(knowledge_space__tenant_id="tenant one", bare=True)
    ledger_row(here, next_delete_at=past())
    every_kind_of_ref()
    outcome = run("credential_status", "--tenant", "tenant one", "--check")
    assert outcome.code == 4
    assert outcome.last_line == (
        "Not finished: 1 ref overdue. Run `manage.py run_secret_cleanup --tenant 'tenant one'`."
    )


def test_it_changes_nothing(run: Run, secrets_directory: Path) -> None:
    left()
    to_settle()
    before = table_contents(), directory_contents(secrets_directory)
    run("credential_status")
    run("credential_status", "--format", "json", "--check")
    assert (table_contents(), directory_contents(secrets_directory)) == before


def test_it_waits_for_nobody(run: Run, admin: Admin) -> None:
    left()
    with admin.transaction():
        admin.execute("LOCK TABLE knowledge_spaces, sources, source_credential_backfills IN EXCLUSIVE MODE")
        assert run("credential_status", "--check").code == 4


def test_a_store_that_is_not_there(run: Run, secrets_directory: Path) -> None:
    shutil.rmtree(secrets_directory)
    outcome = run("credential_status", "--check")
    assert outcome.code == 1
    assert "kfs_credentials.E004" in outcome.err
    # The counts need no store; but that it is this database's cannot be told.
    outcome = run("credential_status", "--check", "--skip-checks")
    assert outcome.code == 3
    assert "Clean: nothing is left to move or to look at. Besides: secret store 'default' could not be " in outcome.out


def test_another_store_in_its_place(run: Run, secrets_directory: Path, tmp_path: Path) -> None:
    """What is counted may be all right; what it stands for is not there."""
    secrets_directory.rename(tmp_path / "volume")
    secrets_directory.mkdir()
    outcome = run("credential_status", "--check")
    assert outcome.code == 3
    assert "Besides: secret store 'default': the store does not show that it is this database's" in outcome.last_line
    assert run("credential_status", "--format", "json").json["stores"]["default"] is not None


def test_a_closed_first_key(run: Run) -> None:
    """This process would be refused."""
    first = key_ring().primary.id
    close_keys("default", [first], by="tests", primary="another")
    outcome = run("credential_status", "--check")
    assert outcome.code == 3
    assert "the first key of this process is closed" in outcome.last_line


def test_an_interruption(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kfs_credentials.management.commands.credential_status.read_status", interrupt)
    outcome = run("credential_status")
    assert (outcome.code, outcome.out) == (4, "")
    assert outcome.err == "CommandError: Interrupted. It is safe to run this again.\n"

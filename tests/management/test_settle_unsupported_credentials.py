"""`settle_unsupported_credentials`: which ones, what it says, and its exit codes."""

from __future__ import annotations

import getpass
import uuid
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials.models import Acknowledgement, JobError, Source
from tests.factories import SourceFactory, SpaceFactory
from tests.management.commands import Run
from tests.management.rows import JobFactory, directory_contents, table_contents

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

LIST = "`manage.py settle_unsupported_credentials --all --dry-run`"
IN_CLEAR = "They stay in clear where they are."


def source(number: int, credentials: object, tenant: str = "tenant-a") -> Source:
    return SourceFactory.create(id=uuid.UUID(int=number), credentials=credentials, knowledge_space__tenant_id=tenant)


def too_large(number: int) -> Source:
    made = source(number, {"bundle": "canary" * 20_000})
    JobFactory.create(source=made, last_error_code=JobError.TOO_LARGE)
    return made


def acknowledged() -> list[tuple[int, str]]:
    return sorted((row.source_id.int, row.shape) for row in Acknowledgement.objects.all())


@pytest.mark.parametrize("arguments", [[], ["--all", uuid.UUID(int=1)], ["--shape", "array"]])
def test_which_sources_has_to_be_said(run: Run, arguments: list[object]) -> None:
    outcome = run("settle_unsupported_credentials", *arguments)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == "CommandError: Say which sources: either give their ids, or --all.\n"


def test_the_dry_run_lists_them(run: Run, secrets_directory: Path) -> None:
    source(1, "canary")
    source(2, ["canary"], tenant="東京\n")
    source(3, {"token": "canary"})
    too_large(4)
    before = table_contents(), directory_contents(secrets_directory)
    outcome = run("settle_unsupported_credentials", "--all", "--dry-run")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        "00000000-0000-0000-0000-000000000001  string     tenant-a",
        r"00000000-0000-0000-0000-000000000002  array      東京\n",
        "00000000-0000-0000-0000-000000000004  too_large  tenant-a",
        "3 to acknowledge (1 array, 1 string, 1 too large). Nothing was changed.",
    ]
    outcome = run("settle_unsupported_credentials", "--all", "--dry-run", "--format", "json")
    assert outcome.err == "3 to acknowledge (1 array, 1 string, 1 too large). Nothing was changed.\n"
    assert outcome.json["found"][1] == {
        "source": "00000000-0000-0000-0000-000000000002",
        "tenant": "東京\n",
        "shape": "array",
    }
    assert (table_contents(), directory_contents(secrets_directory)) == before


def test_all(run: Run) -> None:
    source(1, "token")
    source(2, 7)
    too_large(3)
    outcome = run("settle_unsupported_credentials", "--all")
    assert outcome.code == 0
    assert outcome.last_line == f"3 acknowledged (1 number, 1 string, 1 too large). {IN_CLEAR}"
    assert acknowledged() == [(1, "string"), (2, "number"), (3, "too_large")]
    assert run("credential_status", "--check").code == 0
    outcome = run("settle_unsupported_credentials", "--all")
    assert (outcome.code, outcome.out) == (0, "0 acknowledged.\n")


def test_one_and_some_and_again(run: Run) -> None:
    for number in (1, 2, 3):
        source(number, "token")
    one, two = uuid.UUID(int=1), uuid.UUID(int=2)
    assert run("settle_unsupported_credentials", one).last_line == f"1 acknowledged (1 string). {IN_CLEAR}"
    outcome = run("settle_unsupported_credentials", one, two)
    assert outcome.code == 0
    assert outcome.last_line == (f"1 acknowledged (1 string). {IN_CLEAR} 1 had been acknowledged before.")
    outcome = run("settle_unsupported_credentials", one)
    assert (outcome.code, outcome.out) == (0, "0 acknowledged. 1 had been acknowledged before.\n")
    assert acknowledged() == [(1, "string"), (2, "string")]


def test_an_id_where_nothing_is_to_acknowledge(run: Run) -> None:
    source(1, "token")
    source(2, {"token": "made-up"})
    outcome = run("settle_unsupported_credentials", *(uuid.UUID(int=number) for number in (1, 2, 3)))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "CommandError: Nothing to acknowledge at: 00000000-0000-0000-0000-000000000002, "
        f"00000000-0000-0000-0000-000000000003. Nothing was touched; {LIST} lists what there is.\n"
    )
    assert acknowledged() == []


@pytest.mark.parametrize(
    ("shape", "numbers"), [("string", [1]), ("number", [2]), ("boolean", [3]), ("array", [4]), ("too_large", [5])]
)
def test_a_shape(run: Run, shape: str, numbers: list[int]) -> None:
    for number, credentials in enumerate(("token", 0, False, []), start=1):
        source(number, credentials)
    too_large(5)
    assert run("settle_unsupported_credentials", "--all", "--shape", shape).code == 0
    assert acknowledged() == [(number, shape) for number in numbers]


def test_tenant_and_space(run: Run) -> None:
    source(1, "token")
    there = source(2, "token", tenant="tenant-b")
    source(3, "token", tenant="tenant-b")
    assert run("settle_unsupported_credentials", "--all", "--space", there.knowledge_space_id).code == 0
    assert acknowledged() == [(2, "string")]
    assert run("settle_unsupported_credentials", "--all", "--tenant", "tenant-b").code == 0
    assert acknowledged() == [(2, "string"), (3, "string")]
    # Another tenant's is none.
    SpaceFactory.create(tenant_id="tenant-c")
    outcome = run("settle_unsupported_credentials", uuid.UUID(int=1), "--tenant", "tenant-c")
    assert outcome.code == 1
    assert "Nothing to acknowledge at: 00000000-0000-0000-0000-000000000001." in outcome.err


def test_who_acknowledged(run: Run) -> None:
    source(1, "token")
    source(2, [])
    run("settle_unsupported_credentials", "--all", "--shape", "string")
    run("settle_unsupported_credentials", "--all", "--by", "Security team")
    by = dict(Acknowledgement.objects.values_list("shape", "acknowledged_by"))
    assert by == {"string": getpass.getuser(), "array": "Security team"}


def test_a_container_whose_user_has_no_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    source(1, "token")
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 17)
    assert run("settle_unsupported_credentials", "--all").code == 0
    assert Acknowledgement.objects.get().acknowledged_by == "unknown"


@pytest.mark.parametrize(
    ("before", "after"),
    [("token", ["token"]), ([], "token"), (0, False), ({"bundle": "x" * 70_000}, "token")],
    ids=["string to array", "array to string", "number to boolean", "too large to string"],
)
def test_credentials_whose_shape_changed_count_again(run: Run, before: object, after: object) -> None:
    made = source(1, before)
    if isinstance(before, dict):
        JobFactory.create(source=made, last_error_code=JobError.TOO_LARGE)
    run("settle_unsupported_credentials", "--all")
    assert run("credential_status", "--check").code == 0
    Source.objects.filter(pk=made.pk).update(metadata={"credentials": after})
    status = run("credential_status", "--check", "--format", "json")
    assert status.code == 3
    assert status.json["acknowledged"] == {"unsupported": 0, "too_large": 0}
    # And can be acknowledged anew.
    assert run("settle_unsupported_credentials", made.pk).code == 0
    assert run("credential_status", "--format", "json").json["acknowledged"]["unsupported"] == 1


def test_credentials_that_became_an_object_are_moved(run: Run) -> None:
    made = source(1, "token")
    run("settle_unsupported_credentials", "--all")
    Source.objects.filter(pk=made.pk).update(metadata={"credentials": {"token": "made-up"}})
    assert run("credential_status", "--check").code == 4
    assert run("run_credential_backfill").code == 0


def test_too_large_ones_that_became_small_count_again(run: Run) -> None:
    made = too_large(1)
    run("settle_unsupported_credentials", "--all")
    assert run("credential_status", "--check").code == 0
    Source.objects.filter(pk=made.pk).update(metadata={"credentials": {"token": "made-up"}})
    status = run("credential_status", "--check")
    assert status.code == 3
    assert "1 failed (`manage.py retry_credential_backfill --all` once their cause is gone)" in status.last_line
    assert run("retry_credential_backfill", "--all").code == 0
    assert run("run_credential_backfill").code == 0


def test_too_large_ones_after_the_limit_was_raised(run: Run, kfs_settings: Any) -> None:
    too_large(1)
    run("settle_unsupported_credentials", "--all")
    kfs_settings(MAX_SECRET_BYTES=200_000)
    assert run("credential_status", "--check").code == 3
    assert run("retry_credential_backfill", "--all").code == 0
    assert run("run_credential_backfill").code == 0

"""`settle_credential_conflict`: what it asks and says, and its exit codes. What becomes of rows: test_in_clear."""

from __future__ import annotations

import os
import pty
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from kfs_credentials import services
from kfs_credentials.models import Event, Source
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import in_database, make_source, ref_of, scope_of
from tests.factories import SourceFactory, SpaceFactory
from tests.management.commands import MANAGE, Run, database_url, environment
from tests.verification.looks import before_statement, elsewhere
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

SETTLE = "settle_credential_conflict"
OTHER = '{"title": "x", "credentials": {"token": "canary"}}'


def conflict(metadata: str = OTHER) -> Source:
    source = make_source()
    in_database("UPDATE sources SET metadata = %s::jsonb WHERE id = %s", metadata, source.pk)
    return source


def metadata_of(source: Source) -> Any:
    return Source.objects.get(pk=source.pk).metadata


def test_keep_the_ref(run: Run) -> None:
    source = conflict()
    outcome = run(SETTLE, "--source", source.pk, "--keep", "ref", "--yes")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == "Settled: 1 source keeps its ref, and has nothing in clear any more.\n"
    assert metadata_of(source) == {"title": "x"}
    assert Event.objects.get(kind="scrubbed").detail == "a person kept the ref"
    assert run("verify_credentials").code == 0


def test_keep_the_plaintext(run: Run) -> None:
    source = conflict()
    outcome = run(SETTLE, "--source", source.pk, "--keep", "plaintext", "--yes", "--format", "json")
    assert outcome.json == {"source": str(source.pk), "keep": "plaintext", "settled": True, "outcome": "done"}
    assert outcome.err == (
        "Settled: 1 source has what lay in clear, under a fresh ref, and nothing in clear any more. "
        "Next: `manage.py run_secret_cleanup --due` erases the old one after the grace.\n"
    )
    assert services.resolve_credentials(tenant="tenant-a", source_id=source.pk) == {"token": "canary"}
    assert "canary" not in outcome.out + outcome.err
    assert run("verify_credentials").code == 0


def test_nothing_to_settle(run: Run) -> None:
    made, clear = make_source(), SourceFactory.create()
    for source in (made, clear):
        outcome = run(SETTLE, "--source", source.pk, "--keep", "ref", "--yes")
        assert (outcome.code, outcome.out) == (1, "")
        assert outcome.err == (
            f"CommandError: Nothing to settle at source {source.pk}: it has no ref, nothing in clear, or is being "
            "deleted. Nothing was touched; `manage.py verify_credentials` lists what there is.\n"
        )


def test_another_tenants_source_is_answered_like_none(run: Run) -> None:
    source, nobody = conflict(), uuid.uuid4()
    SpaceFactory.create(tenant_id="tenant-b")
    for one in (source.pk, nobody):
        outcome = run(SETTLE, "--source", one, "--keep", "ref", "--yes", "--tenant", "tenant-b")
        assert (outcome.code, outcome.err) == (1, f"CommandError: There is no source {one}. Nothing was touched.\n")
    assert "credentials" in metadata_of(source)


def test_one_that_changed_meanwhile_is_refused(run: Run) -> None:
    source = conflict()
    change = 'UPDATE sources SET metadata = metadata || \'{"credentials": {"token": "newer"}}\' WHERE id = %s'
    for keep in ("ref", "plaintext"):
        with before_statement("FOR NO KEY UPDATE SKIP LOCKED", 1, lambda: elsewhere((change, source.pk))):
            outcome = run(SETTLE, "--source", source.pk, "--keep", keep, "--yes")
        assert outcome.code == 3
        assert outcome.out == (
            "Nothing was changed: 0 sources settled. The source has changed since it was looked at, or somebody has it "
            "locked: look again, then decide anew.\n"
        )
        in_database("UPDATE sources SET metadata = %s::jsonb WHERE id = %s", OTHER, source.pk)


def test_a_ref_that_cannot_be_read_is_not_kept(run: Run, store: EncryptedStore) -> None:
    source = conflict()
    store.delete(scope_of(source), ref_of(source))
    outcome = run(SETTLE, "--source", source.pk, "--keep", "ref", "--yes")
    assert outcome.code == 3
    assert outcome.out == (
        "Nothing was changed: 0 sources settled. The ref cannot be read, so that what lies in clear is all there is: "
        "keep the plaintext, or repair the ref first.\n"
    )
    assert run(SETTLE, "--source", source.pk, "--keep", "plaintext", "--yes").code == 0


def test_one_that_no_batch_can_hold(run: Run, kfs_settings: Any) -> None:
    source = conflict(OTHER.replace("canary", "x" * 200))
    kfs_settings(BATCH_BYTES=100, MAX_SECRET_BYTES=90)
    assert run("verify_credentials", "--format", "json").json["counts"] == {"plaintext_not_compared": 1}
    outcome = run(SETTLE, "--source", source.pk, "--keep", "plaintext", "--yes")
    assert outcome.code == 3
    assert outcome.out == (
        "Nothing was changed: 0 sources settled. What lies in clear is larger than MAX_SECRET_BYTES: raise the "
        "setting, or keep the ref.\n"
    )
    assert run(SETTLE, "--source", source.pk, "--keep", "ref", "--yes").code == 0
    assert metadata_of(source) == {"title": "x"}
    assert run("verify_credentials").code == 0


def test_nobody_to_ask(run: Run) -> None:
    source = conflict()
    outcome = run(SETTLE, "--source", source.pk, "--keep", "ref")
    assert outcome.code == 1
    assert outcome.err == (
        f"CommandError: This removes what lies in clear in source {source.pk} (version 1), for good. It is another "
        "value than the one that its ref resolves to. Nobody can be asked here: give --yes if that is right. Nothing "
        "was changed.\n"
    )


@pytest.mark.parametrize(("answer", "code"), [("yes\n", 0), ("y\n", 1), ("\n", 1)])
def test_the_question(secrets_directory: Path, settings: Settings, answer: str, code: int) -> None:
    source = conflict()
    terminal, standard_input = pty.openpty()
    process = subprocess.Popen(
        [*MANAGE, SETTLE, "--source", str(source.pk), "--keep", "plaintext"],
        env=environment(
            DATABASE_URL=database_url(),
            KFS_SECRETS_DIR=str(secrets_directory),
            KFS_CREDENTIALS_KEYS=settings.KFS_CREDENTIALS["KEYS"][0].hex(),
        ),
        stdin=standard_input,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(standard_input)
    os.write(terminal, answer.encode())
    _, err = process.communicate(timeout=PATIENCE)
    os.close(terminal)
    assert process.returncode == code
    assert f"This gives source {source.pk} (version 1) what lies in clear in it" in err
    assert err.rstrip().endswith("Type yes to go on:" if not code else "Not confirmed. Nothing was changed.")
    assert ("credentials" in metadata_of(source)) == bool(code)


def test_it_is_safe_again(run: Run) -> None:
    source = conflict()
    assert run(SETTLE, "--source", source.pk, "--keep", "plaintext", "--yes").code == 0
    assert run(SETTLE, "--source", source.pk, "--keep", "plaintext", "--yes").code == 1
    assert Source.objects.get(pk=source.pk).version == 2

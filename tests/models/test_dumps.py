"""`dumpdata` and `loaddata`: a dump of sources in clear holds their credentials, and says so (LL-06)."""

from __future__ import annotations

import io
import json
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core import serializers
from django.core.management import CommandError, call_command
from django.db import connection
from pytest_django import Settings

from kfs_credentials import services
from kfs_credentials.backfill import Backfill
from kfs_credentials.backfill_worker import BackfillWorker
from kfs_credentials.errors import CredentialsInClearWarning
from kfs_credentials.models import Source, SourceSecretLifecycleRef
from kfs_credentials.status import read_left
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.admin.rows import OPERATIONS, BindingFactory
from tests.factories import SourceFactory
from tests.leaks.canary import CANARY, CREDENTIALS, hits
from tests.leaks.frames import everything_shown
from tests.management.commands import MANAGE, database_url, environment
from tests.management.rows import table_contents

pytestmark = pytest.mark.django_db(transaction=True)

OURS = apps.get_app_config("kfs_credentials").label


def dump(*arguments: str) -> str:
    out = io.StringIO()
    call_command("dumpdata", OURS, *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.parametrize("format_", ["json", "jsonl", "python", "xml"])
@pytest.mark.parametrize("credentials", [CREDENTIALS, CANARY, [CANARY]])
def test_every_way_to_serialize_what_is_in_clear_warns(format_: str, credentials: Any) -> None:
    SourceFactory.create(credentials=credentials)
    with pytest.warns(CredentialsInClearWarning, match=r"dumpdata --exclude kfs_credentials\.source") as caught:
        made = serializers.serialize(format_, Source.objects.all())
    assert CANARY in str(made), "and a dump is whole"
    assert {Path(one.filename).parent.name for one in caught} == {"serializers"}, "it is told where it is asked for"
    assert list(hits("\n".join(str(one.message) for one in caught))) == []


@pytest.mark.parametrize("credentials", [None, {}])
def test_nothing_in_clear_is_nothing_to_warn_of(credentials: Any) -> None:
    SourceFactory.create(metadata={"credentials": None} if credentials is None else {})
    dump()  # a warning is an error here


def test_what_is_left_out_is_nothing_to_warn_of() -> None:
    SourceFactory.create(credentials=CREDENTIALS)
    assert list(hits(dump("--exclude", f"{OURS}.source"))) == []


def test_a_warning_that_is_made_an_error_ends_the_dump() -> None:
    SourceFactory.create(credentials=CREDENTIALS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CredentialsInClearWarning)
        with pytest.raises(CommandError, match="a source is being serialized with its credentials in clear") as caught:
            dump()
    assert list(hits(str(caught.value))) == []


def test_such_an_error_takes_no_value_along_from_our_frames() -> None:
    source = SourceFactory.create(credentials=CREDENTIALS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CredentialsInClearWarning)
        with pytest.raises(CredentialsInClearWarning) as caught:
            Source._meta.get_field("metadata").value_to_string(source)
    assert list(hits("\n".join(everything_shown(caught.value)))) == []


def test_a_shell_shows_the_warning_once_and_beside_the_dump(secrets_directory: Path, settings: Settings) -> None:
    """As an operator sees it: once, on standard error, and what is on standard output can be loaded."""
    SourceFactory.create_batch(3, credentials=CREDENTIALS)
    done = subprocess.run(
        [*MANAGE, "dumpdata", OURS],
        env=environment(
            DATABASE_URL=database_url(),
            KFS_SECRETS_DIR=str(secrets_directory),
            KFS_CREDENTIALS_KEYS=settings.KFS_CREDENTIALS["KEYS"][0].hex(),
        ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) >= 3
    assert done.stderr.count("CredentialsInClearWarning: ") == 1
    assert "run_credential_backfill" in done.stderr
    assert list(hits(done.stderr)) == []


def test_a_dump_after_the_backfill_has_no_credentials_and_brings_everything_back(
    store: EncryptedStore, tmp_path: Path
) -> None:
    source = SourceFactory.create(credentials=CREDENTIALS)
    steps = Backfill(using="default", store=store, worker="tests", lease=60.0)
    BackfillWorker(steps, remaining=lambda: read_left("default"), batch_size=10).run()
    assert SourceSecretLifecycleRef.objects.filter(state="active").count() == 1

    for maker in OPERATIONS:
        if maker is not BindingFactory:
            maker.create()

    assert list(hits(dump())) == []
    models = {row["model"] for row in json.loads(dump())}
    assert models >= {f"{OURS}.{name}" for name in ("source", "event", "secretobject", "sourcecredentialbackfill")}
    before, dumped = table_contents(), dump("--format", "xml")  # in JSON, Django rounds times to milliseconds
    assert list(hits(dumped)) == []
    file = tmp_path / "dump.xml"
    file.write_text(dumped)
    with connection.cursor() as cursor:
        cursor.execute(
            f"TRUNCATE {', '.join(model._meta.db_table for model in apps.get_app_config(OURS).get_models())}"
        )
    call_command("loaddata", str(file), verbosity=0)
    assert table_contents() == before
    found = services.resolve_credentials(tenant="tenant-a", source_id=source.pk)
    assert dict(found) == CREDENTIALS

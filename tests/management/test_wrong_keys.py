"""Without a key, or with one that is none or public: whatever needs it refuses at its start, and nobody makes one."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core import checks

from kfs_credentials.models import Source
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import add_secret, in_database, make_source
from tests.factories import SourceFactory
from tests.management.commands import MANAGE, Run, database_url, environment
from tests.management.rows import JobFactory, directory_contents, table_contents
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)

EXAMPLE = "00112233445566778899aabbccddeeff" * 2
"""The key that the README shows."""
CANARY = "canary-5e0b7c"

KEYS: dict[str, list[Any]] = {
    "none": [],
    "one that is not set": [None],
    "an empty one": [""],
    "one that is too short": [CANARY],
    "the one of the README": [EXAMPLE],
}
NAMED = "KFS_CREDENTIALS['KEYS']"


@pytest.fixture
def commands(store: EncryptedStore) -> list[list[str]]:
    """Every command that puts, erases or reads secrets, each with something to do."""
    SourceFactory.create()
    SourceFactory.create(credentials="token")
    add_secret(store, None, "retired, due")
    conflict = make_source()
    in_database("""UPDATE sources SET metadata = '{"credentials": {"token": "b"}}' WHERE id = %s""", conflict.pk)
    JobFactory.create()
    return [
        ["run_credential_backfill"],
        ["run_secret_cleanup"],
        ["run_secret_cleanup", "--due"],
        ["reencrypt_secrets"],
        ["settle_unsupported_credentials", "--all", "--wrap", "token"],
        ["settle_credential_conflict", "--source", str(conflict.pk), "--keep", "ref", "--yes"],
        ["settle_credential_conflict", "--source", str(conflict.pk), "--keep", "plaintext", "--yes"],
        ["verify_credentials", "--scrub-same", "--yes"],
        ["verify_credentials", "--deep", "--erase-unknown", "--yes"],
        ["bind_secret_store", "--yes"],
        ["retry_credential_backfill", "--all"],
    ]


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_every_command_that_needs_one_refuses_before_it_touches_a_row(
    run: Run, commands: list[list[str]], secrets_directory: Path, kfs_settings: Callable[..., None], keys: list[Any]
) -> None:
    """By the system check; and past it, where somebody skips that. No message has anything of a key."""
    kfs_settings(KEYS=keys)
    before = table_contents(), directory_contents(secrets_directory)
    for command in commands:
        for options in ([], ["--skip-checks"]):
            outcome = run(*command, *options)
            assert outcome.code == 1, command
            assert NAMED in outcome.err, command
            assert not any(text in outcome.out + outcome.err for text in (EXAMPLE, CANARY))
    assert (table_contents(), directory_contents(secrets_directory)) == before
    assert checks.run_checks(tags=["kfs_credentials"])[0].is_serious()


def test_a_node_with_another_key_is_told_so_when_it_is_deployed(secrets_directory: Path) -> None:
    """Two processes on one database and one directory. The second one's key opens nothing, and it puts nothing."""
    SourceFactory.create_batch(2)
    one, other = secrets.token_hex(32), secrets.token_hex(32)

    def node(key: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "DATABASE_URL": database_url(),
            "KFS_SECRETS_DIR": str(secrets_directory),
            "KFS_CREDENTIALS_KEYS": key,
        }
        return subprocess.run(
            [*MANAGE, *arguments], env=environment(**variables), capture_output=True, text=True, timeout=PATIENCE
        )

    check = ["check", "--deploy", "--tag", "kfs_credentials"]
    assert node(one, "bind_secret_store", "--yes", "--none-readable").returncode == 0
    assert node(one, "run_credential_backfill", "--limit", "1").returncode == 4
    assert node(one, *check).returncode == 0
    before = table_contents(), directory_contents(secrets_directory)
    told = node(other, *check)
    assert told.returncode == 1
    assert "(kfs_credentials.E011)" in told.stderr
    assert "(kfs_credentials.E012)" in told.stderr
    assert node(other, "run_credential_backfill").returncode == 1
    assert (table_contents(), directory_contents(secrets_directory)) == before
    assert Source.objects.legacy().count() == 1
    assert not any(key in told.stdout + told.stderr for key in (one, other))

"""Nothing is asked over the network but the database and the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pytest_django import Settings

from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import add_secret
from tests.factories import SourceFactory
from tests.management.commands import ROOT, database_url, environment
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)

# The database's own library is C, and is not seen by this; the store is a directory.
WATCHED = """
import sys

def hook(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.bind"):
        print(f"NETWORK {event}", file=sys.stderr)

sys.addaudithook(hook)
import manage
manage.main()
"""

COMMANDS = [
    ["check", "--deploy"],
    ["run_credential_backfill"],
    ["run_secret_cleanup", "--due"],
    ["credential_status", "--format", "prometheus"],
    ["verify_credentials", "--deep"],
    ["reencrypt_secrets"],
]


def test_no_command_uses_the_network(store: EncryptedStore, secrets_directory: Path, settings: Settings) -> None:
    SourceFactory.create_batch(3)
    add_secret(store, None, "retired, due")
    variables = {
        "DATABASE_URL": database_url(),
        "KFS_SECRETS_DIR": str(secrets_directory),
        "KFS_CREDENTIALS_KEYS": settings.KFS_CREDENTIALS["KEYS"][0].hex(),
    }

    def watched(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", WATCHED, *arguments],
            cwd=ROOT,
            env=environment(**variables),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    for command in COMMANDS:
        done = watched(*command)
        assert (done.returncode, "NETWORK" in done.stderr) == (0, False), (command, done.stderr)
    # Whoever did would be seen.
    asks = watched("shell", "-c", "import socket; socket.getaddrinfo('localhost', 80)")
    assert "NETWORK socket.getaddrinfo" in asks.stderr

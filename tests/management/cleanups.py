"""What the tests of run_secret_cleanup share."""

from __future__ import annotations

import re
from typing import Any

from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import add_secret
from tests.management.commands import Outcome

COMMAND = "kfs_credentials.management.commands.run_secret_cleanup"
AGAIN = "`manage.py run_secret_cleanup`"
LOOK = "`manage.py credential_status`"
DONE = "Every erasure is confirmed."


def last_line(outcome: Outcome) -> str:
    """Return the last line, with what depends on the machine left out."""
    return re.sub(r"in [0-9.]+ s", "in T s", outcome.last_line)


def secrets(store: EncryptedStore, count: int, situation: str = "retired, due", **columns: Any) -> None:
    """Insert so many ledger rows in a situation, and put their objects."""
    for _ in range(count):
        add_secret(store, None, situation, **columns)

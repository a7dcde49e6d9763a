"""Makes a key."""

from __future__ import annotations

import secrets

from kfs_credentials.crypto import key_id
from kfs_credentials.crypto.keys import KEY_BYTES
from kfs_credentials.management.options import TeachingCommand


class Command(TeachingCommand):
    """`generate_secret_key`."""

    help = (
        "Print a new random key for KFS_CREDENTIALS['KEYS'] on standard output, and its id on standard error. "
        "The key is kept nowhere: put it where your other production secrets are, and back it up. Without it "
        "nothing that it encrypted can be read."
    )
    examples = """
examples:
  manage.py generate_secret_key
  (umask 077; manage.py generate_secret_key > key)  the key alone, in a file that nobody else can read

The first key of the list encrypts, all of them decrypt. To change the key, put the new one behind the old
one in every process, then first in every process; then `manage.py reencrypt_secrets` moves everything to it.
"""
    # It has to work before there is a key.
    requires_system_checks: list[str] = []

    def handle(self, *_: object, **__: object) -> None:
        """Print the key."""
        key = secrets.token_bytes(KEY_BYTES)
        self.stdout.write(key.hex())
        self.stderr.write(
            f"Its id is {key_id(key)}. Where there are keys in KFS_CREDENTIALS['KEYS'] already, put it behind them in "
            "every process before you put it first.",
            str,
        )

"""A program that uses the default store, for strace to watch: one action per argument, one line of output for each.

    python -m tests.stores.traced DIRECTORY put put delete

`put` puts three secrets, always the same ones; `put_one` the first of them; `get`, `delete` are for that one too.
`put_six` puts these and three others on one thread besides its own; `replace_six` seals them anew under another key.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import django

if TYPE_CHECKING:
    from collections.abc import Callable


def main(location: str, *actions: str) -> None:
    django.setup()
    from django.conf import settings

    from kfs_credentials.crypto import Plaintext, Scope
    from kfs_credentials.errors import KfsCredentialsError
    from kfs_credentials.stores import Entry, secret_stores

    storage = {
        "BACKEND": "kfs_credentials.stores.files.DurableFileStorage",
        "OPTIONS": {"location": location},
    }
    store = {
        "BACKEND": "kfs_credentials.stores.encrypted.EncryptedStore",
        "OPTIONS": {"storage": storage, "prefix": "objects/v1/"},
    }
    settings.KFS_CREDENTIALS = {"KEYS": [bytes(range(32))], "STORES": {"default": store}}
    scope = Scope("tenant", "space", "source")
    refs = [f"source-secret:v1:{n}b0c0f0e-6a55-4f4b-8f0e-0d6a3d1f9b77" for n in range(6)]
    entries = [Entry(scope, ref, Plaintext.of({"ref": ref})) for ref in refs]
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: secret_stores["default"].put_many(entries[:3]),
        "put_six": lambda: secret_stores["default"].put_many(entries),
        "replace_six": lambda: secret_stores["default"].replace_many(entries),
        "put_one": lambda: secret_stores["default"].put_many(entries[:1]),
        "get": lambda: secret_stores["default"].get(scope, refs[0]),
        "delete": lambda: secret_stores["default"].delete(scope, refs[0]),
    }
    for action in actions:
        if action.endswith("_six"):
            settings.KFS_CREDENTIALS = {**settings.KFS_CREDENTIALS, "STORE_THREADS": 1}
        if action == "replace_six":
            settings.KFS_CREDENTIALS = {**settings.KFS_CREDENTIALS, "KEYS": [bytes(32), bytes(range(32))]}
        try:
            result = calls[action]()
            outcomes = result if isinstance(result, list) else []
            wrong = [f"{type(one).__name__}: {one}" for one in outcomes if isinstance(one, KfsCredentialsError)]
            answer = f"all but {len(wrong)}, {wrong[0]}" if wrong else "done"
        except KfsCredentialsError as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(sys.stdout.fileno(), f"{action} {answer}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Settings of the bench's child processes: the tests' own, with the bench's database and directory."""

from __future__ import annotations

import json
import os

from tests.settings import *  # noqa: F403

DATABASES = {"default": json.loads(os.environ["KFS_BENCH_DATABASE"])}
KFS_CREDENTIALS = {
    # One key for all workers of a round; it guards made-up values.
    "KEYS": [b"kfs-credentials bench, made-up k"],
    "STORES": {
        "default": {
            "BACKEND": "kfs_credentials.stores.encrypted.EncryptedStore",
            "OPTIONS": {
                "storage": {
                    "BACKEND": "kfs_credentials.stores.files.DurableFileStorage",
                    "OPTIONS": {"location": os.environ["KFS_BENCH_SECRETS"]},
                }
            },
        }
    },
    # So long that only first erasures are measured.
    "LATE_WRITE_HORIZON": 86_400,
}

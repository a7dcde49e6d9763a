"""Where a test wants the rows to be read."""

from __future__ import annotations

from typing import Any


class ReadsElsewhere:
    """Reads our tables from a database that there is not, and writes them to `default`."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "replica" if model._meta.app_label == "kfs_credentials" else None

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "default"

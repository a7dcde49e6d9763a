"""A router as projects with a replica have it."""

from __future__ import annotations

from typing import Any

REPLICA = "replica"


class ReadsFromReplica:
    """Reads come from the replica, whatever the row at hand was read from; writes go to `default`.

    But for Django's own tables: nobody could log in.
    """

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return REPLICA if model._meta.app_label in ("kfs_credentials", "example_project") else "default"

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"

    def allow_relation(self, first: Any, second: Any, **hints: Any) -> bool:
        return True

    def allow_migrate(self, alias: str, app_label: str, **hints: Any) -> bool:
        return alias == "default"

"""The connection at which the ordered faults happen. The name of the module is Django's rule."""

from __future__ import annotations

from typing import Any

from django.db.backends.postgresql import base

from tests.cuts import terminate
from tests.model.faults import FAULTS, Killed


class DatabaseWrapper(base.DatabaseWrapper):
    """A connection that is lost, or whose process is killed, at a statement or at a commit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute_wrappers.append(FAULTS.execute)

    def ensure_connection(self) -> None:
        """Connect. Django's tests forbid that to aliases which they have not been told of, and there patch the base."""
        if self.connection is None:
            with self.wrap_database_errors:
                self.connect()

    def connect(self) -> None:
        """Connect, unless this process is dead."""
        if FAULTS.dead:
            raise Killed
        super().connect()

    def _commit(self) -> None:
        commit = super()._commit  # type: ignore[misc]
        match FAULTS.at_commit():
            case "commit refused":
                terminate(self)
            case "killed before commit":
                FAULTS.kill(self)
            case "killed after commit":
                commit()
                FAULTS.kill(self)
            case "commit unanswered":
                commit()
                terminate(self)
                with self.wrap_database_errors:
                    self.connection.execute("SELECT")
        commit()

"""Where the workers of one test work: a database with the demo's sources, and an empty store with gates."""

from __future__ import annotations

import secrets
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from django.conf import settings as django_settings

from example_project import demo_data
from example_project.read_back import read_back
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.crashes.database import ALIAS, NUMBER, Database
from tests.crashes.gates import Gate
from tests.crashes.workers import Nursery, Worker, start_command
from tests.invariants import check_invariants, objects_in_use

KINDS = Counter(source.kind for source in demo_data.sources(NUMBER))

CLEAN, LOOK, NOT_FINISHED = 0, 3, 4
"""Exit codes. The demo holds credentials that are too large, or no object: a run that has done all ends with `LOOK`."""

TABLES = ("sources", "source_credential_backfills", "source_secret_lifecycle_refs", "kfs_credentials_secret_object")


class Scene(Database):
    """One database and one store. `settings`: what its workers' KFS_CREDENTIALS have on top of the defaults."""

    def __init__(self, nursery: Nursery, database: dict[str, Any], directory: Path, store: EncryptedStore) -> None:
        self.nursery = nursery
        self.database = database
        self.directory = directory
        self.store = store
        self.workers: list[Worker] = []
        self.settings: dict[str, Any] = {
            "BATCH_SIZE": 20,
            "LEASE": 60,
            "LOCK_TIMEOUT": 30,
            "POLL_INTERVAL": 0.02,
            "RETRY_BASE": 0,
            "RETRY_MAX": 30,
        }
        self._gates = directory / "gates"
        self._gates.mkdir()
        stored: Any = django_settings.KFS_CREDENTIALS
        self._keys = [key.hex() for key in stored["KEYS"]]
        self._storage = stored["STORES"]["default"]["OPTIONS"]["storage"]
        self.secrets = Path(self._storage["OPTIONS"]["location"])

    def start(self, *arguments: str, poison: str | None = None, **settings: Any) -> Worker:
        """Start a worker: `run_credential_backfill` with these arguments, and with these settings on top of ours."""
        options = {"storage": self._storage, "gates": str(self._gates), "poison": poison}
        stores = {"default": {"BACKEND": "tests.crashes.stores.GatedStore", "OPTIONS": options}}
        name, output = self._next()
        worker = self.nursery.start(
            name,
            ["run_credential_backfill", *arguments],
            output=output,
            database={**self.database, "OPTIONS": {"application_name": name}},
            settings={**self.settings, "KEYS": self._keys, "STORES": stores, **settings},
        )
        self.workers.append(worker)
        return worker

    def start_command(self) -> Worker:
        """Start `manage.py run_credential_backfill` as a process of its own, with all settings in the environment."""
        name, output = self._next()
        environment = {
            "DATABASE_URL": database_url(self.database),
            "PGAPPNAME": name,
            "KFS_SECRETS_DIR": str(self.secrets),
            "KFS_CREDENTIALS_KEYS": ",".join(self._keys),
            **{f"KFS_CREDENTIALS_{setting}": str(value) for setting, value in self.settings.items()},
        }
        worker = start_command(["run_credential_backfill"], name=name, output=output, environment=environment)
        self.workers.append(worker)
        return worker

    def drain(self, **settings: Any) -> None:
        """Let one worker do all that is left."""
        worker = self.start(**{"BATCH_SIZE": 100, **settings})
        assert worker.wait() == LOOK, worker.printed

    def gate(self, name: str) -> Gate:
        """Put up a gate in the store; use it in a `with` block."""
        return Gate(self._gates, name)

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            if worker.code is None:
                worker.send(signal.SIGKILL)
                worker.wait()

    def _next(self) -> tuple[str, Path]:
        # Other tests have workers on the same server.
        name = f"worker-{len(self.workers) + 1}-{secrets.token_hex(4)}"
        return name, self.directory / f"{name}.output"

    # What must be true.

    def check_always(self) -> None:
        """What is true at any moment is true now."""
        assert check_invariants(ALIAS, self.store) == []

    def check_end(self) -> None:
        """Everything is as after a run that nobody disturbed, but for objects that were put and given up."""
        left_alone = NUMBER - KINDS["movable"]
        assert read_back(ALIAS, NUMBER, demo_data.DEFAULT_SEED) == (KINDS["movable"], left_alone, 0, [])
        assert self.states() == {"succeeded": KINDS["movable"], "failed": KINDS["too_large"]}
        codes = self.rows("SELECT DISTINCT last_error_code FROM source_credential_backfills WHERE run_state = 'failed'")
        assert codes == [("SOURCE_SECRET_TOO_LARGE",)]
        versions = dict(self.rows("SELECT id, version FROM sources"))
        wrong = [
            source.id
            for source in demo_data.sources(NUMBER)
            if versions[source.id] != source.version + (source.kind == "movable")
        ]
        assert wrong == [], "not activated exactly once"
        self.check_always()
        assert objects_in_use(ALIAS, self.store)["active"] == KINDS["movable"]

    def everything(self) -> tuple[object, ...]:
        """Return the place, transaction and content of every row, and every file: the same as long as nobody writes."""
        rows = [self.rows(f"SELECT ctid::text, xmin::text, t::text FROM {table} t ORDER BY ctid") for table in TABLES]
        files = sorted(self.secrets.rglob("*"))
        return *rows, [(file, file.stat().st_ino, file.stat().st_mtime_ns) for file in files]


def database_url(database: Mapping[str, Any]) -> str:
    """Return the DATABASE_URL for an entry of DATABASES, as the example project reads it."""
    names = ("USER", "PASSWORD", "HOST", "PORT", "NAME")
    user, password, host, port, name = (quote(str(database[key]), safe="/") for key in names)
    place = f":{port}/{host}" if host.startswith("/") else f"{host}:{port}"  # a directory, or a machine
    return f"postgres://{user}:{password}@{place}/{name}"

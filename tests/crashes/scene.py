"""Where the workers of one test work: a database with the demo's sources, and an empty store with gates."""

from __future__ import annotations

import secrets
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from django.conf import settings as django_settings

from example_project import demo_data
from example_project.read_back import read_back
from kfs_credentials.stores.encrypted import PROBE_NAME, EncryptedStore
from tests.crashes.database import ALIAS, NUMBER, Database
from tests.crashes.gates import Gate
from tests.crashes.workers import APPLICATION, MANAGE, Nursery, Worker, start_command
from tests.invariants import check_invariants, objects_in_use

KINDS = Counter(source.kind for source in demo_data.sources(NUMBER))

CLEAN, LOOK, NOT_FINISHED, OUT_OF_REACH = 0, 3, 4, 5
"""Exit codes. The demo holds credentials that are too large, or no object: a run that has done all ends with `LOOK`."""

TABLES = ("sources", "source_credential_backfills", "source_secret_lifecycle_refs", "kfs_credentials_secret_object")


# Findings that are there for the next sweep or patrol to put right: as they begin.
ORPHANED = "a ledger row is active, and no source has its ref"
DANGLING = "a source has a ref without a ledger row that is active"
UNREGISTERED = "an object in the store has no ledger row"
LATE = "an object is in the store, and its ledger row is final"
# And for a person, or once the source is repaired that held the row.
BOTH = "a source has both a ref and legacy credentials"
UNDATED = "a ledger row is not final, and its next move is at no known time"

Call = tuple[str, Mapping[str, Any]]
"""A call to the services: the function's name, and its arguments."""


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
            "ERASE_GRACE": 0,
            "LATE_WRITE_HORIZON": 0,
            "LEASE": 60,
            "LOCK_TIMEOUT": 30,
            "POLL_INTERVAL": 0.02,
            "RETRY_BASE": 0,
            "RETRY_MAX": 30,
        }
        self._gates = directory / "gates"
        self._gates.mkdir()
        stored: Any = django_settings.KFS_CREDENTIALS
        self.keys = [key.hex() for key in stored["KEYS"]]
        self._storage = stored["STORES"]["default"]["OPTIONS"]["storage"]
        self.secrets = Path(self._storage["OPTIONS"]["location"])

    def start(self, *arguments: str, poison: str | None = None, **settings: Any) -> Worker:
        """Start a worker: `run_credential_backfill` with these arguments, and with these settings on top of ours."""
        return self._start(MANAGE, ["run_credential_backfill", *arguments], settings, poison=poison)

    def start_cleanup(self, *arguments: str, **settings: Any) -> Worker:
        """Start a worker: `run_secret_cleanup`."""
        return self._start(MANAGE, ["run_secret_cleanup", *arguments], settings)

    def start_reencryption(self, *arguments: str, **settings: Any) -> Worker:
        """Start a run of `reencrypt_secrets`."""
        return self._start(MANAGE, ["reencrypt_secrets", *arguments], settings)

    def start_application(self, *calls: Call, **settings: Any) -> Worker:
        """Start a process that calls the services, one after the other; see `application.py`."""
        return self._start(APPLICATION, calls, settings)

    def _start(
        self, function: str, arguments: Sequence[Any], settings: Mapping[str, Any], *, poison: str | None = None
    ) -> Worker:
        gated = ("tests.crashes.stores.GatedStore", {"gates": str(self._gates), "poison": poison})
        return self.fork("worker", function, arguments, store=gated, settings=settings)

    def fork(
        self,
        name: str,
        function: str,
        arguments: Sequence[Any],
        *,
        store: tuple[str, Mapping[str, Any]],
        settings: Mapping[str, Any],
        database: Mapping[str, Any] | None = None,
    ) -> Worker:
        """Start a process that calls a function, given by its path, with these arguments.

        `name`: what its name begins with. `store`: the class of its store, and its options besides the storage.
        `settings`, `database`: what it has on top of the scene's own.
        """
        backend, options = store
        stores = {"default": {"BACKEND": backend, "OPTIONS": {"storage": self._storage, **options}}}
        name, output = self._next(name)
        entry = {**self.database, **(database or {})}
        worker = self.nursery.start(
            name,
            arguments,
            function=function,
            output=output,
            database={**entry, "OPTIONS": {**entry.get("OPTIONS", {}), "application_name": name}},
            settings={**self.settings, "KEYS": self.keys, "STORES": stores, **settings},
        )
        self.workers.append(worker)
        return worker

    def forget(self, worker: Worker) -> None:
        """Remove what a process that is over has printed."""
        self.workers.remove(worker)
        worker.output.unlink(missing_ok=True)

    def start_command(self, command: str = "run_credential_backfill") -> Worker:
        """Start `manage.py` with a command as a process of its own, with all settings in the environment."""
        name, output = self._next()
        environment = {
            "DATABASE_URL": database_url(self.database),
            "PGAPPNAME": name,
            "KFS_SECRETS_DIR": str(self.secrets),
            "KFS_CREDENTIALS_KEYS": ",".join(self.keys),
            **{f"KFS_CREDENTIALS_{setting}": str(value) for setting, value in self.settings.items()},
        }
        worker = start_command([command], name=name, output=output, environment=environment)
        self.workers.append(worker)
        return worker

    def run(self, *arguments: str, code: int = CLEAN, **settings: Any) -> Worker:
        """Run `manage.py` with these arguments to its end."""
        worker = self._start(MANAGE, arguments, settings)
        assert worker.wait() == code, worker.printed
        return worker

    def drain(self, code: int = LOOK, **settings: Any) -> None:
        """Let one worker do all that is left; `code`: CLEAN where the demo's awkward sources are not there."""
        worker = self.start(**{"BATCH_SIZE": 100, **settings})
        assert worker.wait() == code, worker.printed

    def call(self, *calls: Call, **settings: Any) -> list[dict[str, Any]]:
        """Let an application make these calls, to the end; return what it was answered."""
        application = self.start_application(*calls, **settings)
        assert application.wait() == CLEAN, application.printed
        return application.answers

    def recover(self, **settings: Any) -> None:
        """Let the time pass after which nobody waits for those who died, and one cleanup do all that is left."""
        self.expire_leases()
        self.expire_reservations()
        worker = self.start_cleanup(**{"BATCH_SIZE": 100, **settings})
        assert worker.wait() in (CLEAN, LOOK), worker.printed

    def gate(self, name: str) -> Gate:
        """Put up a gate in the store; use it in a `with` block."""
        return Gate(self._gates, name)

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            if worker.code is None:
                worker.send(signal.SIGKILL)
                worker.wait()

    def _next(self, role: str = "worker") -> tuple[str, Path]:
        # Other tests have workers on the same server.
        name = f"{role}-{len(self.workers) + 1}-{secrets.token_hex(4)}"
        return name, self.directory / f"{name}.output"

    # What must be true.

    def check_always(self, *but: str) -> None:
        """What is true at any moment is true now; `but`: the beginnings of what may be found besides."""
        assert [finding for finding in check_invariants(ALIAS, self.store) if not finding.startswith(but)] == []

    def check_meanwhile(self, *but: str) -> None:
        """Do the same while workers are at work: they are frozen, so that what is looked at is one moment.

        Else an object may be seen that is erased, and confirmed to be, before its row is looked at.
        """
        alive = [worker for worker in self.workers if not worker.is_over]
        for worker in alive:
            worker.freeze()
        try:
            self.check_always(*but)
        finally:
            for worker in alive:
                worker.send(signal.SIGCONT)

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

    def check_cleaned(self, *, displaced: int = 0) -> None:
        """Every row is active or final, but for those that wait for a person, and every object belongs to one."""
        self.check_always()
        unfinished = self.rows(
            "SELECT credential_ref, state, last_error_code FROM source_secret_lifecycle_refs "
            "WHERE state <> 'active' AND (state <> 'deleted' OR next_delete_at IS NOT NULL)"
        )
        assert [code for _, _, code in unfinished] == displaced * ["SOURCE_SECRET_DISPLACED"], unfinished
        active = self.value("SELECT count(*) FROM source_secret_lifecycle_refs WHERE state = 'active'")
        expected = Counter({"active": active, "retired": displaced})
        assert objects_in_use(ALIAS, self.store) == +expected

    def check_values(self, values: Mapping[Any, Mapping[str, Any] | None]) -> None:
        """Sources have these credentials, as an application reads them; None: there is no such source."""
        calls = [("resolve_credentials", {"tenant": tenant, "source_id": str(source)}) for tenant, source in values]
        found = [answer.get("credentials") for answer in self.call(*calls)]
        wrong = [(key, value) for (key, value), there in zip(values.items(), found, strict=True) if there != value]
        assert wrong == []

    def everything(self) -> tuple[object, ...]:
        """Return the place, transaction and content of every row, and every file: the same as long as nobody writes."""
        rows = [self.rows(f"SELECT ctid::text, xmin::text, t::text FROM {table} t ORDER BY ctid") for table in TABLES]
        return *rows, self.files()

    def files(self) -> list[tuple[Path, int, int]]:
        """Return every file, and what changes if it is written again."""
        paths = sorted(path for path in self.secrets.rglob("*") if path.name != PROBE_NAME)
        return [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in paths if path.is_file()]


def database_url(database: Mapping[str, Any]) -> str:
    """Return the DATABASE_URL for an entry of DATABASES, as the example project reads it."""
    names = ("USER", "PASSWORD", "HOST", "PORT", "NAME")
    user, password, host, port, name = (quote(str(database[key]), safe="/") for key in names)
    place = f":{port}/{host}" if host.startswith("/") else f"{host}:{port}"  # a directory, or a machine
    return f"postgres://{user}:{password}@{place}/{name}"

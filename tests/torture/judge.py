"""What is found once nobody is at work any more, and a person has decided what is a person's to decide."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from kfs_credentials.crypto import Credentials, Scope, object_name
from kfs_credentials.in_clear import Settled, compared, keep_plaintext, keep_ref
from kfs_credentials.ref_operations import discard, restore
from kfs_credentials.stores import Address
from kfs_credentials.stores.encrypted import PROBE_NAME
from tests.crashes.application import answer
from tests.crashes.database import ALIAS
from tests.crashes.scene import CLEAN, LATE, LOOK, ORPHANED, UNREGISTERED
from tests.invariants import check_invariants
from tests.torture.memory import GONE, MARK, TENANT, UNREADABLE, new_value, shown

if TYPE_CHECKING:
    from tests.crashes.scene import Scene
    from tests.torture.memory import Memory, Value

BESIDE = """
SELECT id, metadata #>> '{credentials,token}' FROM sources
WHERE credential_ref IS NOT NULL AND metadata ? 'credentials'
"""
CHOICES = """
SELECT ledger.id, ledger.credential_ref, ledger.knowledge_space_id, ledger.source_id::text
FROM source_secret_lifecycle_refs ledger
LEFT JOIN kfs_credentials_secret_object object ON object.credential_ref = ledger.credential_ref
JOIN sources src ON src.id = ledger.source_id AND src.credential_ref <> ledger.credential_ref
WHERE object.attention = 'displaced' OR ledger.state = 'active'
"""
ACTIVE = """
SELECT tenant_id, knowledge_space_id, source_id, credential_ref, EXISTS (
  SELECT FROM sources src WHERE src.id = ledger.source_id AND src.credential_ref = ledger.credential_ref
)
FROM source_secret_lifecycle_refs ledger WHERE state = 'active' ORDER BY credential_ref
"""
FAILED = """
SELECT 'job of source ' || source_id || ': ' || COALESCE(last_error_code, '') FROM source_credential_backfills
WHERE run_state = 'failed'
UNION ALL
SELECT 'ref of source ' || source_id || ': ' || COALESCE(last_error_code, state) FROM source_secret_lifecycle_refs
WHERE state <> 'active' AND (state <> 'deleted' OR next_delete_at IS NOT NULL)
"""
NOT_ERASED = (ORPHANED, LATE, UNREGISTERED)
"""What of the invariants tells of a secret that nobody uses any more."""
FORGOTTEN = 20
"""How many sources that are gone are looked for."""


class Verdict(NamedTuple):
    """What is wrong, in sentences."""

    lost: list[str]
    doubled: list[str]
    leaked: list[str]
    failed: list[str]

    @property
    def is_good(self) -> bool:
        """Whether nothing is."""
        return not any(self)


class Judge:
    """Decides as an operator, and looks at everything from outside."""

    def __init__(self, scene: Scene, memory: Memory) -> None:
        self.scene = scene
        self.memory = memory

    def finish(self) -> None:
        """Let one backfill and one cleanup do what is left, and settle what waits for a person."""
        self._work()
        self._settle_conflicts()
        self._choose()
        self._enter_anew()
        self._work()

    def verdict(self) -> Verdict:
        """Look at everything. What every source is, is certain from here on."""
        self._look_at_sources()
        lost, self.memory.lost = self.memory.lost, []
        doubled, leaked = self._look_at_objects()
        leaked += self._look_for_values()
        for what in check_invariants(ALIAS, self.scene.store):  # nobody is at work: there is no exception
            (leaked if what.startswith(NOT_ERASED) else lost).append(what)
        failed = [what for (what,) in self.scene.rows(FAILED)]
        return Verdict(lost, doubled, leaked, failed)

    # What an operator does.

    def _work(self) -> None:
        self.scene.expire_leases()
        self.scene.expire_reservations()
        for worker in (self.scene.start(BATCH_SIZE=100), self.scene.start_cleanup(BATCH_SIZE=100)):
            if worker.wait() not in (CLEAN, LOOK):
                self.memory.lost.append(f"what is left is not finished: {worker.printed}")

    def _settle_conflicts(self) -> None:
        """Choose one of the two, wherever a source has a ref and something in clear."""
        beside = dict(self.scene.rows(BESIDE))
        for found, _ in list(compared(ALIAS, list(beside))):
            known = self.memory.sources[str(found.source)]
            if UNREADABLE not in known.may_be and random.random() < 0.5:
                settled = keep_ref(ALIAS, found)
            else:
                settled = keep_plaintext(ALIAS, found)
                known.becomes(beside[found.source])
            if settled is not Settled.DONE:
                self.memory.lost.append(f"source {found.source} is in conflict, and to settle it is {settled.value}")

    def _choose(self) -> None:
        """Choose one of the two refs, wherever an old writer has displaced the newer one."""
        choices: dict[str, list[tuple[Any, Value]]] = {}
        for row, ref, space, source in self.scene.rows(CHOICES):
            value = self.scene.store.get(Scope(TENANT, space, source), ref)["token"]
            choices.setdefault(source, []).append((row, value))
        for source, known in self.memory.sources.items():
            values = {value for _, value in choices.get(source, ())}
            ever = known.ever | known.may_be if known.shared else known.ever
            if not values <= ever or known.must_keep not in (None, *values):
                expected = known.must_keep or shown(known.ever)
                self.memory.lost.append(f"source {source}: {shown(values)} is kept, and not {expected}")
        for source, refs in choices.items():
            wants_one = self._resolve(source) == UNREADABLE or random.random() < 0.5
            for row, value in refs:
                if wants_one and restore(ALIAS, [(row, None)]).done:
                    self.memory.sources[source].becomes(value)
                    wants_one = False
                else:
                    discard(ALIAS, [(row, None)])

    def _enter_anew(self) -> None:
        """Enter credentials anew where an old writer has brought back what was erased, in the place of none."""
        for source, known in self.memory.sources.items():
            if UNREADABLE in known.may_be and known.must_keep is None and self._resolve(source) == UNREADABLE:
                value = new_value()
                arguments = {"tenant": TENANT, "source_id": source, "credentials": {"token": value}, "using": ALIAS}
                if error := answer("rotate_credentials", arguments).get("error"):
                    self.memory.lost.append(f"source {source} cannot be given new credentials: {error}")
                known.becomes(value)

    # What there is.

    def _look_at_sources(self) -> None:
        sources = self.memory.sources
        there = [source for source, known in sources.items() if known.may_be != {GONE}]
        gone = [source for source, known in sources.items() if known.may_be == {GONE}]
        asked = there + random.sample(gone, min(FORGOTTEN, len(gone)))
        for source in asked:
            found = self._resolve(source)
            if found == UNREADABLE:
                self.memory.lost.append(f"source {source} cannot be read")
            self.memory.saw(source, found)
            sources[source].is_now(found)
            if found == GONE:
                self.memory.spaces.get(sources[source].space, set()).discard(source)
        for source in gone:
            if source not in asked:
                del sources[source]  # else there are more and more of them
        for (source,) in self.scene.rows("SELECT id::text FROM sources"):
            if source not in sources or sources[source].may_be == {GONE}:
                self.memory.lost.append(f"source {source} is there, and must not be")

    def _resolve(self, source: str) -> Value:
        """Return what an application gets."""
        answered = answer("resolve_credentials", {"tenant": TENANT, "source_id": source, "using": ALIAS})
        return str(answered.get("error") or answered["credentials"]["token"])

    def _look_at_objects(self) -> tuple[list[str], list[str]]:
        """Return which values are there twice, and which objects and files belong to no ref in use."""
        rows = self.scene.rows(ACTIVE)
        store = self.scene.store
        found = store.get_many([Address(Scope(*scope), ref) for *scope, ref, _ in rows]) if rows else []
        values = Counter(secret["token"] for secret in found if isinstance(secret, Credentials))
        values.update(
            value
            for (value,) in self.scene.rows(
                "SELECT metadata #>> '{credentials,token}' FROM sources WHERE metadata ? 'credentials'"
            )
        )
        owners = Counter(source for _, _, source, _, _ in rows)
        doubled = [f"value {value} is there {count} times" for value, count in values.items() if count > 1]
        doubled += [f"source {source} has {count} refs in use" for source, count in owners.items() if count > 1]
        names = {object_name(ref).rpartition("/")[2] for *_, ref, is_named in rows if is_named}
        files = {path.name for path in self.scene.secrets.rglob("*") if path.is_file()} - {PROBE_NAME}
        return doubled, [f"file {name} belongs to no ref in use" for name in sorted(files - names)]

    def _look_for_values(self) -> list[str]:
        """Return in which tables values are that are none of theirs."""
        tables = self.scene.rows(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'sources'"
        )
        counts = {
            table: self.scene.value(f"SELECT count(*) FROM {table} t WHERE strpos(t::text, %s) > 0", [MARK])
            for (table,) in tables
        }
        return [f"{count} rows of {table} hold a value" for table, count in counts.items() if count]


def quotes(printed: str, *, answers: bool) -> bool:
    """Return whether a process has printed a value that it was not asked for. `answers`: it prints what it is told."""
    return any(MARK in line for line in printed.splitlines() if not (answers and line.startswith("{")))

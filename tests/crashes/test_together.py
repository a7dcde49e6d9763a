"""Workers beside each other, and beside an application that knows nothing of them: nothing is lost, nobody waits."""

from __future__ import annotations

import json
import random
import signal
from copy import deepcopy
from typing import Any
from uuid import UUID, uuid4

import psycopg

from kfs_credentials.crypto import Scope
from tests.crashes.database import ALIAS
from tests.crashes.scene import CLEAN, LOOK, NOT_FINISHED, Scene
from tests.crashes.stores import AFTER_PUT, BEFORE_PUT
from tests.invariants import check_invariants, objects_in_use

ACTS = 600
"""What the old application does, one thing after the other."""

JOBS = "source_credential_backfills"
ON_ITS_WAY = """
SELECT src.id FROM sources src LEFT JOIN source_credential_backfills job ON job.source_id = src.id
WHERE src.credential_ref IS NULL AND jsonb_typeof(src.metadata -> 'credentials') = 'object'
  AND job.run_state IS DISTINCT FROM 'failed'
"""


def first_to_move(scene: Scene) -> UUID:
    """Return the first source that discovery finds."""
    found: UUID = scene.value(
        "SELECT min(id::text)::uuid FROM sources WHERE jsonb_typeof(metadata -> 'credentials') = 'object'"
    )
    return found


def check_that_the_second_passes_over(scene: Scene, what: str) -> None:
    """A worker holds its rows in an open transaction; another one does all the rest meanwhile."""
    source = first_to_move(scene)
    with scene.held_up(what, JOBS, condition=f"NEW.source_id = '{source}'") as hold_up:
        first = scene.start()
        hold_up.wait(first)
        second = scene.start()
        scene.wait_until(lambda: len(scene.rows(ON_ITS_WAY)) <= 20, "the second has done what is free", watched=second)
        assert (source,) in scene.rows(ON_ITS_WAY)
        hold_up.let_go()
        assert first.wait() == LOOK, first.printed
        assert second.wait() == LOOK, second.printed
    scene.check_end()
    assert scene.attempts() == 0


def test_two_that_discover(scene: Scene) -> None:
    check_that_the_second_passes_over(scene, "INSERT")


def test_two_that_claim(scene: Scene) -> None:
    with scene.gate(BEFORE_PUT) as gate:
        worker = scene.start()
        gate.wait()
        worker.kill()
    scene.expire_leases()
    check_that_the_second_passes_over(scene, "UPDATE")


def test_a_lease_that_is_renewed_is_not_taken_over(scene: Scene) -> None:
    """A put that takes longer than the lease holds by itself, beside a worker that has nothing else left to do."""
    held = f"SELECT id, lease_token, row_version FROM {JOBS} WHERE split_part(worker_id, ':', 2) = %s ORDER BY id"
    renewed = (
        f"SELECT min(heartbeat_at) > min(created_at) + interval '3 seconds' FROM {JOBS} "
        "WHERE split_part(worker_id, ':', 2) = %s"
    )
    with scene.gate(BEFORE_PUT) as gate:
        slow = scene.start(LEASE=1.5)
        gate.wait()
        scene.wait_for_the_store(slow)
        before = scene.rows(held, [str(slow.pid)])
        gate.let_others_pass()
        other = scene.start()
        scene.wait_until(lambda: scene.value(renewed, [str(slow.pid)]), "the lease is renewed", watched=other)
        assert scene.rows(held, [str(slow.pid)]) == before
    assert slow.wait() == LOOK, slow.printed
    assert other.wait() == LOOK, other.printed
    scene.check_end()
    assert scene.attempts() == 0


def test_a_job_that_somebody_holds_does_not_look_like_a_crash(scene: Scene) -> None:
    """It is passed over, and given back as soon as it is free: long before its lease runs out."""
    scene.leave_only(1)
    with scene.gate(AFTER_PUT) as gate, scene.session() as session:
        worker = scene.start(LEASE=600)
        gate.wait()
        session.execute(f"SELECT FROM {JOBS} FOR UPDATE")
        gate.open()
        scene.wait_until_it_counts(worker)
    assert worker.wait() == CLEAN, worker.printed
    assert scene.attempts() == 0


def test_what_is_changed_during_the_put_is_not_overwritten(scene: Scene) -> None:
    """Another key keeps the user's value; other credentials are moved instead of those that were put."""
    scene.leave_only(3)
    with scene.gate(AFTER_PUT) as gate:
        worker = scene.start()
        gate.wait()
        title, credentials, removed = [source for (source,) in scene.rows("SELECT id FROM sources ORDER BY id")]
        change = "UPDATE sources SET metadata = {} WHERE id = %s"
        scene.execute(change.format("""jsonb_set(metadata, '{title}', '"changed"')"""), [title])
        scene.execute(change.format("""jsonb_set(metadata, '{credentials}', '{"token": "changed"}')"""), [credentials])
        scene.execute(change.format("metadata - 'credentials'"), [removed])
    assert worker.wait() == CLEAN, worker.printed
    found = {
        source: (ref, Scope(tenant, space, source), other)
        for source, ref, tenant, space, other in scene.rows(
            "SELECT src.id, credential_ref, tenant_id, knowledge_space_id, metadata ->> 'title' FROM sources src "
            "JOIN knowledge_spaces space ON space.id = knowledge_space_id WHERE NOT metadata ? 'credentials'"
        )
    }
    assert found[title][2] == "changed"
    ref, scope, _ = found[credentials]
    assert scene.store.get(scope, ref) == {"token": "changed"}
    assert found[removed][0] is None
    scene.check_always()
    # What was put for nothing is known, and will be erased.
    assert objects_in_use(ALIAS, scene.store) == {"active": 2, "retired": 2}


class OldApplication:
    """Writes whole rows as it has read them, some of them a while ago, and knows no refs. All is chosen at random."""

    def __init__(self, session: psycopg.Connection[Any]) -> None:
        self.session = session
        self.credentials: dict[UUID, list[Any]] = {}  # each that it wrote; None: a row without
        self.titles: dict[UUID, Any] = {}
        self.versions: dict[UUID, int] = {}
        self.read: dict[UUID, dict[str, Any]] = {}

    def act(self) -> None:
        """Do one thing, and roll it back now and then."""
        undone = random.random() < 0.1
        before = deepcopy(self._memories) if undone else self._memories
        random.choices(
            [
                self.add,
                self.rename,
                self.rename_as_read_before,
                self.change,
                self.remove,
                self.delete,
                self.delete_space,
            ],
            [30, 20, 10, 20, 5, 5, 1],
        )[0]()
        if undone:
            self.session.rollback()
            self.credentials, self.titles, self.versions, self.read = before
        else:
            self.session.commit()

    def add(self) -> None:
        source, credentials = uuid4(), {"token": f"made-up-{random.random()}"}
        self.read[source] = {"title": 0, "credentials": credentials}
        self.session.execute(
            "INSERT INTO sources (id, knowledge_space_id, type, status, name, uri, metadata, permission_scope, "
            "version, created_at, updated_at) SELECT %s, id, 'online_drive', 'active', 'Made up', '', %s, "
            "'[]', 1, now(), now() FROM knowledge_spaces ORDER BY random() LIMIT 1",
            [source, json.dumps(self.read[source])],
        )
        self.credentials[source], self.titles[source], self.versions[source] = [credentials], 0, 1

    def change(self) -> None:
        source = self._any()
        self._write(source, {**self._look(source), "credentials": {"token": f"made-up-{random.random()}"}})

    def remove(self) -> None:
        source = self._any()
        self._write(source, {name: value for name, value in self._look(source).items() if name != "credentials"})

    def rename(self) -> None:
        source = self._any()
        self._write(source, {**self._look(source), "title": random.random()})

    def rename_as_read_before(self) -> None:
        """Write the row as it was when it was last looked at: credentials that were moved since are back."""
        source = self._any()
        self._write(source, {**self.read[source], "title": random.random()})

    def delete(self) -> None:
        source = self._any()
        self.session.execute("DELETE FROM sources WHERE id = %s", [source])
        self._forget(source)

    def delete_space(self) -> None:
        ((spaces,),) = self.session.execute("SELECT count(*) FROM knowledge_spaces")
        if spaces == 1:
            return  # there would be none to add sources to
        ((space,),) = self.session.execute("SELECT knowledge_space_id FROM sources WHERE id = %s", [self._any()])
        for (source,) in self.session.execute(
            "SELECT id FROM sources WHERE knowledge_space_id = %s", [space]
        ).fetchall():
            self._forget(source)
        self.session.execute("DELETE FROM knowledge_spaces WHERE id = %s", [space])

    @property
    def _memories(self) -> tuple[dict[UUID, Any], ...]:
        return self.credentials, self.titles, self.versions, self.read

    def _any(self) -> UUID:
        if not self.versions:
            self.add()
        return random.choice(list(self.versions))

    def _look(self, source: UUID) -> dict[str, Any]:
        ((self.read[source],),) = self.session.execute("SELECT metadata FROM sources WHERE id = %s", [source])
        return self.read[source]

    def _write(self, source: UUID, metadata: dict[str, Any]) -> None:
        self.session.execute(
            "UPDATE sources SET metadata = %s, version = version + 1, updated_at = now() WHERE id = %s",
            [json.dumps(metadata), source],
        )
        self.credentials[source].append(metadata.get("credentials"))
        self.titles[source] = metadata["title"]
        self.versions[source] += 1

    def _forget(self, source: UUID) -> None:
        for memory in self._memories:
            del memory[source]


def test_beside_an_old_application(scene: Scene) -> None:
    scene.execute("DELETE FROM sources")
    # An old application may change credentials over and over; that is not what is looked at here.
    scene.settings |= {"BATCH_SIZE": 5, "MAX_ATTEMPTS": 1000}
    with scene.session() as session:
        application = OldApplication(session)
        workers = [scene.start("--watch"), scene.start("--watch", BATCH_SIZE=1)]
        for worker in workers:
            scene.wait_until_idle(worker)
        for _ in range(ACTS):
            application.act()
            assert not workers[0].ends_within(random.uniform(0, 0.004)), workers[0].printed
        for worker in workers:
            worker.send(signal.SIGTERM)
            assert worker.wait() == NOT_FINISHED, worker.printed
        assert scene.start().wait() in (CLEAN, LOOK)
    check_that_nothing_is_lost(scene, application)
    assert scene.value("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0


def check_that_nothing_is_lost(scene: Scene, application: OldApplication) -> None:
    """Every source has the credentials that the application wrote last, and they are where they have to be."""
    rows = scene.rows(
        "SELECT src.id, tenant_id, knowledge_space_id, credential_ref, (metadata ->> 'credentials')::text, "
        "metadata ->> 'title', version FROM sources src JOIN knowledge_spaces space ON space.id = knowledge_space_id"
    )
    assert {source for source, *_ in rows} == set(application.versions)
    moved = 0
    for source, tenant, space, ref, in_clear, title, version in rows:
        written = application.credentials[source]
        if in_clear is not None:
            # Back again on a source that has a ref, by an old row: found and shown, never overwritten.
            assert ref is not None, source
            assert json.loads(in_clear) == written[-1], source
        elif written[-1] is not None:
            assert scene.store.get(Scope(tenant, space, source), ref) == written[-1], source
            moved += 1
        elif ref is not None:
            # The row was written without credentials: it was read without, after they were moved, or they were removed.
            assert scene.store.get(Scope(tenant, space, source), ref) in written, source
        assert json.loads(title) == application.titles[source], source
        assert version == application.versions[source] + (ref is not None), source
    assert moved > 0
    # What an old application causes, and what the sweep is there for.
    allowed = ("a source has both a ref and legacy credentials", "a ledger row is active, and no source has its ref")
    assert [finding for finding in check_invariants(ALIAS, scene.store) if not finding.startswith(allowed)] == []

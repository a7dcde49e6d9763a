"""The judge finds what is wrong: each kind of damage is done once, to a source of which it had nothing to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from kfs_credentials.crypto import Scope, new_ref, object_name
from tests.crashes.scene import Scene
from tests.torture import crew as crew_module
from tests.torture.applications import Application, Planned
from tests.torture.crew import Crew, Process
from tests.torture.judge import Judge, quotes
from tests.torture.keys import Keys
from tests.torture.memory import GONE, TENANT, Memory, Value, new_value
from tests.torture.old_application import OldApplication
from tests.waiting import PATIENCE

# As a rotation would leave it whose old ref is never retired.
COPY = """
INSERT INTO source_secret_lifecycle_refs
SELECT (jsonb_populate_record(
  ledger, jsonb_build_object('id', gen_random_uuid(), 'credential_ref', %s::text, 'operation_id', %s::text)
)).*
FROM source_secret_lifecycle_refs ledger WHERE credential_ref = %s
"""
IN_CLEAR = """
UPDATE sources SET metadata = jsonb_build_object('credentials', jsonb_build_object('token', %s::text)) WHERE id = %s
"""


class Victim(NamedTuple):
    """A source that nothing is wrong with, and where it is."""

    scene: Scene
    memory: Memory
    source: str
    ref: str

    @property
    def value(self) -> Value:
        """What it is."""
        (value,) = self.memory.sources[self.source].may_be
        return value

    @property
    def scope(self) -> Scope:
        """Whose its secret is."""
        return Scope(TENANT, self.memory.sources[self.source].space, self.source)

    def execute(self, statement: str) -> None:
        """Execute a statement about it: `%s` is its id."""
        self.scene.execute(statement, [self.source])


def lose_the_object(victim: Victim) -> None:
    (victim.scene.secrets / object_name(victim.ref)).unlink()


def lose_the_source(victim: Victim) -> None:
    victim.execute("DELETE FROM sources WHERE id = %s")


def lose_the_ref(victim: Victim) -> None:
    victim.execute("UPDATE sources SET credential_ref = NULL WHERE id = %s")


def resolve_to_an_old_value(victim: Victim) -> None:
    victim.memory.sources[victim.source].becomes(new_value())


def survive_a_deletion(victim: Victim) -> None:
    victim.memory.forget(victim.source)


def keep_two_copies(victim: Victim) -> None:
    copy = new_ref()
    victim.scene.store.put(victim.scope, copy, {"token": victim.value})
    victim.scene.execute(COPY, [copy, str(uuid4()), victim.ref])


def leave_it_in_clear(victim: Victim) -> None:
    victim.scene.execute(IN_CLEAR, [victim.value, victim.source])


def leave_an_object(victim: Victim) -> None:
    victim.scene.store.put(Scope(TENANT, uuid4(), uuid4()), new_ref(), {"token": "nobody's"})


def leave_half_a_file(victim: Victim) -> None:
    ((victim.scene.secrets / object_name(victim.ref)).parent / ".half").write_bytes(b"")


def write_a_value_elsewhere(victim: Victim) -> None:
    victim.scene.execute("UPDATE knowledge_spaces SET name = %s", [victim.value])


def fail_the_job(victim: Victim) -> None:
    victim.execute(
        "UPDATE source_credential_backfills SET run_state = 'failed', last_error_code = 'MADE_UP' WHERE source_id = %s"
    )


def park_the_ref(victim: Victim) -> None:
    victim.execute(
        "UPDATE source_secret_lifecycle_refs SET state = 'retired', next_delete_at = now() WHERE source_id = %s"
    )


def let_nobody_sweep(victim: Victim) -> None:
    victim.execute("DELETE FROM sources WHERE id = %s")
    victim.memory.forget(victim.source)


def use_what_was_claimed(victim: Victim) -> None:
    claim = "UPDATE kfs_credentials_secret_object SET first_claimed_at = now() WHERE credential_ref = %s"
    victim.scene.execute(claim, [victim.ref])


DAMAGE: list[tuple[Callable[[Victim], None], str]] = [
    (lose_the_object, "lost"),
    (lose_the_source, "lost"),
    (lose_the_ref, "lost"),
    (resolve_to_an_old_value, "lost"),
    (survive_a_deletion, "lost"),
    (use_what_was_claimed, "lost"),
    (keep_two_copies, "doubled"),
    (leave_it_in_clear, "doubled"),
    (leave_an_object, "leaked"),
    (leave_half_a_file, "leaked"),
    (let_nobody_sweep, "leaked"),
    (write_a_value_elsewhere, "leaked"),
    (fail_the_job, "failed"),
    (park_the_ref, "failed"),
]


def test_what_is_wrong_is_found(scene: Scene, memory: Memory, old: OldApplication, judge: Judge) -> None:
    old.add_space(len(DAMAGE))
    judge.finish()
    before = judge.verdict()
    assert before.is_good
    refs = dict(scene.rows("SELECT id::text, credential_ref FROM sources"))
    for (damage, kind), source in zip(DAMAGE, list(memory.sources), strict=True):
        damage(Victim(scene, memory, source, refs[source]))
        after = judge.verdict()
        assert set(getattr(after, kind)) - set(getattr(before, kind)), damage.__name__
        before = after


def test_what_is_printed() -> None:
    answer = '{"credentials": {"token": "' + new_value() + '"}}'
    assert quotes(f"no luck with {new_value()}", answers=True)
    assert quotes(answer, answers=False)
    assert not quotes(answer, answers=True)
    assert not quotes("no luck", answers=False)


def test_what_was_displaced_and_is_not_kept(memory: Memory, old: OldApplication, judge: Judge) -> None:
    old.add_space(1)
    judge.finish()
    (known,) = memory.sources.values()
    known.must_keep = newer = new_value()
    judge.finish()
    (lost,) = judge.verdict().lost
    assert lost.endswith(f": nothing is kept, and not {newer}")


def test_a_call_that_is_refused_for_no_reason(memory: Memory, old: OldApplication) -> None:
    space = old.add_space(1)
    (source,) = memory.spaces[space]
    rotation = Planned("rotate_credentials", {"source_id": source}, space, source, new_value())
    application = Application(memory, [space], rotation, 1)
    application.settle([{"error": "InvalidCredentials", "tries": 1}])
    assert memory.lost == [f"rotate_credentials of source {source} was refused: InvalidCredentials"]


@pytest.mark.parametrize(("function", "argument"), [("sys.exit", 2), ("json.loads", "{")])
def test_a_process_that_ends_as_none_should(scene: Scene, memory: Memory, function: str, argument: object) -> None:
    crew = Crew(scene, memory, Keys())
    store: tuple[str, dict[str, Any]] = ("kfs_credentials.stores.encrypted.EncryptedStore", {})
    worker = scene.fork("backfill", function, argument, store=store, settings={})  # type: ignore[arg-type]
    crew.processes.append(Process(worker, generation=0))
    worker.ends_within(PATIENCE)
    crew.reap()
    (wrong,) = crew.wrong
    assert wrong.startswith(f"{worker.name} ended with {2 if function == 'sys.exit' else 1}")


def test_a_call_that_is_never_answered(
    scene: Scene, memory: Memory, old: OldApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = old.add_space(1)
    (source,) = memory.spaces[space]
    memory.add_space("shared", shared=True)
    crew = Crew(scene, memory, Keys(), tcp={"HOST": "127.0.0.1", "PORT": "1", "OPTIONS": {}})
    crew.doubts.append(Planned("delete_source", {"tenant": TENANT, "source_id": source}, space, source, GONE))
    monkeypatch.setattr(crew_module, "PATIENCE", 0)
    crew.settle_doubts()
    assert crew.wrong == ["1 calls are still not answered, though nothing befalls anybody"]

"""The judge finds what is wrong: each kind of damage is done once, to a source of which it had nothing to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from uuid import uuid4

from kfs_credentials.crypto import Scope, new_ref, object_name
from tests.crashes.scene import Scene
from tests.torture.judge import Judge, quotes
from tests.torture.memory import TENANT, Memory, Value, new_value
from tests.torture.old_application import OldApplication

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


DAMAGE: list[tuple[Callable[[Victim], None], str]] = [
    (lose_the_object, "lost"),
    (lose_the_source, "lost"),
    (lose_the_ref, "lost"),
    (resolve_to_an_old_value, "lost"),
    (survive_a_deletion, "lost"),
    (keep_two_copies, "doubled"),
    (leave_it_in_clear, "doubled"),
    (leave_an_object, "leaked"),
    (leave_half_a_file, "leaked"),
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
    assert quotes(f"no luck with {new_value()}")
    assert not quotes('{"credentials": {"token": "' + new_value() + '"}}')
    assert not quotes("no luck")

"""The judge finds what is wrong: each kind of damage is done once, to a scene of which it had nothing to say."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest

from kfs_credentials.crypto import Scope, new_ref
from tests.crashes.scene import Scene
from tests.torture.judge import Judge, quotes
from tests.torture.memory import TENANT, Memory, new_value
from tests.torture.old_application import OldApplication

SOURCES = 4
COPY = """
INSERT INTO source_secret_lifecycle_refs
SELECT (jsonb_populate_record(
  ledger, jsonb_build_object('id', gen_random_uuid(), 'credential_ref', %s::text, 'operation_id', %s::text)
)).*
FROM source_secret_lifecycle_refs ledger WHERE credential_ref = %s
"""


def first(memory: Memory) -> str:
    """Return a source that is there."""
    return next(iter(memory.sources))


def lose_an_object(scene: Scene, memory: Memory) -> None:
    next(scene.secrets.rglob("*.enc")).unlink()


def lose_a_source(scene: Scene, memory: Memory) -> None:
    scene.execute("DELETE FROM sources WHERE id = %s", [first(memory)])


def lose_a_ref(scene: Scene, memory: Memory) -> None:
    scene.execute("UPDATE sources SET credential_ref = NULL WHERE id = %s", [first(memory)])


def keep_an_old_value(scene: Scene, memory: Memory) -> None:
    memory.sources[first(memory)].may_be = {new_value()}


def bring_back_a_source(scene: Scene, memory: Memory) -> None:
    memory.forget(first(memory))


def copy_a_secret(scene: Scene, memory: Memory) -> None:
    """Under another ref, as a rotation would whose old ref is never retired."""
    ((space, source, ref),) = scene.rows("SELECT knowledge_space_id, id, credential_ref FROM sources LIMIT 1")
    scope, copy = Scope(TENANT, space, source), new_ref()
    scene.store.put(scope, copy, scene.store.get(scope, ref))
    scene.execute("UPDATE source_secret_lifecycle_refs SET credential_ref = %s WHERE credential_ref = %s", [copy, ref])
    scene.execute(COPY, [ref, str(uuid4()), copy])


def leave_in_clear(scene: Scene, memory: Memory) -> None:
    """Beside the ref."""
    source = first(memory)
    (value,) = memory.sources[source].may_be
    change = "UPDATE sources SET metadata = jsonb_build_object('credentials', jsonb_build_object('token', %s::text))"
    scene.execute(f"{change} WHERE id = %s", [value, source])


def leave_an_object(scene: Scene, memory: Memory) -> None:
    scene.store.put(Scope(TENANT, uuid4(), uuid4()), new_ref(), {"token": "nobody's"})


def leave_half_a_file(scene: Scene, memory: Memory) -> None:
    (next(scene.secrets.rglob("*.enc")).parent / ".half").write_bytes(b"")


def write_a_value_elsewhere(scene: Scene, memory: Memory) -> None:
    scene.execute("UPDATE knowledge_spaces SET name = %s", [new_value()])


def fail_a_job(scene: Scene, memory: Memory) -> None:
    scene.execute("UPDATE source_credential_backfills SET run_state = 'failed', last_error_code = 'MADE_UP'")


def park_a_ref(scene: Scene, memory: Memory) -> None:
    scene.execute("UPDATE source_secret_lifecycle_refs SET state = 'retired', next_delete_at = now()")


DAMAGE = [
    (lose_an_object, "lost"),
    (lose_a_source, "lost"),
    (lose_a_ref, "lost"),
    (keep_an_old_value, "lost"),
    (bring_back_a_source, "lost"),
    (copy_a_secret, "doubled"),
    (leave_in_clear, "doubled"),
    (leave_an_object, "leaked"),
    (leave_half_a_file, "leaked"),
    (write_a_value_elsewhere, "leaked"),
    (fail_a_job, "failed"),
    (park_a_ref, "failed"),
]


@pytest.mark.parametrize(("damage", "kind"), DAMAGE, ids=lambda given: getattr(given, "__name__", given))
def test_what_is_wrong_is_found(
    scene: Scene,
    memory: Memory,
    old: OldApplication,
    judge: Judge,
    damage: Callable[[Scene, Memory], None],
    kind: str,
) -> None:
    old.add_space(SOURCES)
    judge.finish()
    assert judge.verdict().is_good
    damage(scene, memory)
    assert getattr(judge.verdict(), kind)


def test_what_is_printed() -> None:
    assert quotes(f"no luck with {new_value()}")
    assert not quotes('{"credentials": {"token": "' + new_value() + '"}}')
    assert not quotes("no luck")

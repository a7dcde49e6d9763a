"""What a user does in a day, by processes alone: create, rotate, revoke, delete, clean up."""

from __future__ import annotations

from typing import Any

from tests.crashes.scene import CLEAN, Scene
from tests.crashes.stage import LEDGER

OTHERS = 3
PER_SPACE = 4


def test_from_the_first_secret_to_the_last_erasure(scene: Scene) -> None:
    """Every secret that nobody uses is gone, every row of theirs is final, and nothing else was touched."""
    scene.execute("DELETE FROM sources")
    scene.settings |= {"ERASE_GRACE": 0.2, "LATE_WRITE_HORIZON": 0.3}
    tenant = "a tenant"
    kept, by_service, by_sql = scene.new_spaces(tenant, 3)

    def create(space: str, value: str) -> tuple[str, dict[str, Any]]:
        what = {"type": "online_drive", "name": "Made up", "uri": "", "credentials": {"token": value}}
        return "create_source", {"tenant": tenant, "space_id": space, **what}

    others = scene.call(*[create(kept, f"other-{number}") for number in range(OTHERS)])
    before = scene.files()

    (made,) = scene.call(create(kept, "first"))
    which = {"tenant": tenant, "source_id": made["source"]}
    rotated = scene.call(
        ("rotate_credentials", {**which, "credentials": {"token": "second"}}),
        ("rotate_credentials", {**which, "credentials": {"token": "third"}, "expected_version": 2}),
        ("resolve_credentials", which),
        ("revoke_credentials", which),
        ("resolve_credentials", which),
    )
    assert rotated[2] == {"credentials": {"token": "third"}}
    assert rotated[3] == {"source": made["source"], "ref": None, "version": 4}
    assert rotated[4] == {"error": "NoCredentials"}
    scene.call(*[create(space, f"{number}") for space in (by_service, by_sql) for number in range(PER_SPACE)])
    assert len(scene.files()) == OTHERS + 3 + 2 * PER_SPACE
    scene.call(("delete_knowledge_space", {"tenant": tenant, "space_id": by_service}))
    scene.execute("DELETE FROM knowledge_spaces WHERE id = %s", [by_sql])

    cleanup = scene.start_command("run_secret_cleanup")
    assert cleanup.wait() == CLEAN, cleanup.printed
    assert "Every erasure is confirmed." in cleanup.printed
    assert scene.files() == before
    gone = 3 + 2 * PER_SPACE
    states = scene.rows(f"SELECT state, next_delete_at IS NULL, count(*) FROM {LEDGER} GROUP BY 1, 2 ORDER BY 1")
    assert states == [("active", True, OTHERS), ("deleted", True, gone)]
    scene.check_cleaned()
    scene.check_values({(tenant, one["source"]): {"token": f"other-{number}"} for number, one in enumerate(others)})

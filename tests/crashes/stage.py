"""A scene whose sources have secrets, and what makes work for a cleanup there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfs_credentials.crypto import Scope
from tests.crashes.scene import CLEAN, Call, Scene
from tests.crashes.stores import AFTER_PUT, BEFORE_DELETE, GONE_AT_GATE

LEDGER = "source_secret_lifecycle_refs"
OBJECTS = "kfs_credentials_secret_object"

AT_ONCE = GONE_AT_GATE + 1
"""How many sources are deleted at a time."""


class Stage:
    """A scene whose sources have secrets, the credentials that they must have, and ways to make work for a cleanup."""

    def __init__(self, scene: Scene, sources: int) -> None:
        self.scene = scene
        self.values: dict[tuple[str, str], Mapping[str, Any] | None] = {}
        self.displaced = 0
        scene.leave_only(sources)
        scene.execute(
            "UPDATE sources SET metadata = jsonb_build_object('credentials', jsonb_build_object('token', id::text))"
        )
        scene.drain(CLEAN)
        self.sources = [
            (tenant, str(source), ref)
            for tenant, source, ref in scene.rows(
                "SELECT tenant_id, source.id, credential_ref FROM sources source "
                "JOIN knowledge_spaces space ON space.id = knowledge_space_id ORDER BY source.id"
            )
        ]
        self.values |= {(tenant, source): {"token": source} for tenant, source, _ in self.sources}

    # What makes work.

    def orphans(self) -> None:
        """Delete sources, without a word to anybody."""
        for _ in range(AT_ONCE):
            tenant, source, _ = self.sources.pop()
            self.scene.execute("DELETE FROM sources WHERE id = %s", [source])
            self.values[tenant, source] = None

    def reservation(self) -> None:
        """Let an application die after it has put what it was to rotate to, and let the time for it be over."""
        tenant, source, _ = self.sources.pop()
        with self.scene.gate(AFTER_PUT) as gate:
            application = self.scene.start_application(self.rotation(tenant, source))
            gate.wait()
            application.kill()
        self.scene.expire_reservations()

    def stale_save(self) -> None:
        """Let an old writer bring back the ref of before a rotation."""
        tenant, source, ref = self.sources.pop()
        self.scene.call(self.rotation(tenant, source))
        self.save(source, ref)

    def stale_save_of_what_is_being_erased(self) -> None:
        """The same, of a ref that a cleanup had claimed when it died."""
        tenant, source, ref = self.sources.pop()
        self.scene.call(self.rotation(tenant, source))
        with self.scene.gate(BEFORE_DELETE) as gate:
            worker = self.scene.start_cleanup()
            gate.wait()
            worker.kill()
        self.scene.expire_leases()
        self.save(source, ref)

    def unregistered(self) -> None:
        """Let the ledger not know a ref."""
        _, _, ref = self.sources.pop()
        self.scene.execute("DELETE FROM source_credential_backfills WHERE candidate_credential_ref = %s", [ref])
        for table in (LEDGER, OBJECTS):
            self.scene.execute(f"DELETE FROM {table} WHERE credential_ref = %s", [ref])

    def late_write(self) -> None:
        """Put something under a ref whose erasure is confirmed."""
        self.orphans()
        self.scene.recover()
        ((tenant, space, source, ref),) = self.scene.rows(
            f"SELECT tenant_id, knowledge_space_id, source_id, credential_ref FROM {LEDGER} "
            "WHERE state = 'deleted' AND next_delete_at IS NULL LIMIT 1"
        )
        self.scene.store.put(Scope(tenant, space, source), ref, {"token": "late"})

    def rotation(self, tenant: str, source: str) -> Call:
        """Return the call that gives a source new credentials, which nobody here reads back."""
        return "rotate_credentials", {"tenant": tenant, "source_id": source, "credentials": {"token": "new"}}

    def save(self, source: str, ref: str) -> None:
        """Write a row as an old writer has it, who read it before the last rotation."""
        self.scene.execute("UPDATE sources SET credential_ref = %s WHERE id = %s", [ref, source])
        self.displaced += 1

    # What must be true.

    def recover(self) -> None:
        """Let another cleanup do the rest: everything is as if nobody had been killed."""
        self.scene.recover()
        self.check()

    def check(self) -> None:
        """Everything is final, and all values are there."""
        self.scene.check_cleaned(displaced=self.displaced)
        self.scene.check_values(self.values)

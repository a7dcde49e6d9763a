"""The key ring, which is changed over and over, as operating.md says: add, put first, re-encrypt, remove."""

from __future__ import annotations

import secrets

from kfs_credentials.crypto import key_id
from kfs_credentials.keys import held_keys, refs_held
from tests.crashes.database import ALIAS


class Keys:
    """`ring`: the keys of a process that is started now. `generation`: how often they were changed."""

    def __init__(self) -> None:
        self.ring = [secrets.token_hex(32)]
        self.generation = 0
        self.changes = 0
        """How often an old key was removed."""
        self.wants_run = False
        """Whether `reencrypt_secrets` is to be run."""
        self.was_run = False
        """Whether it came to its end since, without a complaint."""

    def change(self, oldest: int) -> None:
        """Do the next step, if everybody is ready for it. `oldest`: the generation of the oldest process alive."""
        if len(self.ring) == 1:
            self._set(self.ring[0], secrets.token_hex(32))
        elif self.wants_run:
            if not self.was_run:
                return
            old = key_id(bytes.fromhex(self.ring[1]))
            if not any(refs_held(key) for key in held_keys(ALIAS) if key["key_id"] in (old, None)):
                self.changes += 1
                self._set(self.ring[0])
            self.was_run = False
        elif oldest == self.generation:
            # Everybody can read what is sealed under the new key. Whoever goes on with the old ring is refused.
            self._set(*reversed(self.ring), run=True)

    def run_came_to_its_end(self, generation: int) -> None:
        """Note that `reencrypt_secrets` has ended well, with the keys of that generation."""
        self.was_run = self.was_run or generation == self.generation

    def _set(self, *ring: str, run: bool = False) -> None:
        self.ring = list(ring)
        self.generation += 1
        self.wants_run, self.was_run = run, False

"""What is handed to a store, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kfs_credentials.errors import SecretIntegrityError

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable

    from kfs_credentials.crypto import Plaintext, Scope


@dataclass(frozen=True, slots=True)
class Address:
    """Whose secret, and under which ref."""

    scope: Scope
    ref: str


@dataclass(frozen=True, slots=True)
class Entry(Address):
    """An address and what to put there. Its repr shows no value: `Plaintext` hides it."""

    plaintext: Plaintext


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the store holds after a put: the id of the key it is sealed under, and the plaintext's bytes."""

    key_id: str | None
    size: int


@dataclass(frozen=True, slots=True)
class Probe:
    """The store's half of a binding: which database it belongs to, and the epoch. See `kfs_credentials.binding`."""

    environment_id: uuid.UUID
    environment: str
    system_identifier: str
    database_oid: int
    epoch: int
    key_id: str | None = field(default=None, compare=False)
    """The key that opened it, where it was read."""


Sighting: TypeAlias = Probe | SecretIntegrityError | None
"""What was seen in the place of the probe: one that no key of the ring opens is an error, None is no object."""

Look: TypeAlias = "Callable[[Sighting], None]"
"""Called with what was seen; raises where that is not the right store."""


class Beside(NamedTuple):
    """A file to be looked at beside others: its name, and what to call with its content (None: there is none)."""

    name: str
    look: Callable[[bytes | None], None]


@dataclass(frozen=True, slots=True)
class Resealed(Receipt):
    """What the store holds after a replacement. `rewritten`: False if it was under the first key already."""

    rewritten: bool
    plaintext: Plaintext | None = field(default=None, repr=False, compare=False)
    """What was sealed anew. A store notes it with what it rewrites; the caller of a store gets None."""

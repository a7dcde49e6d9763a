"""Made-up values and ids that depend on a seed and a label, and on nothing else."""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar
from uuid import UUID

T = TypeVar("T")

# Whoever changes the data changes this too: a database with the older demo is then refused, not misread.
NAMESPACE = b"kfs-credentials/demo/v1"
# Ten bytes of an id are drawn; the six that follow are their checksum: so the demo knows its own rows.
DRAWN_BYTES = 10
CHECKSUM_BYTES = 6

END = datetime(2026, 11, 1, tzinfo=UTC)
PERIOD = timedelta(days=730)


class Draw:
    """A stream of values for one row of the demo data.

    The bytes behind it are SHAKE-256 (FIPS 202) over namespace, seed and label: the same on every machine and
    with every version of Python, which `random` promises for floats only.
    """

    def __init__(self, seed: int, label: str) -> None:
        self._hash = hashlib.shake_256(b"\0".join((NAMESPACE, str(seed).encode(), label.encode())))
        self._bytes = self._hash.digest(512)
        self._used = 0

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes."""
        start, self._used = self._used, self._used + length
        if self._used > len(self._bytes):
            self._bytes = self._hash.digest(2 * self._used)
        return self._bytes[start : self._used]

    def hex(self, length: int) -> str:
        """Return text of `length` hex digits; `length` is even."""
        return self.take(length // 2).hex()

    def below(self, limit: int) -> int:
        """Return an integer from 0 to `limit` - 1."""
        return int.from_bytes(self.take(8)) % limit

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of `choices`."""
        return choices[self.below(len(choices))]

    def moment(self, since: datetime = END - PERIOD) -> datetime:
        """Return a time in UTC from `since` up to 1 November 2026, in whole microseconds."""
        microsecond = timedelta(microseconds=1)
        return since + self.below((END - since) // microsecond) * microsecond

    def uuid(self) -> UUID:
        """Return a version-4 UUID that carries the demo's checksum."""
        drawn = bytearray(self.take(DRAWN_BYTES))
        drawn[6] = drawn[6] & 0x0F | 0x40
        drawn[8] = drawn[8] & 0x3F | 0x80
        checksum = hashlib.sha256(NAMESPACE + drawn).digest()[:CHECKSUM_BYTES]
        return UUID(bytes=bytes(drawn) + checksum)

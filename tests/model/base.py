"""What every rule needs: a step of the package with a fault, or a write past it; and a look afterwards."""

from __future__ import annotations

import enum
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from django.db import DatabaseError, InterfaceError, connections
from hypothesis.stateful import RuleBasedStateMachine

from kfs_credentials.audit import acting_as
from kfs_credentials.crypto import envelope_key_id
from kfs_credentials.errors import KeyClosed, SecretStoreError, SourceBusy, StoreDenied, StoreUnavailable, WorkersPaused
from tests.invariants import findings
from tests.keys import NEW_ID, OLD_ID
from tests.model.dictionary import Dictionary, check_candidates, check_leases, check_moves, check_values
from tests.model.faults import AT_COMMIT, AT_READ, AT_STATEMENT, FAULTS, HELD, IN_STORE, Fault, Killed
from tests.model.world import ALIAS, SOURCES, SPACES, TENANT, World, ring
from tests.move_history import History

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
Errors = tuple[type[BaseException], ...]

DATABASE: Errors = (DatabaseError, InterfaceError)
ANSWERS: dict[tuple[str, ...], Errors] = {
    AT_STATEMENT: DATABASE,
    AT_COMMIT: DATABASE,
    IN_STORE: (StoreUnavailable, StoreDenied, SecretStoreError),
    AT_READ: (StoreUnavailable,),
    HELD: (SourceBusy, DatabaseError),
}
"""What a step may raise that met with a fault."""


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    value: Any = None
    error: Exception | None = None
    killed: bool = False
    faulty: bool = False
    """The ordered fault has happened."""

    @property
    def done(self) -> bool:
        """Whether it came to its end."""
        return self.error is None and not self.killed


def pick(things: Sequence[T], number: int) -> T:
    """Return one of these."""
    return things[number % len(things)]


class Base(RuleBasedStateMachine):
    """The state of one example. `world` and `history` are the same ones for all of them."""

    world: ClassVar[World]
    history: ClassVar[History]
    reached: ClassVar[Counter[str]] = Counter()
    """How often the steps of a run came to what: else nobody knew how far a machine gets that finds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.reached["examples"] += 1
        self.world.reset()
        self.book = Dictionary()
        self.seen = self.world.look()
        self.changed: set[uuid.UUID] = set()
        self.broken = False
        self.ending = False
        self.number = 0
        self.deployed = False
        """Whether processes that start now have the new key first."""
        self.paused = False
        self.closed: str | None = None
        """The key that a re-encryption has closed."""
        self.moved_to: str | None = None
        """The key under which all is that is in use, since a re-encryption came to its end."""

    # Names.

    def new_name(self, kind: str) -> str:
        """Return a name that nobody has had."""
        self.number += 1
        return f"{kind}-{self.number}"

    def new_value(self) -> str:
        """Return a value that nobody has had."""
        self.number += 1
        return f"v{self.number}"

    def is_closed(self, new_first: bool) -> bool:
        """Whether a process with this key ring may not bring anything into use."""
        return self.closed == (NEW_ID if new_first else OLD_ID)

    def sources(self, *, there: bool) -> list[uuid.UUID]:
        """Return the sources that are there, or those that are not."""
        return [source for source in SOURCES if (source in self.book.rows) == there]

    # Steps.

    def step(
        self,
        work: Callable[[], Any],
        *,
        worker: str = "application",
        new_first: bool = False,
        fault: Fault | None = None,
        may: Errors = (),
        must: Errors = (),
        tokens: set[uuid.UUID] | None = None,
        claims: bool = False,
        moves: bool = False,
        rescues: bool = False,
        then: Callable[[Outcome], None] | None = None,
    ) -> Outcome:
        """Make a step of the package, with a fault; look whether all is as it must be afterwards.

        `may`: what it may raise. `must`: one of these it raises, unless a fault comes before. `tokens`, `claims`: see
        `check_leases`. `moves`: sources may be moved by it. `rescues`: secrets may be copied. `then`: notes what an
        application sees from here on.
        """
        with self._careful():
            outcome = self._made(work, worker, new_first, fault, (*may, *must))
            self._count(outcome, fault)
            assert not (must and outcome.done), f"it has to be refused: {must}"
            before, self.seen = self.seen, self.world.look()
            self.changed = {source for source in SOURCES if before.rows.get(source) != self.seen.rows.get(source)}
            check_leases(before, self.seen, worker=worker, tokens=tokens, claims=claims)
            check_moves(before, self.seen)
            # What is due, and what a live job holds, is only put off by a claim: that is no move, and has no event.
            put_off = {"[('retired', 'retired')] has []"} if claims else set()
            assert set(self.history.problems()) <= put_off
            self.book.dangling -= {ref for ref, row in self.seen.refs.items() if row.state == "active"}
            if then is not None:
                then(outcome)
            self.book.accept(self.seen, moves=moves, rescues=rescues)
            self._look()
        return outcome

    def _count(self, outcome: Outcome, fault: Fault | None) -> None:
        what = "killed" if outcome.killed else type(outcome.error).__name__ if outcome.error else ""
        if outcome.faulty and fault is not None:
            self.reached[f"fault: {fault.how}"] += 1
        if what:
            self.reached[what] += 1
        elif isinstance(outcome.value, enum.Enum):
            self.reached[f"{type(outcome.value).__name__}: {outcome.value.name}"] += 1
        elif isinstance(outcome.value, Counter):
            for key, number in outcome.value.items():
                name = key.name if isinstance(key, enum.Enum) else key
                self.reached[f"{type(key).__name__}: {name}"] += number
        self.reached["steps"] += 1

    def _made(self, work: Callable[[], Any], worker: str, new_first: bool, fault: Fault | None, may: Errors) -> Outcome:
        self.book.moment += 1
        self.world.execute("DELETE FROM kfs_tests_history")
        value, error, killed = None, None, False
        with ring(new_first), FAULTS.ordered(fault), self.world.held(fault), acting_as(worker):
            try:
                value = work()
            except Killed:
                killed = True
            except Exception as raised:  # noqa: BLE001 - looked at below
                error = raised
        killed = killed or FAULTS.dead
        faulty = FAULTS.spent
        if killed:
            FAULTS.dead = False
            self.world.reconnect()
            self.world.execute("UPDATE kfs_credentials_binding SET lease_expires_at = now()")
        elif error is not None:
            connections[ALIAS].close()
            if faulty and fault is not None:
                may += next(errors for kinds, errors in ANSWERS.items() if fault.how in kinds)
            if not isinstance(error, may):
                raise error
        return Outcome(value, error, killed, faulty)

    @contextmanager
    def past(self) -> Iterator[None]:
        """Do something past the package in this block; look whether all is as it must be afterwards."""
        with self._careful():
            self.book.moment += 1
            yield
            self.seen = self.world.look()
            self.changed = set(SOURCES)
            self.book.accept(self.seen)
            self._look()

    @contextmanager
    def _careful(self) -> Iterator[None]:
        """Note that something is wrong, so that the end of the example does not hide it."""
        try:
            yield
        except BaseException:
            self.broken = True
            self.reached.setdefault("example that failed", self.reached["examples"])
            raise

    def _look(self) -> None:
        if self.ending:
            return  # at the end of it
        with ring(new_first=True):
            found = findings("default", self.world.store)
            assert self.book.unexpected(found, self.seen) == {}
            # What lies in clear, or is not there, is seen in the rows.
            for source in self.changed | {source for source, row in self.book.rows.items() if row.ref is not None}:
                visible = self.world.visible(source)
                assert visible in self.book.sees(source), f"{source}: {visible}, not {self.book.sees(source)}"
            check_values(self.book, self.seen, self.world.read)
            check_candidates(self.book, self.seen)
        if self.moved_to is not None:
            for ref, row in self.seen.refs.items():
                if row.state == "active" or row.attention == "displaced":
                    assert envelope_key_id(self.world.blob(ref)) == self.moved_to, f"{ref} is under the old key"

    def refusals(self, new_first: bool | None = None) -> Errors:
        """Return what a worker's step has to raise now. `new_first`: of a process that brings something into use."""
        if self.paused:
            return (WorkersPaused,)
        return (KeyClosed,) if new_first is not None and self.is_closed(new_first) else ()


__all__ = ["SOURCES", "SPACES", "TENANT", "Base", "Outcome", "pick"]

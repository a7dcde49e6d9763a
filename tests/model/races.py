"""Two who are at work on the same thing: the one has come to some step, the other does something, the first goes on.

Any of it could happen step by step; but of all the orders there are, few have the second in between.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from hypothesis import note

from tests.model.backfills import ANSWERED, STARTED, TAKEN
from tests.model.base import pick
from tests.model.faults import FAULTS, Fault
from tests.model.rules import Rules
from tests.model.world import SOURCES

STAGES = (ANSWERED, ANSWERED, STARTED, TAKEN)
MOST = 8
"""Steps within which a worker comes to a stage, or not at all."""


class Races(Rules):
    """What comes between the steps of a worker."""

    def backfill_race(self, kind: int, one: int, two: int, flag: bool, fault: Fault | None) -> None:
        """A source has credentials in clear, a worker is about to move them, and something happens to either."""
        source = self._legacy(one)
        number = two % 2
        if source is None or self.paused or self.is_closed(self.backfills[number].new_first):
            return
        worker = self.backfills[number]
        for _ in range(MOST):
            if worker not in self.backfills or any(
                held.stage == pick(STAGES, two) and any(item.source_id == source for item in held.batch.items)
                for held in worker.held
            ):
                break
            self._move(number, 10, 1, None)
        self._interfere(kind, source, 1 - number, flag, self.backfills, fault)
        if worker in self.backfills:
            self._move(number, 10, 3, None)

    def _legacy(self, number: int) -> uuid.UUID | None:
        """Return a source with credentials in clear and no ref; one is made, if there is none."""
        rows = self.book.rows
        if legacy := [one for one, row in sorted(rows.items()) if not row.ref and row.shape == "object"]:
            return pick(legacy, number)
        if bare := [one for one, row in sorted(rows.items()) if not row.ref and not row.leaving]:
            self.write_in_clear(pick(bare, number), "object")
            return pick(bare, number)
        if gone := self.sources(there=False):
            self.add_old(SOURCES.index(pick(gone, number)), number % 2, "object")
            return pick(gone, number)
        return None

    def cleanup_race(self, kind: int, one: int, two: int, flag: bool, fault: Fault | None) -> None:
        """A source has got another ref, a worker is about to erase the old one, and something happens to either."""
        with_ref = [source for source, row in sorted(self.book.rows.items()) if row.ref and not row.leaving]
        if not with_ref or self.paused:
            return
        source, number = pick(with_ref, one), two % 2
        if not any(row.source == source and row.state == "retired" for row in self.seen.refs.values()):
            self.read_a_row(source)
            self.rotate(SOURCES.index(source), None, self._ring(1), None)
        self.pass_grace(source)
        worker, stage = self.cleanups[number], pick(STAGES, two)
        if not flag:
            for _ in range(MOST):
                if worker not in self.cleanups or self.is_closed(worker.new_first):
                    break
                if any(h.stage == stage and any(i.source_id == source for i in h.batch.items) for h in worker.held):
                    break
                self._erase(number, 10, 1, False, None)
        self._interfere(kind, source, 1 - number, flag, self.cleanups, fault)
        if worker in self.cleanups and not self.is_closed(worker.new_first):
            self._erase(number, 10, 3, flag, None)

    def operator_race(self, kind: int, one: int, two: int, flag: bool, fault: Fault | None) -> None:
        """A person has looked at what lies in clear, and decides when something has happened to it."""
        with_ref = [source for source, row in sorted(self.book.rows.items()) if row.ref and not row.leaving]
        if not with_ref:
            return
        source = pick(with_ref, one)
        if not self.book.rows[source].shape:
            self.write_in_clear(source, "string" if two == 11 else "object")
        keep = ("plaintext", "ref", "same")[two % 3]
        if keep == "same":
            self.write_back(source)

        def meanwhile() -> None:
            self._interfere(kind, source, one % 2, flag, self.backfills, None)

        self.decide(source, keep, self._ring(1), fault, meanwhile)

    def _interfere(
        self, kind: int, source: uuid.UUID, other: int, flag: bool, workers: object, fault: Fault | None
    ) -> None:
        """Let something else happen to a source, or to what a worker has leased of it."""
        there, index, is_backfill = source in self.book.rows, SOURCES.index(source), workers is self.backfills
        ring = self._ring(1)

        def overtake() -> None:
            self.lose_leases(1 - other if is_backfill else 3 - other, flag)
            times = kind // 17 % 5
            if is_backfill:
                self._move(other, 10, times, fault)
            else:
                self._erase(other, 10, times, flag, fault)

        def begin_a_run() -> None:
            self._begin_run(False, fault)
            for _ in range(6):
                if self.runs:
                    self.go_on_with_run(0, 100, None)

        def reconcile() -> None:
            self.expire_reservations()
            self.reconcile(other, 10, fault)

        def stale_save() -> None:
            self.save_a_row(1, True, of=source)
            if flag:
                self.repair_named(source, other, fault)

        acts: list[tuple[str, bool, Callable[[], object]]] = [
            ("overtake", True, overtake),
            ("stale save", there and any(one == source for one, _ in self.copies), stale_save),
            ("write in clear", there, lambda: self.write_in_clear(source, "object")),
            ("stale save", there and any(one == source for one, _ in self.copies), stale_save),
            ("write in clear", there and is_backfill, lambda: self.write_in_clear(source, "object")),
            ("rotate", True, lambda: self.rotate(index, None, ring, fault)),
            ("overtake", True, overtake),
            ("name none", there and self.book.rows[source].ref is not None, lambda: self.name_none(source)),
            ("revoke", True, lambda: self.revoke(index, None, fault)),
            ("delete", True, lambda: self.delete(index, None, fault)),
            ("drop", there, lambda: self.drop(source)),
            ("write nothing", there, lambda: self.write_in_clear(source, None)),
            ("mark as leaving", there, lambda: self.mark_as_leaving(source)),
            ("reconcile", True, reconcile),
            ("begin a run", True, begin_a_run),
            ("sweep", True, lambda: self._sweep(other, 100, 9, fault)),
            ("late", True, self._late),
        ]
        possible = [(name, act) for name, can_be, act in acts if can_be]
        name, act = pick(possible, kind)
        note(f"    race: {name}")
        self.reached[f"race: {name}"] += 1
        act()

    def _late(self) -> None:
        if FAULTS.late:
            self.act_late(0)
        elif self._unconfirmed():
            self._confirm_late(0)
        elif self.erased():
            self.write_late(0)

    def repair_named(self, source: uuid.UUID, worker: int, fault: Fault | None) -> None:
        """Look after a source, if it needs that."""
        refs = sorted(self.book.dangling & self.seen.named)
        if source in self.book.rows and self.book.rows[source].ref in refs:
            self.repair(worker, refs.index(self.book.rows[source].ref or ""), fault)

"""The machine: all rules, how an example begins, and what must be true at its end."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from kfs_credentials import operations
from kfs_credentials.pause import resume_workers
from tests.invariants import findings
from tests.keys import OLD_ID
from tests.model.backfills import Worker, wait_for
from tests.model.cleanups import Cleaner
from tests.model.faults import FAULTS
from tests.model.races import Races
from tests.model.world import ALIAS, SOURCES, UNREADABLE, ring

ROUNDS, BATCHES = 12, 30
"""The most rounds that are left to go at the end, and the most batches in each, if all that time brings was brought."""


class Machine(Races):
    """Applications, old ones, workers, operators, time and faults, in any order."""

    @initialize(
        conditions=st.lists(st.sampled_from(["none", "old", "new", "rotated", "string"]), min_size=4, max_size=4)
    )
    def begin(self, conditions: tuple[str, ...]) -> None:
        """Begin with sources in some conditions."""
        for number, condition in enumerate(conditions):
            if condition in ("old", "string"):
                self.add_old(number, number % 2, "object" if condition == "old" else "string")
            elif condition in ("new", "rotated"):
                with self.past():
                    self.need_space(number % 2)
                self.create(number, number % 2, True, False, None)
                if condition == "rotated":
                    self.read_a_row(SOURCES[number])
                    self.rotate(number, None, False, None)

    def teardown(self) -> None:
        """Let all time pass and fresh workers do what is left: everything is final, and nothing is lost."""
        if not self.broken:
            with self._careful():
                self._bring_to_an_end()

    def _bring_to_an_end(self) -> None:
        new_first = self.closed == OLD_ID
        self.deployed = new_first
        with self.past():
            while FAULTS.late:
                self.carry_out(0)
            self.world.expire_leases()
            for source, row in self.book.rows.items():
                self.world.execute("UPDATE sources SET status = 'active' WHERE id = %s", source)
                self.book.rows[source] = replace(row, leaving=False)
        self.step(lambda: resume_workers(ALIAS))
        self.paused = False
        self.ending = True
        self.backfills, self.cleanups = [self.new_backfill()], [self.new_cleanup()]
        (backfill,), (cleanup,) = self.backfills, self.cleanups
        rounds = 0
        while self._retry() | self._move_all(backfill) | self._clean_up(cleanup):
            rounds += 1
            assert rounds < ROUNDS, "it comes to no end"
        self.ending = False
        with self.past():
            pass
        self._check_end()

    def _retry(self) -> bool:
        failed = [(job, None) for job, row in self.seen.jobs.items() if row.state == "failed"]
        if failed:
            self.step(lambda: operations.retry_failed_jobs(ALIAS, failed), new_first=self.deployed)
        return bool(failed)

    def _move_all(self, worker: Worker) -> bool:
        steps = worker.steps
        for batches in range(BATCHES):
            taken = self.backfill_step(worker, lambda: steps.claim(10) or steps.discover(10), None, claims=True).value
            if taken is None:
                return batches > 0
            self.backfill_step(worker, partial(_moved, steps, taken), None, moves=True)
        raise AssertionError("a job is claimed again and again")

    def _clean_up(self, worker: Cleaner) -> bool:
        steps, before = worker.steps, self.seen
        with self.past():
            self.world.expire_reservations()
            self.world.pass_horizon()
        self.cleanup_step(worker, lambda: steps.reconcile(100), None)
        self.begin_sweep(0, None)
        while worker.sweep is not None and not worker.sweep.over:
            self.sweep(0, 100, None)
        while worker.sweep is not None and worker.sweep.to_repair:
            self.repair_what_was_found(0, None)
        self.complete_sweep(0, None)
        with self.past():
            self.world.pass_horizon()
        for _ in range(BATCHES):
            if (taken := self.cleanup_step(worker, lambda: steps.claim(100), None, claims=True).value) is None:
                break
            if taken.items:
                self.cleanup_step(worker, partial(_erased, steps, taken), None)
        else:
            raise AssertionError("a ref is claimed again and again")
        self.begin_patrol(0, None)
        while worker.patrol is not None:
            self.patrol(0, 100, None)
        return [(ref, row.state, row.undated) for ref, row in sorted(before.refs.items())] != [
            (ref, row.state, row.undated) for ref, row in sorted(self.seen.refs.items())
        ]

    def _check_end(self) -> None:
        """As `tests.crashes.scene.Scene.check_cleaned` has it, with what the dictionary says."""
        with ring(new_first=True):
            gone = {row.ref for source, row in self.book.rows.items() if self.world.visible(source) == UNREADABLE}
            found = findings("default", self.world.store)
        # Only what was erased before an old writer brought it back is left as it is: a person has to come.
        self.book.dangling &= {ref for ref in gone if ref is not None}
        assert self.book.unexpected(found, self.seen) == {}
        broken = {source for source, row in self.book.rows.items() if row.ref in gone}
        rest = {}
        for ref, row in self.seen.refs.items():
            if row.state == "active":
                assert ref in self.seen.named or row.source in broken
            elif row.abandoned or ref in gone:
                assert (row.state, row.undated) == ("retired", True)
            elif row.attention == "displaced":
                assert ref in self.book.left, f"{ref} waits for a person, and nobody has displaced it"
                assert row.source in self.book.rows
            elif (row.state, row.undated) != ("deleted", True):
                rest[ref] = row
        assert rest == {}, "not final"
        assert all(job.state == "succeeded" for job in self.seen.jobs.values()), self.seen.jobs
        assert not any(row.ref is None and row.shape == "object" for row in self.book.rows.values())
        expected = {
            self.world.name(ref)
            for ref, row in self.seen.refs.items()
            if row.state == "active" or row.attention == "displaced" or row.abandoned
        }
        there = set(self.world.store.list())
        unknown = {name for name in self.book.late if name not in {self.world.name(ref) for ref in self.seen.refs}}
        assert there - unknown <= expected, "not erased"
        needed = {self.world.name(ref) for ref, row in self.seen.refs.items() if row.state == "active"}
        assert needed <= there, "lost"


def _moved(steps: Any, batch: Any) -> None:
    steps.start_put(batch)
    wait_for(batch)
    steps.finish_put(batch)
    steps.settle(batch)


def _erased(steps: Any, batch: Any) -> None:
    while steps.start_delete(batch):
        wait_for(batch)
        steps.finish_delete(batch)
    steps.settle(batch)

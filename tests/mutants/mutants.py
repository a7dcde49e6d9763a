"""The mistakes: one text of the package, and what stands in its place.

Nearly all of these would do what they should as long as nobody dies, is late, or writes as an old application does. The
model looks at every row after every step; the torture only at the end of a round, and finds what has come of a mistake.
Guards that matter only if something happens within a step, or where a store lies, have tests of their own.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A mistake in one file of the package."""

    name: str
    file: str
    old: str
    new: str
    torture: bool = False
    """Whether the torture has to find it, too."""


MUTANTS = [
    Mutant(
        "backfill: settles what is another's",
        "backfill.py",
        'jobs = self._jobs().fenced(batch.lease).filter(pk__in=ids).order_by("id")',
        'jobs = self._jobs().leased().filter(pk__in=ids).order_by("id")',
    ),
    Mutant(
        "backfill: does not read again under the lock",
        "batch.py",
        "if item.legacy is not None and not source.legacy.same_as(item.legacy):",
        "if False:",
        torture=True,
    ),
    Mutant(
        "backfill: puts under a candidate of another value",
        "batch.py",
        "if ledger != RefState.CANDIDATE or item.put is Put.STALE:",
        "if ledger != RefState.CANDIDATE:",
    ),
    Mutant(
        "backfill: activates without the ledger",
        "sql/backfill/activate.sql",
        "    state = 'active',\n    source_version",
        "    source_version",
        torture=True,
    ),
    Mutant(
        "backfill: a refresh leaves the old candidate",
        "sql/backfill/refresh.sql",
        "  WHERE ledger.credential_ref = job.old_ref\n",
        "  WHERE FALSE AND ledger.credential_ref = job.old_ref\n",
    ),
    Mutant(
        "backfill: moves under a closed key",
        "backfill.py",
        "            closed = refuse_closed(self.using)\n",
        "            closed = frozenset()\n",
    ),
    Mutant(
        "leases: takes over what is not expired",
        "leases.py",
        "return self.leased().filter(lease_expires_at__lte=Now())",
        "return self.leased()",
    ),
    Mutant(
        "leases: gives back what is another's",
        "leases.py",
        "released += self.rows().fenced(lease).free().release()",
        "released += self.rows().leased().filter(worker_id__startswith=self.worker).free().release()",
    ),
    Mutant(
        "cleanup: settles what is another's",
        "cleanup.py",
        "mine = self.refs().fenced(erasure.lease).filter",
        "mine = self.refs().leased().filter",
    ),
    Mutant(
        "cleanup: erases without a second look",
        "cleanup.py",
        "free = [row for row in ids if row not in held]",
        "free = list(ids)",
    ),
    Mutant(
        "cleanup: confirms at once",
        "cleanup.py",
        "horizon = settings.LATE_WRITE_HORIZON if outcome is Outcome.ERASED else None",
        "horizon = None",
    ),
    Mutant(
        "cleanup: confirms what was there again",
        "cleanup.py",
        "            # A late write, if this was to be the confirmation: another horizon for it.\n"
        "            return Outcome.ERASED",
        "            return Outcome.CONFIRMED if item.confirms else Outcome.ERASED",
    ),
    Mutant(
        "cleanup: the patrol leaves late writes",
        "cleanup.py",
        "self.refs().final().filter(pk__in=late).erase_again(EventKind.LATE_WRITE)",
        "pass",
    ),
    Mutant(
        "cleanup: forgets what no patrol has passed",
        "sql/cleanup/purge.sql",
        "    AND ledger.updated_at < patrol.covers_until\n",
        "",
    ),
    Mutant(
        "cleanup: the sweep does not look at the sources",
        "models/ledger.py",
        "return self.filter(~Exists(_naming()), ~Exists(broken), state=RefState.ACTIVE)",
        "return self.filter(state=RefState.ACTIVE)",
    ),
    Mutant(
        "cleanup: the sweep retires beside a broken source",
        "models/ledger.py",
        "return self.filter(~Exists(_naming()), ~Exists(broken), state=RefState.ACTIVE)",
        "return self.filter(~Exists(_naming()), state=RefState.ACTIVE)",
    ),
    Mutant(
        "cleanup: the sweep retires what was displaced",
        "cleanup.py",
        'kept = self.repairs.keep(list(ours.displaced().values_list("pk", flat=True)))',
        "kept = 0",
    ),
    Mutant(
        "cleanup: the sweep leaves what has no date",
        "cleanup.py",
        "[*(row for row in active if row not in named), *undated]",
        "[row for row in active if row not in named]",
    ),
    Mutant(
        "cleanup: takes back what a source names",
        "cleanup.py",
        "set(ids) - named.keys() - live).retire()",
        "set(ids) - live).retire()",
    ),
    Mutant(
        "cleanup: takes back what a live job holds",
        "cleanup.py",
        "set(ids) - named.keys() - live).retire()",
        "set(ids) - named.keys()).retire()",
    ),
    Mutant(
        "repair: brings back what was claimed",
        "repairs.py",
        "if named.state == RefState.RETIRED and not named.claimed:",
        "if named.state == RefState.RETIRED:",
    ),
    Mutant(
        "repair: does not keep what was displaced",
        "repairs.py",
        "return self.refs().filter(pk__in=refs).keep(RefError.DISPLACED)",
        "return self.refs().filter(pk__in=refs).retire()",
        torture=True,
    ),
    Mutant(
        "services: a rotation leaves the old ref",
        "ledger.py",
        "        _retire(using, named, tenant=tenant, space=space, source=source)\n",
        "        pass\n",
    ),
    Mutant(
        "services: a revocation leaves what waits",
        "ledger.py",
        "    let_go(using, waiting)\n    _supersede",
        "    _supersede",
    ),
    Mutant(
        "services: a deletion leaves the refs",
        "services.py",
        "            let_go(using, refs)\n            sources = Source",
        "            sources = Source",
    ),
    Mutant(
        "services: a creation activates without the ledger",
        "services.py",
        "                ledger(self.using).filter(credential_ref=ref).activate(version)\n",
        "                pass\n",
    ),
    Mutant(
        "operators: keep what has changed since they looked",
        "in_clear.py",
        "    if not now.is_what_was_looked_at(found):\n        return Settled.CHANGED\n    point(",
        "    point(",
    ),
    Mutant(
        "cleanup: the sweep retires nothing",
        "cleanup.py",
        "retired, kept = self._let_go([*(row for row in active if row not in named), *undated])",
        "retired, kept = 0, 0",
        torture=True,
    ),
]

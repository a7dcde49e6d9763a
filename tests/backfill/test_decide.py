"""`decide`: each combination of facts, and the one move that is right."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from kfs_credentials.batch import Item, Legacy, Move, Put, SourceNow, decide
from kfs_credentials.models import JobError, RefState
from kfs_credentials.stores import Receipt

REF = "source-secret:v1:5f0c2a7e-3d1b-4c68-9e47-0a51c2d3e4f5"
OTHER_REF = "source-secret:v1:0a51c2d3-3d1b-4c68-9e47-5f0c2a7e0000"
VALUE = Legacy('{"token": "made-up"}')
CHANGED = Legacy('{"token": "another"}')
UNREAD = Legacy(None)


def item(**values: Any) -> Item:
    given = {"legacy": VALUE, "put": Put.STORED, "receipt": Receipt("0" * 16, 19), **values}
    return Item(uuid.uuid4(), "tenant", uuid.uuid4(), uuid.uuid4(), REF, "f" * 64, **given)


def source(ref: str | None = None, legacy: Legacy | None = VALUE) -> SourceNow:
    return SourceNow(3, ref, legacy)


@pytest.mark.parametrize(
    ("given", "ledger", "now", "move", "error"),
    [
        ({}, RefState.CANDIDATE, source(), Move.ACTIVATE, None),
        # The source is somebody else's business by now.
        ({}, RefState.CANDIDATE, source(REF), Move.ADOPT, None),
        ({}, RefState.ACTIVE, source(REF), Move.ADOPT, None),
        ({}, RefState.ACTIVE, source(REF, None), Move.ADOPT, None),
        ({"put": Put.READ}, RefState.ACTIVE, source(REF, None), Move.ADOPT, None),
        # What was not put and not read is read by the next claim: the store may have nothing there.
        ({"put": Put.NOTHING}, RefState.CANDIDATE, source(REF), Move.RELEASE, None),
        ({"put": Put.RETRY, "error": JobError.NOT_AS_SAID}, RefState.CANDIDATE, source(REF), Move.RELEASE, None),
        ({"put": Put.RETRY, "retry_count": 4}, RefState.ACTIVE, source(REF, None), Move.RELEASE, None),
        ({"put": Put.FAILED, "error": JobError.INTEGRITY}, RefState.CANDIDATE, source(REF), Move.RELEASE, None),
        ({"put": Put.STALE}, RefState.CANDIDATE, source(REF), Move.RELEASE, None),
        (
            {"put": Put.MISSING, "error": JobError.TRANSITION_CONFLICT},
            RefState.CANDIDATE,
            source(REF),
            Move.FAIL,
            JobError.TRANSITION_CONFLICT,
        ),
        ({}, RefState.RETIRED, source(REF), Move.ABANDON, None),
        ({}, RefState.CANDIDATE, source(OTHER_REF), Move.ABANDON, None),
        ({}, RefState.CANDIDATE, source(None, None), Move.ABANDON, None),
        # The candidate cannot be used.
        ({}, None, source(), Move.FAIL, JobError.LEDGER_MISSING),
        ({}, RefState.RETIRED, source(), Move.REFRESH, None),
        ({}, RefState.DELETING, source(), Move.REFRESH, None),
        ({}, RefState.DELETED, source(), Move.REFRESH, None),
        ({}, RefState.ACTIVE, source(), Move.REFRESH, None),
        ({"put": Put.STALE}, RefState.CANDIDATE, source(), Move.REFRESH, None),
        # The credentials changed; that comes before whatever became of the old ones.
        ({}, RefState.CANDIDATE, source(None, CHANGED), Move.REFRESH, None),
        ({}, RefState.CANDIDATE, source(None, UNREAD), Move.REFRESH, None),
        ({"put": Put.NOTHING}, RefState.CANDIDATE, source(None, CHANGED), Move.REFRESH, None),
        (
            {"put": Put.FAILED, "error": JobError.TOO_LARGE, "legacy": UNREAD},
            RefState.CANDIDATE,
            source(),
            Move.REFRESH,
            None,
        ),
        ({"retry_count": 3}, RefState.CANDIDATE, source(None, CHANGED), Move.REFRESH, None),
        ({"retry_count": 4}, RefState.CANDIDATE, source(None, CHANGED), Move.FAIL, JobError.UNSTABLE),
        # What the store said.
        ({"put": Put.NOTHING}, RefState.CANDIDATE, source(), Move.RELEASE, None),
        ({"put": Put.NOTHING, "legacy": None}, RefState.CANDIDATE, source(), Move.RELEASE, None),
        ({"put": Put.FAILED, "error": JobError.CONFLICT}, RefState.CANDIDATE, source(), Move.FAIL, JobError.CONFLICT),
        (
            {"put": Put.FAILED, "error": JobError.TOO_LARGE, "legacy": UNREAD},
            RefState.CANDIDATE,
            source(None, UNREAD),
            Move.FAIL,
            JobError.TOO_LARGE,
        ),
        (
            {"put": Put.RETRY, "error": JobError.UNEXPECTED, "retry_count": 3},
            RefState.CANDIDATE,
            source(),
            Move.RETRY,
            JobError.UNEXPECTED,
        ),
        (
            {"put": Put.RETRY, "error": JobError.UNEXPECTED, "retry_count": 4},
            RefState.CANDIDATE,
            source(),
            Move.FAIL,
            JobError.UNEXPECTED,
        ),
    ],
)
def test_move(given: dict[str, Any], ledger: str | None, now: SourceNow, move: Move, error: JobError | None) -> None:
    assert decide(item(**given), ledger, now, locked_elsewhere=False) == (move, error)


@pytest.mark.parametrize("put", list(Put))
def test_a_source_that_is_locked_comes_again_and_one_that_is_gone_does_not(put: Put) -> None:
    assert decide(item(put=put), RefState.CANDIDATE, None, locked_elsewhere=True) == (Move.RELEASE, None)
    assert decide(item(put=put), RefState.CANDIDATE, None, locked_elsewhere=False) == (Move.ABANDON, None)

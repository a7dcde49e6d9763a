"""Applications: processes that call the services, one call after the other, and do again what was not answered.

What one of them was at when it died is done again by the next one, with the same operation id.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from tests.crashes.application import UNANSWERED, answer
from tests.torture.memory import GONE, REVOKED, TENANT, Memory, Value, new_value

TRIES = 20
TRY_AGAIN = (UNANSWERED, "SourceBusy", "StoreUnavailable")
"""Answers after which an application makes the same call again, as a client does; only the first leaves a doubt."""
GIVEN_UP = "OperationOver"
"""What an application is told if its reservation was taken back meanwhile: its call has not taken place."""
OLD_KEYS = "KeyClosed"
"""What a process is told whose first key is closed: it has to be restarted with the new ones."""

CALLS = 40
"""How many calls an application makes, unless it is killed before."""


def perform(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """In a process of its own: make the calls, and print one JSON object for each once it is over.

    It has the answer, and `tries`: how often the call was made. The first one that stays without an answer is the last.
    """
    for function, arguments in calls:
        tries, answered = 1, answer(function, arguments)
        while answered.get("error") in TRY_AGAIN and tries < TRIES:
            tries, answered = tries + 1, answer(function, arguments)
        sys.stdout.write(json.dumps({**answered, "tries": tries}) + "\n")
        sys.stdout.flush()
        if answered.get("error") in (*TRY_AGAIN, OLD_KEYS):
            return


class Planned(NamedTuple):
    """A call that an application is to make. `value`: what the source must be afterwards; None if nothing changes."""

    function: str
    arguments: dict[str, Any]
    space: str
    source: str | None
    value: Value | None
    again: bool = False
    """Whether another process died over it."""


class Application:
    """One of them: its spaces, its plan, and what became of it.

    `calls`: how many it makes. `again`: the first of them, over which another one died.
    """

    def __init__(self, memory: Memory, spaces: Sequence[str], again: Planned | None, calls: int) -> None:
        self.memory = memory
        self.spaces = list(spaces)
        self.sources = {space: set(memory.spaces[space]) for space in spaces}
        self.calls = [again._replace(again=True)] if again else []
        self.in_doubt: Planned | None = None
        self.acknowledged = 0
        self.tried_again = 0
        self.refused = 0
        memory.free.difference_update(spaces)
        self.own = set(spaces) - memory.shared
        if again is not None:
            self._expect(again)
        while len(self.calls) < calls and self.sources:
            self.calls.append(self._plan())

    def _expect(self, call: Planned) -> None:
        """Count on a call that is made again."""
        if call.source is None:
            del self.sources[call.space]
        elif call.value == GONE:
            self.sources[call.space].discard(call.source)
        else:
            self.sources[call.space].add(call.source)

    @property
    def order(self) -> list[tuple[str, dict[str, Any]]]:
        """The calls as `perform` takes them."""
        return [(call.function, call.arguments) for call in self.calls]

    def settle(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Note what became of the calls, once the process is over, and give back the spaces.

        The call that was under way is `in_doubt`, and its space stays taken until it was made again.
        """
        for call, answered in zip(self.calls, answers, strict=False):
            self._note(call, answered)
        if self.in_doubt is None and len(answers) < len(self.calls) and not self._has_left(answers):
            self.in_doubt = self.calls[len(answers)]
        if self.in_doubt is not None and self.in_doubt.value is None:
            self.in_doubt = None  # nothing is changed by looking
        if self.in_doubt is not None:
            self._may_become(self.in_doubt.source, self.in_doubt.value)
        kept = self.in_doubt.space if self.in_doubt else None
        self.memory.free |= {space for space in self.own if space in self.memory.spaces and space != kept}

    def _has_left(self, answers: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether it went by itself, before it had made all its calls."""
        return bool(answers) and answers[-1].get("error") in (*TRY_AGAIN, OLD_KEYS)

    def _note(self, call: Planned, answered: Mapping[str, Any]) -> None:
        error, tries = answered.get("error"), answered["tries"]
        self.tried_again += tries - 1 + call.again
        repeated = tries > 1 or call.again
        if error in TRY_AGAIN or (error == OLD_KEYS and repeated):
            self.in_doubt = call  # an earlier try may have been carried out
        elif call.function == "resolve_credentials":
            if error != OLD_KEYS:
                self.memory.saw(call.source, error or answered["credentials"]["token"])
        elif error is None or (repeated and self._says_that_it_is_gone(call, error)):
            self._take_place(call)
            self.acknowledged += 1
        else:
            self._refuse(call, error)

    def _says_that_it_is_gone(self, call: Planned, error: str) -> bool:
        """Return whether a deletion was refused since an earlier try has taken place."""
        if call.source is None:
            return error == "SpaceNotFound"
        return call.value == GONE and error == GONE and call.source in self.memory.sources

    def _take_place(self, call: Planned) -> None:
        memory = self.memory
        if call.source is None:
            memory.forget_space(call.space)
        elif call.function == "create_source":
            memory.add(call.source, call.space, call.value or "")
        elif call.source not in memory.sources:
            memory.lost.append(f"{call.function} of source {call.source}, which nobody has made, was carried out")
        elif call.value == GONE:
            memory.forget(call.source)
        else:
            known = memory.sources[call.source]
            known.becomes(call.value or "")

    def _refuse(self, call: Planned, error: str) -> None:
        """Whatever is refused has not taken place; and nothing is refused for a source that is there."""
        self.refused += 1
        known = None if call.source is None else self.memory.sources.get(call.source)
        if error in (GIVEN_UP, OLD_KEYS):
            return
        if error == GONE and (known is None or GONE in known.may_be):
            return
        if error == REVOKED and known is not None and REVOKED in known.may_be:
            return
        self.memory.lost.append(f"{call.function} of source {call.source} was refused: {error}")

    # What it is to do, chosen at random beforehand.

    def _plan(self) -> Planned:
        space = random.choice(list(self.sources))
        sources = self.sources[space]
        kinds = ["create", "rotate", "resolve", "revoke", "delete", "delete_space"]
        kind = random.choices(kinds, [25, 33, 25, 5, 10, 2 if space in self.own else 0])[0] if sources else "create"
        if kind == "create":
            return self._create(space)
        if kind == "delete_space":
            del self.sources[space]
            return Planned("delete_knowledge_space", {"tenant": TENANT, "space_id": space}, space, None, GONE)
        source = random.choice(sorted(sources))
        arguments: dict[str, Any] = {"tenant": TENANT, "source_id": source}
        if kind == "resolve":
            return Planned("resolve_credentials", arguments, space, source, None)
        value = {"rotate": new_value(), "revoke": REVOKED, "delete": GONE}[kind]
        self._may_become(source, value)
        if kind == "rotate":
            arguments |= {"credentials": {"token": value}, "operation_id": str(uuid4())}
            return Planned("rotate_credentials", arguments, space, source, value)
        if kind == "revoke":
            return Planned("revoke_credentials", arguments, space, source, value)
        sources.discard(source)
        return Planned("delete_source", arguments, space, source, value)

    def _may_become(self, source: str | None, value: Value | None) -> None:
        """Note of a shared source what it may be from now on, whether the call takes place or not."""
        known = self.memory.sources.get(source or "")
        if known is not None and known.shared and value is not None:
            known.becomes(value)

    def _create(self, space: str) -> Planned:
        source, value = str(uuid4()), new_value()
        self.sources[space].add(source)
        arguments = {
            "tenant": TENANT,
            "space_id": space,
            "source_id": source,
            "operation_id": str(uuid4()),
            "type": "online_drive",
            "name": "Made up",
            "uri": "",
            "credentials": {"token": value},
        }
        return Planned("create_source", arguments, space, source, value)

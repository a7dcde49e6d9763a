"""No error takes a value along: not in its text, not in what led to it, not in a variable of our frames.

An error tracker goes through the variables of every frame and writes down their repr; so do these tests.
"""

from __future__ import annotations

import datetime as dt
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.views.debug import ExceptionReporter

import kfs_credentials
from kfs_credentials.crypto import (
    Credentials,
    KeyRing,
    Plaintext,
    Scope,
    canonical_json,
    envelope_key_id,
    fingerprint,
    fingerprint_matches,
    key_id,
    new_ref,
    parse_json,
    parse_key,
    seal,
    sensitive,
    unseal,
)
from kfs_credentials.crypto.envelope import _to_base64url

from .test_envelope import NEW, RING, SCOPE, changed, sealed
from .test_envelope import REF as SEALED_REF

if TYPE_CHECKING:
    from types import TracebackType

CANARY = "canary-2f6c9e"
KEY = (CANARY * 3)[:32].encode()
REF = new_ref()
PACKAGE = str(Path(kfs_credentials.__file__).parent)

GOOD = {"password": CANARY, "n": 1.5}
NESTED = {"password": CANARY, "list": [[CANARY], {"deep": {"deeper": CANARY, "date": dt.date.min}}]}
BLOB = seal(RING, SCOPE, REF, GOOD)


class Failing(Mapping[str, Any]):
    """A mapping that fails while it is read, as one that is lazy may."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        yield "password"

    def __len__(self) -> int:
        return 1

    def items(self) -> Any:
        yield "password", CANARY
        raise RuntimeError("connection lost")


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("connection lost")

    __hash__ = None  # type: ignore[assignment]


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"password": CANARY}
    for _ in range(levels):
        value = {"password": CANARY, "a": value}
    return value


FAILURES: dict[str, Callable[[], object]] = {
    "canonical_json: type": lambda: canonical_json(NESTED),
    "canonical_json: type, exact": lambda: canonical_json(NESTED, exact=True),
    "canonical_json: NaN": lambda: canonical_json({"password": CANARY, "n": float("nan")}),
    "canonical_json: key": lambda: canonical_json({"password": CANARY, 1: CANARY}),
    "canonical_json: keys": lambda: canonical_json({"\ud83d\ude00": CANARY, "😀": CANARY}),
    "canonical_json: digits": lambda: canonical_json({"password": CANARY, "n": 10**140000}),
    "canonical_json: depth": lambda: canonical_json(deep(600)),
    "canonical_json: stack": lambda: canonical_json(deep(5000)),
    "canonical_json: foreign error": lambda: canonical_json(Failing()),
    "parse_json: text": lambda: parse_json(f'{{"password":"{CANARY}"'),
    "parse_json: trailing": lambda: parse_json(f'{{"password":"{CANARY}"}}x'),
    "parse_json: NaN": lambda: parse_json(f'{{"password":"{CANARY}","n":NaN}}'),
    "parse_json: digits": lambda: parse_json(f'{{"password":"{CANARY}","n":1e999999}}'),
    "parse_json: long integer": lambda: parse_json(f'{{"password":"{CANARY}","n":{"1" * 140000}}}'),
    "parse_json: UTF-8": lambda: parse_json(f'{{"password":"{CANARY}'.encode() + b'\xff"}'),
    "parse_json: depth": lambda: parse_json('{"password":"' + CANARY + '","a":' + "[" * 100_000),
    "parse_json: type": lambda: parse_json([CANARY]),  # type: ignore[arg-type]
    "Plaintext: type": lambda: Plaintext.of([CANARY]),  # type: ignore[arg-type]
    "Plaintext: digits": lambda: Plaintext.of({"password": CANARY, "n": 10**140000}),
    "Credentials: type": lambda: Credentials(CANARY),  # type: ignore[arg-type]
    "Credentials: member": lambda: Credentials(NESTED),
    "Credentials: missing": lambda: Credentials(GOOD)["missing"],
    "Credentials: foreign error": lambda: Credentials(GOOD) == Failing(),
    "Credentials: comparison": lambda: Credentials(GOOD) == {"password": CANARY, "n": Incomparable()},
    "fingerprint: type": lambda: fingerprint(RING, SCOPE, CANARY),  # type: ignore[arg-type]
    "fingerprint: member": lambda: fingerprint(RING, SCOPE, NESTED),
    "fingerprint: ring": lambda: fingerprint(None, SCOPE, GOOD),  # type: ignore[arg-type]
    "fingerprint: scope": lambda: fingerprint(RING, None, GOOD),  # type: ignore[arg-type]
    "fingerprint_matches: member": lambda: fingerprint_matches(RING, SCOPE, NESTED, "0" * 64),
    "fingerprint_matches: fingerprint": lambda: fingerprint_matches(RING, SCOPE, GOOD, None),  # type: ignore[arg-type]
    "seal: ref": lambda: seal(RING, SCOPE, CANARY, GOOD),
    "seal: limit": lambda: seal(RING, SCOPE, REF, GOOD, max_bytes=0),
    "seal: type": lambda: seal(RING, SCOPE, REF, [CANARY]),  # type: ignore[arg-type]
    "seal: member": lambda: seal(RING, SCOPE, REF, NESTED),
    "seal: too large": lambda: seal(RING, SCOPE, REF, GOOD, max_bytes=5),
    "seal: ring": lambda: seal(None, SCOPE, REF, GOOD),  # type: ignore[arg-type]
    "seal: scope": lambda: seal(RING, None, REF, GOOD),  # type: ignore[arg-type]
    "seal: foreign error": lambda: seal(RING, SCOPE, REF, Failing()),
    "unseal: plaintext instead of an envelope": lambda: unseal(RING, SCOPE, REF, f'{{"password":"{CANARY}"}}'.encode()),
    "unseal: envelope": lambda: unseal(RING, SCOPE, REF, changed(BLOB, iv=CANARY)),
    "unseal: too large": lambda: unseal(RING, SCOPE, REF, BLOB, max_bytes=5),
    "unseal: key": lambda: unseal(KeyRing([KEY]), SCOPE, REF, BLOB),
    "unseal: scope": lambda: unseal(RING, Scope("t", "k", "s"), REF, BLOB),
    "unseal: tag": lambda: unseal(RING, SCOPE, REF, changed(BLOB, tag=_to_base64url(bytes(16)))),
    "unseal: not JSON": lambda: unseal_other(f'{{"password":"{CANARY}"'),
    "unseal: not an object": lambda: unseal_other(f'["{CANARY}"]'),
    "unseal: member": lambda: unseal_other(f'{{"password":"{CANARY}","n":NaN}}'),
    "unseal: depth": lambda: unseal_other(f'{{"password":"{CANARY}","n":' + "[" * 600 + "]" * 600 + "}"),
    "unseal: fingerprint": lambda: unseal_other(f'{{"password":"{CANARY}"}}'),
    "envelope_key_id: envelope": lambda: envelope_key_id(f'{{"password":"{CANARY}"}}'.encode()),
    "parse_key: length": lambda: parse_key(f"{CANARY}=="),
    "parse_key: alphabet": lambda: parse_key(CANARY + "!" * 31),
    "parse_key: type": lambda: parse_key([CANARY]),  # type: ignore[arg-type]
    "key_id: length": lambda: key_id(KEY[1:]),
    "key_id: type": lambda: key_id(KEY.decode()),  # type: ignore[arg-type]
    "KeyRing: length": lambda: KeyRing([NEW, KEY[1:]]),
    "KeyRing: type": lambda: KeyRing([KEY.decode()]),  # type: ignore[list-item]
    "KeyRing: twice": lambda: KeyRing([KEY, KEY]),
    "KeyRing: no list": lambda: KeyRing(KEY),  # type: ignore[arg-type]
}


def unseal_other(plaintext: str) -> Credentials:
    return unseal(RING, SCOPE, SEALED_REF, sealed(plaintext.encode()))


def shown(value: object, levels: int = 5, repr_of: Callable[[object], str] = repr) -> Iterator[str]:
    """Give the repr of a value, and of whatever can be reached from it: members, attributes, slots.

    Of what is there at one moment: another thread may be at work on it.
    """
    try:
        yield repr_of(value)
    except Exception as error:  # noqa: BLE001 - as trackers know: a queryset's asks the database
        yield f"<its repr fails: {type(error).__name__}>"
    if levels == 0:
        return
    if isinstance(value, dict):
        for key, member in list(value.items()):
            yield from shown(key, levels - 1, repr_of)
            yield from shown(member, levels - 1, repr_of)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in list(value):
            yield from shown(item, levels - 1, repr_of)
    elif not isinstance(value, type):
        for member in list(getattr(value, "__dict__", {}).values()):
            yield from shown(member, levels - 1, repr_of)
        for slot in getattr(type(value), "__slots__", ()):
            if hasattr(value, slot):
                yield from shown(getattr(value, slot), levels - 1, repr_of)


def frames(found: TracebackType | None) -> Iterator[Any]:
    while found:
        yield found.tb_frame
        found = found.tb_next


@pytest.mark.parametrize("name", FAILURES)
def test_no_error_takes_a_value_along(name: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what the other tests look at
        FAILURES[name]()
    error = caught.value

    assert error.__cause__ is None
    assert error.__context__ is None
    for text in (str(error), repr(error), *map(repr, error.args), *shown(vars(error))):
        assert CANARY not in text
    # The frames of this module are the caller's. All below must be clean, those of libraries too.
    below = [frame for frame in frames(error.__traceback__) if frame.f_code.co_filename != __file__]
    assert any(frame.f_code.co_filename.startswith(PACKAGE) for frame in below)
    for frame in below:
        for text in shown(frame.f_locals):
            assert CANARY not in text, frame.f_code


def test_the_walk_sees_what_it_has_to() -> None:
    class Holder:
        __slots__ = ("slot",)

        def __init__(self) -> None:
            self.slot = [CANARY]

        def __repr__(self) -> str:
            return "nothing"

    for value in ({"a": [(CANARY,)]}, Holder(), [{"x": Holder()}]):
        assert any(CANARY in text for text in shown(value))


def test_secrets_show_nothing_to_the_walk() -> None:
    ring = KeyRing([KEY])
    for secret in (Credentials(GOOD), Plaintext.of(GOOD), unseal(RING, SCOPE, REF, BLOB)):
        assert not any(CANARY in text for text in shown({"secret": [secret]}))
    assert not any(CANARY in text for text in shown([ring, ring.primary]))


def test_the_lines_of_code_stay_in_the_traceback() -> None:
    with pytest.raises(RuntimeError, match="connection lost") as caught:
        canonical_json(Failing())
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]

    assert names[-2:] == ["_sorted_members", "items"]


def test_djangos_error_report_shows_nothing_while_the_function_runs() -> None:
    reports = []

    @sensitive
    def work(password: str) -> None:
        token = password * 2
        try:
            json.loads(token)
        except ValueError as error:
            reports.append(ExceptionReporter(None, type(error), error, error.__traceback__))

    work(CANARY)
    frame = next(frame for frame in reports[0].get_traceback_frames() if frame["function"] == "work")
    assert {"password", "token"} <= {name for name, _ in frame["vars"]}
    assert not any(CANARY in str(value) for _, value in frame["vars"])

"""The settings: one dictionary, `KFS_CREDENTIALS`, typed and read lazily.

Each attribute of `settings` below is read from Django's settings whenever it is asked for, so that a change
(in a test, or by a reload) takes effect at once and importing this package needs no settings at all.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from django.conf import settings as django_settings

from kfs_credentials.crypto import KeyRing, parse_key, sensitive
from kfs_credentials.crypto.keys import HOW_TO_MAKE_ONE, KEY_BYTES
from kfs_credentials.errors import InvalidKey, InvalidSetting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = "KFS_CREDENTIALS"

T = TypeVar("T")


class Setting(Generic[T]):
    """One entry of the dictionary: a default, and how its value is read.

    Reading raises `InvalidSetting` with the setting's name and what was expected, never with the value.
    """

    def __init__(self, default: T, read: Callable[[Any], T], expects: str, help_text: str) -> None:
        self.default = default
        self.read = read
        self.expects = expects
        self.help_text = help_text
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, instance: Settings, owner: type) -> T: ...
    def __get__(self, instance: Settings | None, owner: type) -> Setting[T] | T:
        if instance is None:
            return self
        given = instance.given()
        if self.name not in given:
            return self.default
        with suppress(TypeError, ValueError, ArithmeticError):
            return self.read(given[self.name])
        # Keys and passwords are among the settings, so the error takes neither this variable along nor the
        # one that was suppressed, which may quote the value.
        del given
        raise InvalidSetting(f"{NAME}['{self.name}'] must be {self.expects}.")


def whole_number(default: int, help_text: str, *, minimum: int = 1) -> Setting[int]:
    """Return a setting that is an int, not below `minimum`."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError
        return value

    return Setting(default, read, f"a whole number, {minimum} or more", help_text)


def duration(default: float, help_text: str, *, zero: bool = True) -> Setting[float]:
    """Return a setting that is a number of seconds or a timedelta, read as seconds; above 0 unless `zero`."""

    def read(value: Any) -> float:
        seconds = _number(value.total_seconds() if isinstance(value, timedelta) else value)
        if seconds < 0 or not (seconds or zero):
            raise ValueError
        return seconds

    least = ", 0 or more" if zero else " above 0"
    return Setting(default, read, f"a number of seconds{least}, or a timedelta", help_text)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _rate(value: Any) -> float | None:
    if value is None:
        return None
    rate = _number(value)
    if rate <= 0:
        raise ValueError
    return rate


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _keys(value: Any) -> tuple[str | bytes, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError
    if not all(isinstance(key, str | bytes) for key in value):
        raise TypeError
    return tuple(value)


def _stores(value: Any) -> dict[str, Mapping[str, Any]]:
    if not isinstance(value, Mapping):
        raise TypeError
    for alias, store in value.items():
        if not isinstance(alias, str) or not isinstance(store, Mapping):
            raise TypeError
        if not isinstance(store.get("BACKEND"), str):
            raise TypeError
    return dict(value)


DAY = 86400.0


class Settings:
    """The settings of this package; read an attribute to read a setting."""

    KEYS = Setting[tuple[str | bytes, ...]](
        (),
        _keys,
        "a list of keys (32 bytes each, as bytes, 64 hex digits or base64)",
        "The key ring. The first key encrypts, all of them decrypt.",
    )
    STORES = Setting[dict[str, Mapping[str, Any]]](
        {},
        _stores,
        "a dictionary of aliases, each with a BACKEND and, if needed, OPTIONS",
        "The secret stores, as in CACHES and STORAGES. 'default' is the one in use.",
    )
    ENVIRONMENT = Setting(
        "",
        _text,
        "a text",
        "A name of this deployment, which a copy of the whole server does not have: 'production'.",
    )
    MAX_SECRET_BYTES = whole_number(65536, "The largest secret, in bytes.", minimum=2)
    BATCH_SIZE = whole_number(500, "The most rows that one lease covers.")
    BATCH_BYTES = whole_number(8 * 1024 * 1024, "The most bytes of credentials in one batch.")
    STORE_THREADS = whole_number(8, "Threads that talk to the store.")
    STORE_TIMEOUT = duration(20.0, "The total deadline of one call to the store.", zero=False)
    LEASE = duration(60.0, "How long a claim holds without being renewed.", zero=False)
    MAX_ATTEMPTS = whole_number(5, "Attempts before a job has failed.")
    RETRY_BASE = duration(10.0, "The delay before the first retry; it doubles from there.")
    RETRY_MAX = duration(600.0, "The longest delay before a retry.")
    POLL_INTERVAL = duration(5.0, "How long an idle worker waits before it looks again.")
    RECOVER_AFTER = duration(300.0, "When an unused reservation may be taken back.")
    ERASE_GRACE = duration(600.0, "How long a retired secret stays readable.")
    LATE_WRITE_HORIZON = duration(
        900.0, "How long after an erasure a stalled writer may still write; then the erasure is repeated."
    )
    PARK_AFTER = whole_number(20, "Failed erasures before a row is parked.")
    LEDGER_RETENTION = duration(90 * DAY, "How long final ledger rows are kept.")
    EVENT_RETENTION = duration(400 * DAY, "How long events are kept.")
    LOCK_TIMEOUT = duration(5.0, "How long our transactions wait for a row lock.", zero=False)
    RATE_LIMIT = Setting[float | None](
        None, _rate, "None, or a number of secrets a second above 0", "Secrets a second, per worker."
    )
    LEGACY_READS = Setting(
        default=True,
        read=_boolean,
        expects="True or False",
        help_text="Whether plaintext in the database may be read.",
    )

    def __init__(self) -> None:
        self._overrides: dict[str, Any] = {}

    def given(self) -> Mapping[str, Any]:
        """Return the dictionary as the project gives it; raises `InvalidSetting` if it is none."""
        given = getattr(django_settings, NAME, {})
        if isinstance(given, Mapping):
            return {**given, **self._overrides} if self._overrides else given
        del given  # it may be the keys, and the error would take it along
        raise InvalidSetting(f"{NAME} must be a dictionary.")

    @contextmanager
    def overridden(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Let these values stand above the project's, in this process: what a command says for one run."""
        before, self._overrides = self._overrides, {**self._overrides, **values}
        try:
            yield
        finally:
            self._overrides = before

    @classmethod
    def all(cls) -> dict[str, Setting[Any]]:
        """Return every setting by name, in the order of this class."""
        return {name: value for name, value in vars(cls).items() if isinstance(value, Setting)}

    def problems(self) -> list[str]:
        """Return what is wrong with the dictionary, one sentence each; empty if nothing is."""
        try:
            given = self.given()
        except InvalidSetting as error:
            return [str(error)]
        found = []
        for name in given:
            if name not in self.all():
                close = difflib.get_close_matches(str(name), self.all(), n=1)
                hint = f" Did you mean '{close[0]}'?" if close else ""
                found.append(f"{NAME} has no setting '{name}'.{hint}")
        for name in self.all():
            try:
                getattr(self, name)
            except InvalidSetting as error:
                found.append(str(error))
        if not found and self.MAX_SECRET_BYTES > self.BATCH_BYTES:
            found.append(f"{NAME}['MAX_SECRET_BYTES'] must not be above {NAME}['BATCH_BYTES'].")
        if not found and self.RETRY_BASE > self.RETRY_MAX:
            found.append(f"{NAME}['RETRY_BASE'] must not be above {NAME}['RETRY_MAX'].")
        return found


settings = Settings()


EXAMPLE_KEYS = frozenset({bytes.fromhex("00112233445566778899aabbccddeeff" * 2)})
"""The key that README shows. It is public, so it is refused."""


def key_ring() -> KeyRing:
    """Return the ring of the keys in the settings; the first one encrypts, all of them decrypt.

    Raises `InvalidKey` if there is no key, or one is malformed, of the wrong length, given twice, or the
    example of the README. The message says which one by its place in the list, never what it is. Raises
    `InvalidSetting` if the keys are not a list.
    """
    return _key_ring(settings.KEYS)


@lru_cache(maxsize=4)
@sensitive
def _key_ring(given: tuple[str | bytes, ...]) -> KeyRing:
    if not given:
        raise InvalidKey(f"{NAME}['KEYS'] is empty: there is nothing to encrypt with; {HOW_TO_MAKE_ONE}.")
    keys: list[bytes] = []
    for place, text in enumerate(given, start=1):
        where = f"{NAME}['KEYS'], key {place} of {len(given)}"
        try:
            key = text if isinstance(text, bytes) and len(text) == KEY_BYTES else parse_key(_as_text(text))
        except InvalidKey as error:
            raise InvalidKey(f"{where}: {error}") from None
        if key in keys:
            raise InvalidKey(f"{where} is the same as key {keys.index(key) + 1}: remove one.")
        if key in EXAMPLE_KEYS:
            raise InvalidKey(f"{where} is the example of the README, which is no secret; {HOW_TO_MAKE_ONE}.")
        keys.append(key)
    return KeyRing(keys)


def _as_text(key: str | bytes) -> str:
    return key.decode("ascii", "replace") if isinstance(key, bytes) else key

"""The settings: defaults, what is accepted, what is refused and how that is said."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from kfs_credentials.conf import Setting, Settings, key_ring, settings
from kfs_credentials.crypto import key_id
from kfs_credentials.errors import InvalidKey, InvalidSetting
from tests.crypto.test_leaks import frames, shown

CANARY = "canary-c01d5e"
DAY = 86400
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
EXAMPLE = "00112233445566778899aabbccddeeff" * 2

DEFAULTS: dict[str, Any] = {
    "KEYS": (),
    "STORES": {},
    "ENVIRONMENT": "",
    "MAX_SECRET_BYTES": 65536,
    "BATCH_SIZE": 500,
    "BATCH_BYTES": 8 * 1024 * 1024,
    "STORE_THREADS": 8,
    "STORE_TIMEOUT": 20,
    "LEASE": 60,
    "MAX_ATTEMPTS": 5,
    "RETRY_BASE": 10,
    "RETRY_MAX": 600,
    "POLL_INTERVAL": 5,
    "RECOVER_AFTER": 300,
    "ERASE_GRACE": 600,
    "LATE_WRITE_HORIZON": 900,
    "PARK_AFTER": 20,
    "LEDGER_RETENTION": 90 * DAY,
    "EVENT_RETENTION": 400 * DAY,
    "LOCK_TIMEOUT": 5,
    "RATE_LIMIT": None,
    "LEGACY_READS": True,
}
WHOLE_NUMBERS = ["MAX_SECRET_BYTES", "BATCH_SIZE", "BATCH_BYTES", "STORE_THREADS", "MAX_ATTEMPTS", "PARK_AFTER"]
ABOVE_ZERO = ["STORE_TIMEOUT", "LEASE", "LOCK_TIMEOUT"]
# Here 0 means at once.
FROM_ZERO = [
    *["RETRY_BASE", "RETRY_MAX", "POLL_INTERVAL", "RECOVER_AFTER", "ERASE_GRACE", "LATE_WRITE_HORIZON"],
    *["LEDGER_RETENTION", "EVENT_RETENTION"],
]


def get(name: str, value: Any) -> Any:
    with override_settings(KFS_CREDENTIALS={name: value}):
        return getattr(settings, name)


def refused(name: str, value: Any, expects: str) -> None:
    """Assert that the value is refused, and that nothing of the error shows it."""
    with pytest.raises(InvalidSetting) as caught, override_settings(KFS_CREDENTIALS={name: value}):
        getattr(settings, name)
    error = caught.value
    assert str(error) == f"KFS_CREDENTIALS['{name}'] must be {expects}."
    assert isinstance(error, ImproperlyConfigured)
    assert (error.__cause__, error.__context__) == (None, None)
    no_variable_shows_it(error)


def no_variable_shows_it(error: BaseException) -> None:
    below = [frame for frame in frames(error.__traceback__) if frame.f_code.co_filename != __file__]
    assert below
    for frame in below:
        for text in shown(frame.f_locals):
            assert CANARY not in text, frame.f_code


def test_the_defaults() -> None:
    with override_settings(KFS_CREDENTIALS={}):
        assert {name: getattr(settings, name) for name in Settings.all()} == DEFAULTS
    assert list(Settings.all()) == list(DEFAULTS)
    for setting in Settings.all().values():
        assert isinstance(setting, Setting)
        assert setting.help_text.endswith(".")


def test_the_dictionary_may_be_missing(settings: Any) -> None:
    del settings.KFS_CREDENTIALS
    assert Settings().BATCH_SIZE == 500


@pytest.mark.parametrize("given", [None, "KEYS", [(CANARY, 1)], 7])
def test_the_dictionary_must_be_one(given: Any) -> None:
    with override_settings(KFS_CREDENTIALS=given):
        with pytest.raises(InvalidSetting, match=r"^KFS_CREDENTIALS must be a dictionary\.$") as caught:
            settings.LEASE  # noqa: B018 - reading it is the test
        assert settings.problems() == ["KFS_CREDENTIALS must be a dictionary."]
    no_variable_shows_it(caught.value)


# What is accepted and refused.


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_whole_numbers(name: str) -> None:
    least = 2 if name == "MAX_SECRET_BYTES" else 1
    assert (get(name, least), get(name, 10**9)) == (least, 10**9)
    for value in (least - 1, -1, True, 2.0, "2", CANARY, None, Decimal(2), float("nan"), [2]):
        refused(name, value, f"a whole number, {least} or more")


@pytest.mark.parametrize("name", [*ABOVE_ZERO, *FROM_ZERO])
def test_durations(name: str) -> None:
    value: Any
    for value in (1, 1.5, Decimal("1.5"), 10**9, timedelta(minutes=2, milliseconds=5)):
        seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
        assert get(name, value) == seconds
        assert type(get(name, value)) is float
    zeros = (0, 0.0, timedelta(0))
    if name in FROM_ZERO:
        assert [get(name, zero) for zero in zeros] == [0, 0, 0]
        expects = "a number of seconds, 0 or more, or a timedelta"
    else:
        expects = "a number of seconds above 0, or a timedelta"
        for zero in zeros:
            refused(name, zero, expects)
    for value in (-1, -0.001, timedelta(seconds=-1), True, "5", CANARY, None, float("nan"), float("inf"), 10**400):
        refused(name, value, expects)


def test_the_rate_limit() -> None:
    assert (get("RATE_LIMIT", None), get("RATE_LIMIT", 0.5), get("RATE_LIMIT", 100)) == (None, 0.5, 100.0)
    for value in (0, -1, True, "5", CANARY, timedelta(seconds=5), float("inf")):
        refused("RATE_LIMIT", value, "None, or a number of secrets a second above 0")


def test_legacy_reads() -> None:
    assert (get("LEGACY_READS", value=True), get("LEGACY_READS", value=False)) == (True, False)
    for value in (0, 1, "True", CANARY, None):
        refused("LEGACY_READS", value, "True or False")


def test_keys_are_a_list_of_texts_or_bytes() -> None:
    value: Any
    for value in ([], ["a" * 64], ("a" * 64, KEY)):
        assert get("KEYS", value) == tuple(value)
    # One text would be a list of letters; and an environment variable that is not set gives None.
    for value in (None, CANARY, CANARY.encode(), [None], [CANARY, None], [CANARY, 7], {CANARY: CANARY}, {CANARY}):
        refused("KEYS", value, "a list of keys (32 bytes each, as bytes, 64 hex digits or base64)")


def test_stores_are_a_dictionary_of_backends() -> None:
    value: Any
    stores = {"default": {"BACKEND": "a.B"}, "other": {"BACKEND": "a.B", "OPTIONS": {"x": 1}}}
    assert get("STORES", stores) == stores
    for value in (None, [], "a.B", {"default": "a.B"}, {"default": {}}, {1: {"BACKEND": "a.B"}}):
        refused("STORES", value, "a dictionary of aliases, each with a BACKEND and, if needed, OPTIONS")
    for store in ({"OPTIONS": {"token": CANARY}}, {"BACKEND": None, "OPTIONS": {"token": CANARY}}):
        expects = "a dictionary of aliases, each with a BACKEND and, if needed, OPTIONS"
        refused("STORES", {"default": store}, expects)


# When they are read.


def test_a_change_takes_effect_at_once(kfs_settings: Callable[..., None]) -> None:
    kfs_settings(LEASE=7)
    assert settings.LEASE == 7
    with override_settings(KFS_CREDENTIALS={"LEASE": 8}):
        assert settings.LEASE == 8
    assert settings.LEASE == 7


def test_overridden_values_stand_above_the_projects_for_a_while(kfs_settings: Callable[..., None]) -> None:
    kfs_settings(LEASE=7, BATCH_SIZE=9)
    with settings.overridden({"LEASE": 1}):
        assert (settings.LEASE, settings.BATCH_SIZE) == (1, 9)
        with settings.overridden({"LEASE": 2, "BATCH_SIZE": 3}):
            assert (settings.LEASE, settings.BATCH_SIZE) == (2, 3)
        with settings.overridden({"LEASE": -1}), pytest.raises(InvalidSetting, match=r"\['LEASE'\] must be"):
            settings.LEASE  # noqa: B018 - reading it is the test
        assert (settings.LEASE, settings.BATCH_SIZE) == (1, 9)
    with pytest.raises(LookupError), settings.overridden({"LEASE": 3}):
        raise LookupError
    assert (settings.LEASE, settings.BATCH_SIZE) == (7, 9)


# All that is wrong, at once.


def test_problems_are_found_all_at_once() -> None:
    given = {"LEASE": -1, "BATCH_SIZE": "many", "LEASES": 5, "KEYS": CANARY, "STORE": {}, "what": CANARY, 7: 7}
    with override_settings(KFS_CREDENTIALS=given):
        assert settings.problems() == [
            "KFS_CREDENTIALS has no setting 'LEASES'. Did you mean 'LEASE'?",
            "KFS_CREDENTIALS has no setting 'STORE'. Did you mean 'STORES'?",
            "KFS_CREDENTIALS has no setting 'what'.",
            "KFS_CREDENTIALS has no setting '7'.",
            ("KFS_CREDENTIALS['KEYS'] must be a list of keys (32 bytes each, as bytes, 64 hex digits or base64)."),
            "KFS_CREDENTIALS['BATCH_SIZE'] must be a whole number, 1 or more.",
            "KFS_CREDENTIALS['LEASE'] must be a number of seconds above 0, or a timedelta.",
        ]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"MAX_SECRET_BYTES": 101, "BATCH_BYTES": 100},
            "KFS_CREDENTIALS['MAX_SECRET_BYTES'] must not be above KFS_CREDENTIALS['BATCH_BYTES'].",
        ),
        (
            {"RETRY_BASE": 601},
            "KFS_CREDENTIALS['RETRY_BASE'] must not be above KFS_CREDENTIALS['RETRY_MAX'].",
        ),
    ],
)
def test_settings_that_do_not_go_together(given: dict[str, Any], problem: str) -> None:
    with override_settings(KFS_CREDENTIALS=given):
        assert settings.problems() == [problem]


def test_nothing_is_wrong_with_right_settings() -> None:
    right = {"MAX_SECRET_BYTES": 100, "BATCH_BYTES": 100, "RETRY_BASE": 600, "KEYS": [KEY]}
    with override_settings(KFS_CREDENTIALS=right):
        assert settings.problems() == []


# The key ring.


def test_keys_in_any_notation_in_order(kfs_settings: Callable[..., None]) -> None:
    third, fourth = bytes(range(2, 34)), bytes(range(3, 35))
    kfs_settings(KEYS=[KEY, OTHER.hex().upper(), f" {base64.b64encode(third).decode()}\n", fourth.hex().encode()])

    ring = key_ring()

    assert ring.key_ids == tuple(key_id(key) for key in (KEY, OTHER, third, fourth))
    assert ring.primary.id == key_id(KEY)
    kfs_settings(KEYS=[OTHER, KEY])
    assert key_ring().primary.id == key_id(OTHER)
    kfs_settings(KEYS=[OTHER])
    assert key_ring().key_ids == (key_id(OTHER),)


MAKE_ONE = "make one with `manage.py generate_secret_key`."
KEY_PROBLEMS: dict[str, tuple[list[str | bytes], str]] = {
    "none": ([], f"KFS_CREDENTIALS['KEYS'] is empty: there is nothing to encrypt with; {MAKE_ONE}"),
    "empty": (
        [""],
        (
            "KFS_CREDENTIALS['KEYS'], key 1 of 1: A key must be 64 hex digits or base64 of 32 bytes, and these 0 "
            f"characters are neither; {MAKE_ONE}"
        ),
    ),
    "short": (
        [KEY, CANARY],
        (
            "KFS_CREDENTIALS['KEYS'], key 2 of 2: A key must be 64 hex digits or base64 of 32 bytes, and these 13 "
            f"characters are neither; {MAKE_ONE}"
        ),
    ),
    "short bytes": (
        [CANARY.encode()],
        (
            "KFS_CREDENTIALS['KEYS'], key 1 of 1: A key must be 64 hex digits or base64 of 32 bytes, and these 13 "
            f"characters are neither; {MAKE_ONE}"
        ),
    ),
    "malformed": (
        [CANARY * 3 + "!" * 25],
        (
            "KFS_CREDENTIALS['KEYS'], key 1 of 1: A key must be 64 hex digits or base64 of 32 bytes, and these 64 "
            f"characters are neither; {MAKE_ONE}"
        ),
    ),
    "twice": ([KEY, OTHER, KEY], "KFS_CREDENTIALS['KEYS'], key 3 of 3 is the same as key 1: remove one."),
    "twice in two notations": (
        [KEY, KEY.hex(), OTHER],
        "KFS_CREDENTIALS['KEYS'], key 2 of 3 is the same as key 1: remove one.",
    ),
    "the README's": (
        [EXAMPLE],
        (f"KFS_CREDENTIALS['KEYS'], key 1 of 1 is the example of the README, which is no secret; {MAKE_ONE}"),
    ),
    "the README's in another notation": (
        [KEY, base64.b64encode(bytes.fromhex(EXAMPLE))],
        (f"KFS_CREDENTIALS['KEYS'], key 2 of 2 is the example of the README, which is no secret; {MAKE_ONE}"),
    ),
}


@pytest.mark.parametrize("case", KEY_PROBLEMS)
def test_keys_that_are_refused(kfs_settings: Callable[..., None], case: str) -> None:
    keys, message = KEY_PROBLEMS[case]
    kfs_settings(KEYS=keys)

    with pytest.raises(InvalidKey) as caught:
        key_ring()

    error = caught.value
    assert str(error) == message
    assert (error.__cause__, error.__context__) == (None, None)
    hidden = [CANARY, repr(KEY), repr(OTHER), KEY.hex(), OTHER.hex(), EXAMPLE, EXAMPLE[:16]]
    below = [frame for frame in frames(error.__traceback__) if frame.f_code.co_filename != __file__]
    assert below
    texts = [str(error), repr(error), *(text for frame in below for text in shown(frame.f_locals))]
    assert not any(word in text for word in hidden for text in texts)


def test_the_key_in_the_readme_is_the_one_that_is_refused() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert set(re.findall(r"\b[0-9A-Fa-f]{64}\b", readme)) == {EXAMPLE}

"""`generate_secret_key`."""

from __future__ import annotations

from typing import Any

from kfs_credentials.conf import key_ring
from kfs_credentials.crypto import key_id, parse_key
from tests.management.commands import Run


def test_a_key_and_its_id(run: Run, kfs_settings: Any) -> None:
    outcome = run("generate_secret_key")
    assert outcome.code == 0
    key = parse_key(outcome.out)
    assert outcome.out == f"{key.hex()}\n"
    assert outcome.err == (
        f"Its id is {key_id(key)}. Where there are keys in KFS_CREDENTIALS['KEYS'] already, put it behind them in "
        "every process before you put it first.\n"
    )
    kfs_settings(KEYS=[outcome.out])
    assert key_ring().primary.id == key_id(key)


def test_another_one_each_time(run: Run) -> None:
    assert len({run("generate_secret_key").out for _ in range(10)}) == 10


def test_it_works_before_there_is_a_key_or_a_store(run: Run, kfs_settings: Any) -> None:
    kfs_settings(KEYS=["too short"], STORES={})
    assert run("generate_secret_key").code == 0

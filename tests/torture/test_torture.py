"""The short form of `make torture`: the command itself, as somebody runs it."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.crashes.workers import ROOT

SECONDS = 5
LAST = re.compile(r"kills (\d+) moves (\d+) retries \d+ lost 0 doubled 0 leaked 0 failed 0")


def test_nothing_is_lost_doubled_or_leaked() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.torture", "--seconds", str(SECONDS)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = LAST.fullmatch(done.stdout.splitlines()[-1])
    assert last, done.stdout
    kills, moves = map(int, last.groups())
    assert kills > 0
    assert moves > 0

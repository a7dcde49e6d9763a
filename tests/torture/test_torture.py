"""The short form of `make torture`: the command itself, as somebody runs it."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.crashes.workers import ROOT
from tests.waiting import PATIENCE

SECONDS = 5
LAST = re.compile(r"kills (\d+) moves (\d+) retries \d+ lost 0 doubled 0 leaked 0 failed 0")
HAPPENED = ("kills", "freezes", "crashes", "calls")
"""In each run, however short it is."""


def test_nothing_is_lost_doubled_or_leaked() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.torture", "--seconds", str(SECONDS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = LAST.fullmatch(done.stdout.splitlines()[-1])
    assert last, done.stdout
    assert all(int(number) > 0 for number in last.groups())
    counts = dict(line.rsplit(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert all(int(counts[what]) > 0 for what in HAPPENED), done.stdout
    assert any(" COMMIT" in what for what in counts), done.stdout

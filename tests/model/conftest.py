"""How far the model got, told at the end of a long run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was reached, and how often, in all parts of the run."""
    reached: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, counts in report.user_properties:
            if name == "reached" and isinstance(report, pytest.TestReport) and report.when == "call":
                reached.update(counts)
    for what, count in sorted(reached.items()):
        terminalreporter.write_line(f"{what}: {count}")

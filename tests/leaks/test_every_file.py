"""Each file of the package is watched by one of the tests that look for values in frames, or is named here."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import kfs_credentials
from tests.leaks import test_frames, test_frames_of_operators, test_frames_of_stores
from tests.services import test_leaks

PACKAGE = Path(kfs_credentials.__file__).parent

WATCHED = {
    *test_leaks.FILES,
    *test_frames_of_stores.FILES,
    *chain.from_iterable(test_frames.STEPS.values()),
    *chain.from_iterable(test_frames_of_operators.STEPS.values()),
    *chain.from_iterable(test_frames_of_operators.WITHOUT_VALUES.values()),
}
HAVE_NO_FRAMES = {"__init__.py", "apps.py", "signals.py", "metrics/__init__.py", "metrics/urls.py"}
"""Nothing happens in them but imports and definitions."""
ASK_FOR_NO_VALUE = {"admin", "metrics", "migrations", "models"}
"""Folders. What their pages and rows show is in tests/admin/test_leaks.py, tests/test_metrics.py and test_story.py."""
OTHERWISE_TESTED = {
    "checks.py": "it reads settings and the catalog",
    "errors.py": "tests/crypto/test_leaks.py and tests/stores/test_leaks.py look at each error",
    "redaction.py": "it is what takes values out: tests/test_redaction.py",
    "sql/operations.py": "of migrations",
    "verification/__init__.py": "it only imports",
}


def test_every_file_of_the_package_is_watched_or_named_here() -> None:
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    named = HAVE_NO_FRAMES | OTHERWISE_TESTED.keys() | test_frames_of_stores.GUARDS
    elsewhere = {file for file in files if Path(file).parts[0] in ASK_FOR_NO_VALUE}
    assert files - WATCHED - named - elsewhere == set()
    assert (WATCHED | named) - files == set()
    assert WATCHED & named == set()

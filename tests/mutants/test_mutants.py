"""The mistakes can be made: nothing of what they replace has been written anew since."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import COPIED, ROOT, make
from tests.mutants.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_changes_one_place(mutant: Mutant) -> None:
    assert (ROOT / "kfs_credentials" / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old


def test_a_copy_has_the_mistake(tmp_path: Path) -> None:
    make(MUTANTS[0], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(COPIED)
    assert MUTANTS[0].new in (tmp_path / "kfs_credentials" / MUTANTS[0].file).read_text()

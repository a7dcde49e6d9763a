"""docs/original.md: every behaviour of the original has its line, and every test that a line names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

PROJECT = Path(__file__).parents[1]
PAGE = PROJECT / "docs" / "original.md"

SECTIONS = {
    "A": range(1, 8),
    "B": range(8, 38),
    "C": range(38, 46),
    "D": range(46, 64),
    "E": range(64, 81),
    "F": range(81, 92),
    "G": range(92, 99),
    "H": range(99, 105),
}
DIFFERENT = {8, 11, 13, 32, 55, 71, 73, 93}
WITHOUT_COUNTERPART = {37, 74, 104}


class Line(NamedTuple):
    """One line of a table."""

    section: str
    number: int
    mark: str
    behaviour: str
    tests: str

    @property
    def names(self) -> list[str]:
        """The tests that it names."""
        return re.findall(r"`(tests/[^`]+)`", self.tests)


def read_page() -> list[Line]:
    lines, section = [], ""
    for text in PAGE.read_text().splitlines():
        if heading := re.match(r"## ([A-Z])\. \w", text):
            section = heading[1]
        elif text.startswith("| ") and not text.startswith("| number |"):
            number, behaviour, tests = (cell.strip() for cell in text.strip("| ").split(" | "))
            digits, _, mark = number.partition(" ")
            lines.append(Line(section, int(digits), mark, behaviour, tests))
    return lines


LINES = read_page()
NAMES = sorted({name for line in LINES for name in line.names})


@cache
def definitions(path: Path) -> set[str]:
    """Return the functions and classes of a file, and the methods of its classes as `Class::method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (one.name for one in node.body if isinstance(one, ast.FunctionDef))
            found |= {node.name, *(f"{node.name}::{name}" for name in methods)}
    return found


def test_the_sections_hold_each_number_once() -> None:
    assert list(chain.from_iterable(SECTIONS.values())) == list(range(1, 105))


def test_the_page_has_every_section() -> None:
    assert re.findall(r"^## ([A-Z])\. ", PAGE.read_text(), re.MULTILINE) == list(SECTIONS)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_behaviour_has_its_line_once(section: str) -> None:
    assert [line.number for line in LINES if line.section == section] == list(SECTIONS[section])


@pytest.mark.parametrize("line", LINES, ids=lambda line: str(line.number))
def test_a_line_says_what_happens_and_where_it_is_shown(line: Line) -> None:
    assert line.number in SECTIONS[line.section]
    assert line.behaviour.endswith((".", ".)"))
    if line.number in WITHOUT_COUNTERPART:
        assert line.mark == "T"
        assert re.fullmatch(r"no counterpart: \w.+\.", line.tests)
    else:
        assert line.mark == ("X" if line.number in DIFFERENT else "")
        assert line.names
        assert line.tests == "<br>".join(f"`{name}`" for name in line.names)


@pytest.mark.parametrize("name", NAMES)
def test_a_test_that_is_named_is_there(name: str) -> None:
    path, _, test = name.partition("::")
    assert re.fullmatch(r"(\w+::)?test_\w+|Test\w+", test)
    assert test in definitions(PROJECT / path)

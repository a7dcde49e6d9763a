"""docs/original.md, cases.md and proof.md: what they are about has its line, and what they name is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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

CASES_PAGE = PROJECT / "docs" / "cases.md"

CASES = {
    "A": ["CK-01", "CK-02", "CK-03", "CK-04", "CK-06", "CK-09", "CK-10"],
    "B": ["SS-01", "SS-02", "SS-04", "SS-06", "SS-07", "SS-09", "SS-10", "SS-11", "SS-13", "SS-15", "SS-16"],
    "C": ["JS-01", "JS-03", "JS-05", "JS-06"],
    "D": ["OP-01", "OP-02", "OP-03", "OP-04", "OP-07"],
    "E": [f"LC-{number:02}" for number in (1, 3, 5, 8, 11, 12, 13, 14, 15, 16, 17)],
    "F": ["LL-01", "LL-02", "LL-05", "LL-06", "LL-08"],
}
OF_STORES_TO_COME = {"SS-01", "SS-02", "SS-13"}
"""Cases of stores that are not built yet: their lines say so, and name the tests of what there is."""


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
        return named(self.tests)


class Case(NamedTuple):
    """One line of a table of cases."""

    section: str
    case: str
    title: str
    what: str
    tests: str


def named(tests: str) -> list[str]:
    """Return the tests that the last cell of a line names."""
    return re.findall(r"`(tests/[^`]+)`", tests)


def read_rows(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the section and the cells of each line of the tables of a page."""
    section = ""
    for text in page.read_text().splitlines():
        if heading := re.match(r"## ([A-Z])\. \w", text):
            section = heading[1]
        elif text.startswith("| ") and not text.startswith(("| number |", "| case |")):
            yield section, [cell.strip() for cell in text.strip("| ").split(" | ")]


def read_lines() -> Iterator[Line]:
    for section, (number, behaviour, tests) in read_rows(PAGE):
        digits, _, mark = number.partition(" ")
        yield Line(section, int(digits), mark, behaviour, tests)


def read_cases() -> Iterator[Case]:
    for section, (first, what, tests) in read_rows(CASES_PAGE):
        case, _, title = first.partition(": ")
        yield Case(section, case, title, what, tests)


LINES = list(read_lines())
CASE_LINES = list(read_cases())
CELLS = [*(line.tests for line in LINES), *(line.tests for line in CASE_LINES)]
NAMES = sorted({name for tests in CELLS for name in named(tests)})


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


@pytest.mark.parametrize("section", CASES)
def test_every_case_has_its_line_once(section: str) -> None:
    assert [line.case for line in CASE_LINES if line.section == section] == CASES[section]
    assert {line.section for line in CASE_LINES} == set(CASES)


@pytest.mark.parametrize("line", CASE_LINES, ids=lambda line: line.case)
def test_a_case_says_what_is_so_and_where_it_is_shown(line: Case) -> None:
    assert line.title
    assert line.what.endswith(".")
    names = "<br>".join(f"`{name}`" for name in named(line.tests))
    assert names
    if line.case in OF_STORES_TO_COME:
        assert re.fullmatch(r"does not apply yet: \w.+\. The protocol's part:<br>", line.tests.removesuffix(names))
    else:
        assert line.tests == names


@pytest.mark.parametrize("name", NAMES)
def test_a_test_that_is_named_is_there(name: str) -> None:
    path, _, test = name.partition("::")
    assert re.fullmatch(r"(\w+::)?test_\w+|Test\w+", test)
    assert test in definitions(PROJECT / path)


# What docs/proof.md names, in its text and in its tables.

PROOF = (PROJECT / "docs" / "proof.md").read_text()
PLACES = sorted(set(re.findall(r"`([\w./-]+/[\w./-]*)(?:::[\w:]+)?`", PROOF)))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py::[\w:]+)`", PROOF)))
MODULES = sorted(set(re.findall(r"python -m ([\w.]+)", PROOF)))
TARGETS = sorted(set(re.findall(r"(?:`| {4})make ([a-z]+)", PROOF)))


def test_proof_names_something_of_each_kind() -> None:
    assert all([PLACES, TESTS, MODULES, TARGETS])


@pytest.mark.parametrize("place", PLACES)
def test_a_file_that_proof_names_is_there(place: str) -> None:
    assert (PROJECT / place).exists()


@pytest.mark.parametrize("name", TESTS)
def test_a_test_that_proof_names_is_there(name: str) -> None:
    path, _, test = name.partition("::")
    assert test in definitions(PROJECT / path)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_proof_runs_is_there(module: str) -> None:
    path = PROJECT / module.replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_that_proof_names_is_there(target: str) -> None:
    assert re.search(rf"^{target}:", (PROJECT / "Makefile").read_text(), re.MULTILINE)

"""One rule for every shape of metadata, and nothing is crashed on or changed (JS-01, JS-05, JS-06)."""

from __future__ import annotations

from typing import Any

import pytest

from kfs_credentials.models import Source
from tests.cleanup.rows import bare_source, in_database, make_source
from tests.verification.looks import classes

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

SHAPES: list[tuple[str, list[str]]] = [
    ("null", []),
    ("{}", []),
    ("[]", []),
    ('"text"', []),
    ("7", []),
    ('{"credentials": null}', []),
    ('{"credentials": {}}', []),
    ('{"credentials": []}', ["unsupported"]),
    ('{"credentials": ""}', ["unsupported"]),
    ('{"credentials": "token"}', ["unsupported"]),
    ('{"credentials": 0}', ["unsupported"]),
    ('{"credentials": false}', ["unsupported"]),
    ('{"credentials": [{"token": "a"}]}', ["unsupported"]),
    ('{"credentials": ' + "[" * 50 + "]" * 50 + "}", ["unsupported"]),
    ('{"credentials": {"bundle": "' + "x" * 5_000_000 + '"}}', []),
    ('{"credentials": {' + ",".join(f'"key{n}": 1' for n in range(10_000)) + "}}", []),
    ('{"": {"credentials": "x"}}', ["metadata"]),
    ('{"Credentials": {"a": 1}}', ["metadata"]),
    ('["credentials", "a"]', []),
    ('{"note": "a literal \\\\u0000, and no NUL"}', []),
    ('{"credentials": {"token": "a literal \\\\u0000"}}', []),
]


@pytest.mark.parametrize(("document", "expected"), SHAPES, ids=[document[:40] for document, _ in SHAPES])
def test_every_shape_of_metadata(document: str, expected: list[str]) -> None:
    source = bare_source()
    in_database("UPDATE sources SET metadata = %s::jsonb WHERE id = %s", document, source.pk)
    before = in_clear_of(source)
    assert classes() == expected
    assert in_clear_of(source) == before


@pytest.mark.parametrize(("document", "expected"), SHAPES, ids=[document[:40] for document, _ in SHAPES])
def test_every_shape_of_metadata_beside_a_ref(document: str, expected: list[str]) -> None:
    """What would be credentials, or unsupported, without a ref is a conflict beside one."""
    source = make_source()
    in_database("UPDATE sources SET metadata = %s::jsonb WHERE id = %s", document, source.pk)
    is_there = '"credentials": ' in document and document.startswith('{"cred') and "null" not in document
    conflict = ["plaintext_differs"] if is_there else []
    assert classes() == (conflict or expected)


def in_clear_of(source: Source) -> Any:
    return Source.objects.values_list("metadata", flat=True).get(pk=source.pk)

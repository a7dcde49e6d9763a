"""What looks like a secret outside of `credentials`: found by path, passed over by SQL only where nothing is."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials.models import Source
from kfs_credentials.redaction import HIDDEN, hidden_paths, redacted
from kfs_credentials.verification import database
from kfs_credentials.verification.database import Verification
from kfs_credentials.verification.findings import FindingClass
from tests.cleanup.rows import bare_source
from tests.factories import SourceFactory, SpaceFactory
from tests.verification.looks import found, only

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

TOKEN = "sk-" + "a1" * 12


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ({"title": "Handbook", "pages": 7}, []),
        ({"api_key": "made-up"}, ["$.api_key"]),
        ({"auth": {"basic": [{"password": "made-up"}]}}, ["$.auth.basic[0].password"]),
        ({"api key": {"a": 1}}, ['$["api key"]']),
        ({"headers": [{"name": "Authorization", "value": "made-up"}]}, ["$.headers[0].value"]),
        ({"note": f"use {TOKEN}"}, ["$.note"]),
        ({"url": "https://user:made-up@files.example/"}, ["$.url"]),
        ({"token": None, "hasToken": True, "secret": "", "tokens": [], "cookies": {}}, []),
        ({"token": 7}, ["$.token"]),
        ({"token": {"token": "made-up"}}, ["$.token"]),
        ({TOKEN: "x"}, [f'$["{HIDDEN}"]']),
        ({"box": {"algorithm": "A", "ciphertext": "c", "iv": "i", "tag": "t"}}, ["$.box"]),
        (["x", f"Bearer {TOKEN}"], ["$[1]"]),
        (f"password={TOKEN}", ["$"]),
        ("text", []),
        (7, []),
        (None, []),
    ],
    ids=str,
)
def test_paths(value: object, paths: list[str]) -> None:
    assert hidden_paths(value) == paths


def test_no_path_holds_a_value_and_none_is_deeper_than_is_looked() -> None:
    deep: Any = {"token": "canary"}
    for _ in range(150):
        deep = {"a": deep}
    assert hidden_paths(deep) == []
    assert "canary" not in str(hidden_paths({"a": {"password": "canary", "note": "token: canary"}}))


def test_only_what_lies_outside_of_credentials() -> None:
    SourceFactory.create(credentials={"token": "made-up"}, other={"title": "x", "nested": {"credentials": {"a": "b"}}})
    (finding,) = found(**only(FindingClass.METADATA))
    assert finding.detail == "$.nested.credentials"


def test_a_document_with_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "PATHS", 3)
    SourceFactory.create(bare=True, other={f"{n}_key": "x" for n in range(5)} | {"keys": [{"api_key": "x"}] * 5})
    details = [finding.detail for finding in found(**only(FindingClass.METADATA))]
    assert details == ["$.keys[0].api_key", "$.keys[1].api_key", "$: and 3 more"]


def test_a_name_that_has_no_end() -> None:
    SourceFactory.create(bare=True, other={"x" * 5_000: {"api_key": "made-up"}})
    (finding,) = found(**only(FindingClass.METADATA))
    assert finding.detail == f"$.{'x' * 197}…"


# Everything that redaction.py hides is looked at.

SHOWN = json.loads((Path(__file__).parents[1] / "data" / "redaction.json").read_text())
FULLWIDTH = "".join(chr(ord(letter) + 0xFEE0) for letter in "token")
FRAGMENTS = [
    *("api", "key", "token", "secret", "credentials", "pass", "pat", "sig", "password", "pwd", "cookie", "dsn", "jwt"),
    *("authorization", "bearer", "basic ", "session", "id", "x-amz-signature", "connection", "string", "ciphertext"),
    *(
        "_",
        "-",
        " ",
        ".",
        "=",
        ": ",
        "//a:b@c/",
        '"',
        "\n",
        FULLWIDTH,
        "CREDENT\u0130ALS",
        "PASS",
        "\u212aEY",
        "ba\u017fic ",
        "東京",
        "é",
    ),
    *(TOKEN, "eyJhbGci.eyJz.x", "ghp_" + "a" * 16, "xoxb-" + "1" * 12, "ya29." + "a" * 16, "hvs." + "b" * 16),
    *("glpat-" + "a" * 16, "AIza" + "b" * 30, "ntn_" + "c" * 16, '{"api_key": "x"}', "aB3456789"),
]


def made_up(chance: random.Random, depth: int = 2) -> object:
    text = "".join(chance.choice(FRAGMENTS) for _ in range(chance.randint(1, 4)))
    match chance.randint(0, 3 if depth else 0):
        case 1:
            return [made_up(chance, depth - 1)]
        case 2:
            return {text: made_up(chance, depth - 1), "a": made_up(chance, depth - 1)}
        case 3:
            return {"name": text, "value": made_up(chance, depth - 1)}
        case _:
            return text


def documents() -> list[object]:
    chance = random.Random(20)
    return [*({"a": value} for value in _values(SHOWN)), *({"a": made_up(chance)} for _ in range(1_500))]


def _values(value: object) -> list[object]:
    if isinstance(value, dict):
        return [value, *({key: "made-up"} for key in value), *(one for item in value.values() for one in _values(item))]
    return [one for item in value for one in _values(item)] if isinstance(value, list) else [value]


def test_whatever_is_hidden_is_looked_at() -> None:
    """The statement passes over what cannot hold anything; it must never pass over what does."""
    space = SpaceFactory.create()
    made = [
        bare_source(knowledge_space=space, other=document) for document in documents() if "\x00" not in str(document)
    ]
    hidden = {source.pk: bool(hidden_paths(source.metadata)) for source in made}
    verification, suspicious, after = Verification("default"), set(), None
    while rows := verification._sources(None, after=after):
        after = rows[-1][0]
        suspicious |= {source for source, _, _, paths, _ in rows if paths is not None}
    missed = [pk for pk, is_hidden in hidden.items() if is_hidden and pk not in suspicious]
    assert [Source.objects.get(pk=pk).metadata for pk in missed] == []
    assert sum(hidden.values()) > 500
    assert len(suspicious) < len(hidden)


def test_paths_are_found_wherever_something_is_hidden() -> None:
    """But for names that have no value."""
    for document in documents():
        if redacted(document) == document:
            assert hidden_paths(document) == []

from __future__ import annotations

import dataclasses
import re
import uuid
from typing import Any

import pytest

from kfs_credentials.crypto import Scope, new_ref, object_name, validate_ref
from kfs_credentials.errors import InvalidRef, InvalidScope

REF = "source-secret:v1:cbcb77e2-47a1-485e-aa1a-5441e0c609f0"
ID = uuid.UUID("f6b7a1c4-9cc1-49a7-af5f-c1ae8b97e635")


def test_a_uuid_is_its_lower_case_text() -> None:
    assert Scope("tenant", ID, source_id=ID) == Scope("tenant", str(ID), str(ID))


def test_ids_are_trimmed_as_javascript_does_and_not_folded() -> None:
    scope = Scope("\ufeff\u2003 Tenant\x85\u3000\n", " A ", "b\x1c")

    assert scope == Scope("Tenant\x85", "A", "b\x1c")
    assert scope != Scope("tenant\x85", "A", "b\x1c")


def test_a_scope_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Scope("t", "k", "s").tenant_id = "other"  # type: ignore[misc]
    assert not hasattr(Scope("t", "k", "s"), "__dict__")


def test_the_length_is_counted_in_utf_16() -> None:
    assert len(Scope("t" * 255, "😀" * 127, "é" * 255).knowledge_space_id) == 127


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ((" \u00a0", "k", "s"), "tenant_id must have 1 to 255 characters (UTF-16), not 0."),
        (("t", "k" * 256, "s"), "knowledge_space_id must have 1 to 255 characters (UTF-16), not 256."),
        (("t", "k", "😀" * 128), "source_id must have 1 to 255 characters (UTF-16), not 256."),
        ((ID, "k", "s"), "tenant_id must be text, not a value of type UUID."),
        (("t", "k", None), "source_id must be text, not a value of type NoneType."),
    ],
)
def test_ids_that_are_refused(ids: Any, problem: str) -> None:
    with pytest.raises(InvalidScope, match=f"^{re.escape(problem)}$"):
        Scope(*ids)


def test_new_refs_are_refs_and_differ() -> None:
    refs = {new_ref() for _ in range(100)}

    assert len(refs) == 100
    for ref in refs:
        validate_ref(ref)


@pytest.mark.parametrize(
    "ref",
    [
        REF.upper(),
        REF.replace("v1", "v2"),
        REF[:-1],
        f"{REF}\n",
        f" {REF}",
        REF.replace("-485e-", "-185e-"),
        REF.replace("-aa1a-", "-ca1a-"),
        "",
    ],
)
def test_texts_that_are_no_ref(ref: str) -> None:
    with pytest.raises(InvalidRef) as caught:
        validate_ref(ref)
    assert str(caught.value) == (
        f"A ref is 'source-secret:v1:' and a version 4 UUID in lower case, not this str of {len(ref)} characters."
    )
    with pytest.raises(InvalidRef):
        object_name(ref)


def test_what_is_no_text_is_no_ref() -> None:
    with pytest.raises(InvalidRef, match=r"in lower case, not this NoneType\.$"):
        validate_ref(None)  # type: ignore[arg-type]


def test_object_name() -> None:
    name = "2a8555f54deb3ef6b0b26527b257fce3011e5aa0cc7de66b51255b5d2b172c1c.enc"

    assert object_name(REF) == f"__knowledge-secrets/source/v1/{name}"
    assert object_name(REF, prefix="p") == f"p{name}"
    assert object_name(REF, prefix="p" * 512) == "p" * 512 + name


@pytest.mark.parametrize("length", [0, 513])
def test_prefixes_that_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"^The prefix must have 1 to 512 characters, not {length}.$"):
        object_name(REF, prefix="p" * length)

"""The interoperability vectors: what the original made, refused or let through."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfs_credentials.crypto import KeyRing, Scope

if TYPE_CHECKING:
    from collections.abc import Callable

DIRECTORY = Path(__file__).parents[1] / "data" / "interop"


def load(name: str) -> list[dict[str, Any]]:
    """Return the cases of one list. A text may be in pieces, with long runs of one letter counted."""
    document = json.loads((DIRECTORY / f"{name}.json").read_text())
    cases = [document.get("defaults", {}) | case for case in document["cases"]]
    return [{key: _joined(value) for key, value in case.items()} for case in cases]


def each(name: str, *, only: Callable[[str], bool] = bool) -> pytest.MarkDecorator:
    """Run a test, which takes a `case`, for every case of a list, or only for those whose names say so."""
    cases = [case for case in load(name) if only(case["name"])]
    assert cases
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


def ring_of(case: dict[str, Any]) -> KeyRing:
    return KeyRing([bytes.fromhex(case["key_hex"])])


def scope_of(case: dict[str, Any]) -> Scope:
    return Scope(case["tenant_id"], case["knowledge_space_id"], case["source_id"])


def blob_of(case: dict[str, Any]) -> bytes:
    if "envelope_b64" in case:
        return base64.b64decode(case["envelope_b64"])
    return str(case["envelope_json"]).encode()


def _joined(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return "".join(part if isinstance(part, str) else part["repeat"] * part["times"] for part in value)

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfs_credentials.redaction import HIDDEN, MAX_DEPTH, is_sensitive, redacted, redacted_text, short_ref

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "redaction.json").read_text())["cases"]
# JavaScript loses this key by accident. It is a key like any other.
NOT_HIDDEN = {"/__proto__"}

PRIVATE_KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\nmade+up==\n-----END RSA PRIVATE KEY-----"
ENVELOPE = {
    "algorithm": "aes-256-gcm",
    "ciphertext": "bWFkZS11cA",
    "fingerprint": "0" * 64,
    "iv": "AAAAAAAAAAAAAAAA",
    "tag": "AAAAAAAAAAAAAAAAAAAAAA",
    "version": 1,
}


def paths_that_differ(before: Any, after: Any, path: str = "") -> set[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        assert list(before) == list(after), "keys and their order stay"
        return set().union(*(paths_that_differ(before[key], after[key], f"{path}/{key}") for key in before))
    if isinstance(before, list) and isinstance(after, list):
        assert len(before) == len(after)
        pairs = enumerate(zip(before, after, strict=True))
        return set().union(*(paths_that_differ(one, two, f"{path}/{place}") for place, (one, two) in pairs))
    return set() if before == after else {path}


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_hides_what_knowledge_fs_removes_and_no_more_than_the_list_says(case: dict[str, Any]) -> None:
    expected = set(case["removed"]) - NOT_HIDDEN | set(case.get("also_hidden", ()))
    assert paths_that_differ(case["metadata"], redacted(case["metadata"])) == expected


def test_what_is_hidden_is_replaced_by_the_mark() -> None:
    assert redacted({"token": {"a": 1}, "tokens": [1, 2], "pwd": None, "n": 1}) == {
        "token": HIDDEN,
        "tokens": HIDDEN,
        "pwd": HIDDEN,
        "n": 1,
    }


@pytest.mark.parametrize("credentials", [{"a": 1}, "x", 5, True, None, ["x"]])
def test_credentials_are_hidden_whatever_they_are(credentials: Any) -> None:
    assert redacted({"credentials": credentials, "title": "t"}) == {"credentials": HIDDEN, "title": "t"}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "aws_secret_access_key",
            "access_key",
            "storageAccountKey",
            "shared-access-keys",
            "jwt",
            "id_jwt",
            "bearer",
        ),
        *(
            "SENTRY_DSN",
            "connection_string",
            "DATABASE_CONNSTR",
            "encryptionKey",
            "master_key",
            "ssh_key",
            "passcode",
        ),
        *(
            "user_creds",
            "session_key",
            "Ocp-Apim-Subscription-Key",
            "x-auth-key",
            "pass",
            "PAT",
            "X-Amz-Signature",
        ),
        *("API keys", "Set-Cookies", "\uff34oken", "session_id"),
    ],
)
def test_names_that_knowledge_fs_overlooks(name: str) -> None:
    assert is_sensitive(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "secretRotationAt",
            "tokenCount",
            "publicKey",
            "key",
            "bypass",
            "config",
            "sort_key",
            "primaryKey",
            "keyId",
        ),
        *("passport", "compat", "design", "accessKeyId", "keys", "s", "", "description"),
    ],
)
def test_names_that_stay_visible(name: str) -> None:
    assert not is_sensitive(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pass@host", "https://[hidden]@host"),
        ("https://user:pass@host:8443/a?b=c#d", "https://[hidden]@host:8443/a?b=c#d"),
        ("https://only-a-token@host/", "https://[hidden]@host/"),
        (
            "see postgresql://u:p@h/db, or ftp://u:p@h2",
            "see postgresql://[hidden]@h/db, or ftp://[hidden]@h2",
        ),
        ("jdbc:postgresql://u:p@h/db", "jdbc:postgresql://[hidden]@h/db"),
        ("//u:p@h", "//[hidden]@h"),
        ("amqp://user:p@ss/w?rd#1@host/vhost", "amqp://[hidden]@host/vhost"),
        ("https://host/go?to=https://u:p@inner", "https://host/go?to=https://[hidden]@inner"),
        ("https://host:8080/go?to=https://u:p@inner", "https://host:8080/go?to=https://[hidden]@inner"),
        ("https://host/@name", "https://host/@name"),
        ("http://host:8080/@name", "http://host:8080/@name"),
        ("mailto:somebody@host.example", "mailto:somebody@host.example"),
        ("https://host/path?q=a:b", "https://host/path?q=a:b"),
    ],
)
def test_user_info_of_urls(text: str, shown: str) -> None:
    assert redacted_text(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://host/?access_token=abc&page=2", "https://host/?access_token=[hidden]&page=2"),
        ("https://host/blob?sv=1&sig=abc%3D", "https://host/blob?sv=1&sig=[hidden]"),
        ("Server=h;User Id=u;Password=p w;Database=d", "Server=h;User Id=u;Password=[hidden] w;Database=d"),
        ("AccountName=a;AccountKey=abc==;Suffix=s", "AccountName=a;AccountKey=[hidden];Suffix=s"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: [hidden]"),
        ("Cookie: a=b; c=d\nHost: h", "Cookie: [hidden]\nHost: h"),
        ("password: two words\nuser: u", "password: [hidden]\nuser: u"),
        ("API key: abc", "API key: [hidden]"),
        ("Bearer abc", "Bearer [hidden]"),
        ("use Basic dXNlcjpwYXNz here", "use Basic [hidden] here"),
        ("a basic introduction, and Basic training", "a basic introduction, and Basic training"),
        ('{"password": "with \\" a quote", broken', '{"password": [hidden], broken'),
        ("{'credentials': {'a': 'x'}}", "{'credentials': [hidden]"),
        ("export API_TOKEN='a b' USER=u", "export API_TOKEN=[hidden] USER=u"),
        ("tokenCount=5&sort=asc", "tokenCount=5&sort=asc"),
    ],
)
def test_values_behind_a_sensitive_name(text: str, shown: str) -> None:
    assert redacted_text(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (PRIVATE_KEY, HIDDEN),
        (f"before\n{PRIVATE_KEY}\nafter", f"before\n{HIDDEN}\nafter"),
        (PRIVATE_KEY.partition("-----END")[0], HIDDEN),
        (PRIVATE_KEY.replace("RSA ", ""), HIDDEN),
        (PRIVATE_KEY.replace("RSA PRIVATE KEY", "PGP PRIVATE KEY BLOCK"), HIDDEN),
        ("-----BEGIN PUBLIC KEY-----\nabc", "-----BEGIN PUBLIC KEY-----\nabc"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJtYWRlLXVwIn0.c2ln", HIDDEN),
        ("a ghp_0123456789abcdefghij b", f"a {HIDDEN} b"),
        ("glpat-0123456789abcdefghij", HIDDEN),
        ("xoxb-0123456789-abcdef", HIDDEN),
        ("source-secret:v1:0f9dd52a-6d25-4f70-8a1c-4f1f7a2b9c11", f"source-secret:{HIDDEN}"),
        ("task-0123456789-0123456789", "task-0123456789-0123456789"),
    ],
)
def test_values_that_look_like_secrets(text: str, shown: str) -> None:
    assert redacted_text(text) == shown


def test_text_that_is_json_is_looked_into() -> None:
    """A service account's document, or metadata that was encoded twice."""
    inner = json.dumps({"type": "service_account", "private_key": "x"})
    assert redacted({"config": inner}) == {"config": HIDDEN}
    assert redacted(json.dumps(inner)) == HIDDEN
    assert redacted({"config": '{"big": 1e400, "n": 12, "token": "x"}'}) == {"config": HIDDEN}
    harmless = json.dumps({"region": "eu", "parts": [1, 2]})
    assert redacted({"config": harmless}) == {"config": harmless}


def test_envelopes_are_hidden() -> None:
    assert redacted({"a": ENVELOPE, "b": json.dumps(ENVELOPE), "c": [ENVELOPE]}) == {
        "a": HIDDEN,
        "b": HIDDEN,
        "c": [HIDDEN],
    }


def test_pairs_of_name_and_value() -> None:
    headers = [
        {"name": "Authorization", "value": "x"},
        {"key": "api_key", "value": "x"},
        {"name": "Accept", "value": "y"},
    ]
    shown = [{"name": "Authorization", "value": HIDDEN}, {"key": "api_key", "value": HIDDEN}, headers[2]]
    assert redacted({"headers": headers}) == {"headers": shown}


def test_keys_are_texts_too_and_none_is_lost() -> None:
    assert redacted({"https://a:b@host": 1, "https://c:d@host": 2, "n": 3}) == {
        f"https://{HIDDEN}@host": 1,
        f"https://{HIDDEN}@host (2)": 2,
        "n": 3,
    }


def test_other_values_are_copied_as_they_are() -> None:
    value = {"a": [None, True, 0, 1.5, 2**70, Decimal("1e400"), "s"], "b": {"c": []}}
    copy = redacted(value)
    assert copy == value
    assert isinstance(copy, dict)
    assert copy["a"] is not value["a"]
    assert redacted(None) is None
    assert redacted("plain") == "plain"


def test_what_is_nested_too_deep_is_hidden() -> None:
    value: Any = "secret"
    for _ in range(MAX_DEPTH + 200):
        value = {"a": value}
    assert "secret" not in repr(redacted(value))
    assert HIDDEN in repr(redacted(value))


quick = settings(deadline=None)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@quick
@given(JSON_VALUES)
def test_any_value_can_be_shown_and_showing_it_twice_changes_nothing(value: Any) -> None:
    once = redacted(value)
    assert redacted(once) == once


@quick
@given(
    st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=2),
    st.sampled_from(["credentials", "api_key", "Passwords", "secret_access_key"]),
)
def test_a_secret_is_never_shown_however_it_is_wrapped(others: dict[str, Any], name: str) -> None:
    value: Any = {**others, name: {"any": ["canary-7f3a"]}}
    for wrapped in (value, [value], {"a": {"b": value}}, json.dumps(value), {"a": json.dumps([value])}):
        assert "canary-7f3a" not in json.dumps(redacted(wrapped))


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "//a:x",
        "//",
        "eyJ-",
        "eyJa.",
        "a=",
        'a="',
        "token='",
        "{",
        "[",
        "-----BEGIN PRIVATE KEY-----",
        "basic ",
        "a ",
        "a:",
    ],
)
def test_texts_made_to_hurt_take_no_longer_than_others(piece: str) -> None:
    """A pattern that goes over the text again and again would take minutes here, and would be noticed."""
    redacted_text(piece * (200_000 // len(piece)))


@pytest.mark.parametrize(
    ("ref", "shown"),
    [
        ("source-secret:v1:1234abcd-0000-4000-8000-000000000000", "source-secret:v1:1234abcd…"),
        ("source-secret:v1:1234abcd", "source-secret:v1:1234abcd"),
        ("something else altogether", "somethin…"),
        ("", ""),
    ],
)
def test_short_ref(ref: str, shown: str) -> None:
    assert short_ref(ref) == shown

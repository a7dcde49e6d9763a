"""The demo data: what is in it, that it never changes, and how it gets into a database."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
from django.db import connection, transaction
from django.db.utils import OperationalError

from example_project import demo_data
from example_project.demo_data.awkward import awkward

LIMIT = 65_536
# Provider, source type and kind of authentication, then the fields in alphabetical order.
FIELDS = """\
aws_s3_storage online_drive api_key access_key_id region_name secret_access_key
confluence_datasource online_document api_key access_token
dropbox online_drive api_key access_token
dropbox online_drive oauth2 access_token client_id client_secret refresh_token
github online_document api_key access_token
github online_document oauth2 access_token client_id client_secret refresh_token user_login
gitlab online_document api_key access_token gitlab_url
gitlab online_document oauth2 access_token client_id client_secret gitlab_url refresh_token user_login
google_cloud_storage file_storage api_key bucket credentials
google_drive online_drive oauth2 access_token client_id client_secret refresh_token user_email
jina website_crawl api_key api_key
microsoft_teams online_document oauth2 access_token client_id client_secret refresh_token tenant_id user_id
notion online_document api_key integration_secret
notion online_document oauth2 access_token
onedrive_datasource online_drive oauth2 access_token refresh_token tenant_id user_email
sharepoint online_drive oauth2 access_token refresh_token subdomain tenant_id
tavily_datasource website_crawl api_key tavily_api_key"""
SEEDS = (0, 1, 20_261_101, demo_data.DEFAULT_SEED, -7)


def value_of(text: str) -> Any:
    """Read JSON exactly: numbers as tuples, so that 1 is neither rounded nor equal to true."""
    return json.loads(text, parse_int=lambda digits: (Decimal(digits),), parse_float=lambda digits: (Decimal(digits),))


def kind_of(metadata_json: str) -> demo_data.Kind:
    """Decide anew what becomes of the credentials. Numbers count as text: those near the limit hold none."""
    metadata = json.loads(metadata_json, parse_int=str, parse_float=str)
    credentials = metadata.get("credentials") if isinstance(metadata, dict) else None
    if credentials is None:
        return "none"
    if not isinstance(credentials, dict):
        return "unsupported"
    canonical = json.dumps(credentials, ensure_ascii=False, separators=(",", ":")).encode()
    return "movable" if len(canonical) <= LIMIT else "too_large"


def strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, member in value.items():
            yield key
            yield from strings_in(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from strings_in(member)


def awkward_credentials(name: str, seed: int = demo_data.DEFAULT_SEED) -> str:
    (text,) = [content.credentials for content in awkward(seed) if content.name == name]
    assert text is not None
    return text


# The same bytes for ever


def test_same_bytes_on_every_machine_and_python() -> None:
    digest = hashlib.sha256()
    rows: list[demo_data.DemoSpace | demo_data.DemoSource] = [
        *demo_data.spaces(7),
        *demo_data.sources(1_000, 7),
    ]
    for row in rows:
        digest.update("\0".join(map(str, astuple(row))).encode())
    assert digest.hexdigest() == "6bc4bafde28e12864aad700e33e828406ffa52d2f772a2f141474b24f86b1917"


def test_a_larger_demo_begins_with_a_smaller_one() -> None:
    assert list(demo_data.sources(300)) == list(demo_data.sources(500))[:300]
    assert [space.id for space in demo_data.spaces(number=300)] == [space.id for space in demo_data.spaces(number=500)]


def test_another_seed_makes_other_ids_and_values() -> None:
    one, two = ({row.id for row in demo_data.sources(500, seed)} for seed in (1, 2))
    assert not one & two
    one, two = ({space.id for space in demo_data.spaces(seed)} for seed in (1, 2))
    assert not one & two


def test_expected_describes_the_same_sources() -> None:
    for source, expected in zip(demo_data.sources(), demo_data.expected(), strict=True):
        assert expected.source_id == source.id
        assert expected.scope == (source.tenant_id, str(source.knowledge_space_id), str(source.id))
        assert expected.kind == source.kind
        metadata = value_of(expected.other_metadata_json)
        if expected.credentials_json is not None:
            assert "credentials" not in metadata
            metadata["credentials"] = value_of(expected.credentials_json)
        assert value_of(source.metadata_json) == metadata


# What is in it


@pytest.mark.parametrize("seed", SEEDS)
def test_default_number_is_mostly_movable(seed: int) -> None:
    kinds = Counter(source.kind for source in demo_data.sources(seed=seed))
    assert kinds.total() == 2_000
    assert kinds["movable"] >= 1_900
    assert set(kinds) == {"movable", "unsupported", "too_large", "none"}


def test_kind_is_what_the_metadata_says() -> None:
    for source in demo_data.sources():
        assert source.kind == kind_of(source.metadata_json), source.name


@pytest.mark.parametrize("number", [200, 2_000])
def test_awkward_sources_are_always_there(number: int) -> None:
    names = [content.name for content in awkward(demo_data.DEFAULT_SEED)]
    assert len(set(names)) == len(names)
    assert [source.name for source in demo_data.sources(number)][: len(names)] == names


def test_a_small_demo_has_ordinary_sources_only() -> None:
    small = list(demo_data.sources(demo_data.AWKWARD_FROM - 1))
    assert len(small) == demo_data.AWKWARD_FROM - 1
    assert not {source.name for source in small} & {content.name for content in awkward(demo_data.DEFAULT_SEED)}
    assert list(demo_data.sources(0)) == []


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("60 KiB", 61_440),
        ("The limit to the byte", LIMIT),
        ("One byte over the limit", LIMIT + 1),
        ("1 MiB", 1_048_576),
    ],
)
def test_sizes(name: str, size: int) -> None:
    assert len(awkward_credentials(name)) == size


def test_jsonb_text_of_movable_credentials_can_be_over_the_limit() -> None:
    spaced = json.dumps(json.loads(awkward_credentials("2,000 keys, close to the limit")))
    assert len(spaced) > LIMIT


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("9007199254740993, which is beyond 2^53", "9007199254740993"),
        ("1e400, beyond a double", "1e400"),
        ("Trailing zeros", "1.50"),
        ("Decimals with 30 digits", "0.123456789012345678901234567891"),
        ("A value that looks like a ref", '"source-secret:v1:'),
        ("A value that looks like an encrypted secret", r"{\"algorithm\":\"aes-256-gcm\",\"ciphertext\":"),
        ("A backslash and u0000 as literal text", r"\\u0000"),
        ("Jina with an empty key", '{"api_key":""}'),
        ("An empty object", "{}"),
        ("Odd keys", '{"":'),
    ],
)
def test_awkward_texts(name: str, text: str) -> None:
    assert text in awkward_credentials(name)


def test_awkward_shapes() -> None:
    account = json.loads(awkward_credentials("A field named credentials"))
    assert "\n" in json.loads(account["credentials"])["private_key"]
    assert awkward_credentials("50 levels deep").count("{") == 50
    assert len(json.loads(awkward_credentials("2,000 keys"))) == 2_000
    keys = json.loads(awkward_credentials("Characters beyond the BMP, keys too"))
    assert sorted(keys) != sorted(keys, key=lambda key: key.encode("utf-16-be"))
    assert [source.name for source in demo_data.sources() if source.version == 0] == ["Version 0"]


def test_every_provider_asks_for_its_fields() -> None:
    asked = set()
    for source in demo_data.sources(199):
        metadata = json.loads(source.metadata_json)
        if source.kind == "movable":
            asked.add((metadata["provider"], source.type, metadata["authType"], *sorted(metadata["credentials"])))
    assert sorted(map(" ".join, asked)) == FIELDS.split("\n")


def test_rows_look_like_real_ones() -> None:
    spaces = demo_data.spaces()
    tenants = {space.id: space.tenant_id for space in spaces}
    assert len(tenants) == 12
    assert sorted(Counter(tenants.values()).values()) == [4, 4, 4]
    assert any(not tenant.isascii() and " " in tenant for tenant in tenants.values())
    assert all(tenant == tenant.strip() and 1 <= len(tenant) <= 255 for tenant in tenants.values())

    sources = list(demo_data.sources())
    assert {source.knowledge_space_id for source in sources} == set(tenants)
    assert len({source.id for source in sources}) == 2_000
    for source in sources:
        assert source.tenant_id == tenants[source.knowledge_space_id]
        assert source.id.version == 4
        assert source.status in {"active", "syncing", "error", "disabled"}
        assert source.type in {"online_drive", "online_document", "file_storage", "website_crawl"}
        assert 1 <= source.version <= 40 or source.name == "Version 0"
        assert datetime(2024, 11, 1, tzinfo=UTC) <= source.created_at <= source.updated_at
        assert source.updated_at < datetime(2026, 11, 1, tzinfo=UTC)
        assert source.updated_at.tzinfo is UTC
    years = {source.created_at.year for source in sources}
    assert years == {2024, 2025, 2026}


def test_values_are_made_up() -> None:
    for source in demo_data.sources():
        for text in (source.uri, *strings_in(value_of(source.metadata_json))):
            for host in re.findall(r"https?://(?:[^/@\s\"]*@)?([^/:\s\"]+)", text):
                assert host.endswith(".example"), source.name
    for expected in demo_data.expected(199):
        for text in strings_in(list(value_of(expected.credentials_json or "{}").values())):
            assert "demo-" in text or text.endswith(".example") or text == "", expected


@pytest.mark.parametrize("make", [demo_data.spaces, demo_data.sources, demo_data.expected])
def test_negative_number(make: Any) -> None:
    with pytest.raises(ValueError, match=r"^The number of demo sources must be 0 or more, not -1\.$"):
        list(make(number=-1))


# In a database


def rows(sql: str, *parameters: UUID) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters or None)
        return cursor.fetchall() if cursor.description else []


@pytest.mark.django_db
def test_load_inserts_what_is_expected() -> None:
    loaded = demo_data.load(connection)

    assert loaded == Counter(source.kind for source in demo_data.sources())
    assert rows("SELECT count(*), count(DISTINCT tenant_id) FROM knowledge_spaces") == [(12, 3)]
    stored = {
        source_id: (scope, value_of(metadata))
        for source_id, *scope, metadata in rows(
            "SELECT s.id, k.tenant_id, k.id::text, s.id::text, s.metadata::text "
            "FROM sources s JOIN knowledge_spaces k ON k.id = s.knowledge_space_id"
        )
    }
    assert len(stored) == 2_000
    for source_id, scope, credentials, other, _ in demo_data.expected():
        metadata = value_of(other)
        if credentials is not None:
            metadata["credentials"] = value_of(credentials)
        assert stored[source_id] == (list(scope), metadata)


@pytest.mark.django_db
@pytest.mark.parametrize("seed", [3, -7])
def test_load_again_changes_nothing(seed: int) -> None:
    demo_data.load(connection, 250, seed)
    rows("UPDATE sources SET metadata = '{}', version = version + 1, name = 'renamed', updated_at = now()")
    rows("DELETE FROM sources WHERE id = %s", next(demo_data.sources(250, seed)).id)
    before = rows("SELECT id, xmin::text, metadata::text FROM sources ORDER BY id")

    assert demo_data.load(connection, 250, seed) == Counter()
    assert rows("SELECT id, xmin::text, metadata::text FROM sources ORDER BY id") == before
    assert len(before) == 249
    assert demo_data.foreign_sources(connection) == 0


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("number", "seed", "asked"),
    [(1_500, 1, "1,500 sources with seed 1"), (1_200, 2, "1,200 sources with seed 2")],
)
def test_load_refuses_another_demo(number: int, seed: int, asked: str) -> None:
    demo_data.load(connection, 1_200, 1)
    message = (
        f"This database holds another demo: 1,200 sources with seed 1; asked for were {asked}. "
        "Ask for the same number and seed as before, or use another database."
    )
    with pytest.raises(demo_data.DemoDataError, match=f"^{re.escape(message)}$"):
        demo_data.load(connection, number, seed)
    assert rows("SELECT count(*) FROM sources") == [(1_200,)]


@pytest.mark.django_db
def test_foreign_sources_are_counted() -> None:
    assert demo_data.foreign_sources(connection) == 0
    demo_data.load(connection, 20, -7)
    assert demo_data.foreign_sources(connection) == 0
    columns = "knowledge_space_id, type, status, name, uri, metadata, permission_scope, version"
    rows(
        f"INSERT INTO sources (id, created_at, updated_at, {columns}) "
        f"SELECT gen_random_uuid(), created_at, updated_at, {columns} FROM sources"
    )
    assert demo_data.foreign_sources(connection) == 20


@pytest.mark.django_db
def test_a_space_with_a_slug_like_ours_is_not_ours() -> None:
    rows(
        "INSERT INTO knowledge_spaces (id, tenant_id, slug, name, created_at, updated_at) "
        "VALUES (gen_random_uuid(), 'somebody', 'demo-1-20-notes', 'Notes', now(), now())"
    )
    assert demo_data.load(connection, 20, 5).total() == 20


@pytest.mark.django_db(transaction=True)
def test_load_needs_a_transaction() -> None:
    message = "Demo data needs one transaction for both tables: call load() in transaction.atomic()."
    with pytest.raises(demo_data.DemoDataError, match=f"^{re.escape(message)}$"):
        demo_data.load(connection, 20)
    assert rows("SELECT count(*) FROM knowledge_spaces") == [(0,)]


@pytest.mark.django_db(transaction=True)
def test_two_demos_at_once_wait_for_each_other() -> None:
    # Another seed, so that no unique index makes the second one wait.
    other = connection.copy()
    try:
        with transaction.atomic():
            demo_data.load(connection, 20)
            other.set_autocommit(False)
            with other.cursor() as cursor:
                cursor.execute("SET LOCAL lock_timeout = '50ms'")
            with pytest.raises(OperationalError) as refused:
                demo_data.load(other, 20, 9)
            assert isinstance(refused.value.__cause__, psycopg.errors.LockNotAvailable)
            other.rollback()
        with pytest.raises(demo_data.DemoDataError, match="This database holds another demo"):
            demo_data.load(other, 20, 9)
        other.rollback()
        assert demo_data.load(other, 20) == Counter()
    finally:
        other.close()


@pytest.mark.django_db
def test_load_takes_a_plain_psycopg_connection() -> None:
    connection.ensure_connection()
    assert demo_data.load(connection.connection, 20).total() == 20

"""System checks: the settings, the keys, the store, the database. Each names the setting and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core import checks
from django.core.checks import CheckMessage, Error, Tags
from django.db import DatabaseError, InterfaceError, connections, router

from kfs_credentials.binding import check_bindable
from kfs_credentials.conf import NAME, key_ring, settings
from kfs_credentials.errors import (
    BindingBroken,
    InvalidKey,
    InvalidSetting,
    KeyClosed,
    SecretStoreError,
    StoreMisconfigured,
    StoreUnavailable,
)
from kfs_credentials.keys import held_keys, missing_from_ring, refs_held, refuse_closed, unknown_in_use
from kfs_credentials.models import Source
from kfs_credentials.selection import Selection
from kfs_credentials.stores import secret_stores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kfs_credentials.keys import HeldKey

TAG = "kfs_credentials"
OLDEST_POSTGRESQL = 15


@checks.register(TAG, Tags.security)
def check_settings(**_: Any) -> list[CheckMessage]:
    """E001: a setting is not what it must be, or there is no such setting."""
    return [Error(problem, id="kfs_credentials.E001") for problem in settings.problems()]


@checks.register(TAG, Tags.security)
def check_keys(**_: Any) -> list[CheckMessage]:
    """E002: a key is missing, malformed, too short, given twice, or the README's example."""
    try:
        key_ring()
    except InvalidKey as error:
        hint = "The first key encrypts, all of them decrypt. Keep them with your other production secrets."
        return [Error(str(error), hint=hint, id="kfs_credentials.E002")]
    except InvalidSetting:
        pass  # E001 says so
    return []


@checks.register(TAG, Tags.security)
def check_stores(**_: Any) -> list[CheckMessage]:
    """E003: a secret store cannot be made from its settings. E004: it cannot be used. W010: it does not answer."""
    try:
        aliases = settings.STORES
    except InvalidSetting:
        return []  # E001 says so
    found: list[CheckMessage] = []
    for alias in dict.fromkeys(["default", *aliases]):
        try:
            store = secret_stores[alias]
        except StoreMisconfigured as error:
            found.append(Error(str(error), id="kfs_credentials.E003"))
            continue
        try:
            store.check()
        except (InvalidKey, InvalidSetting):
            pass  # E001 and E002 say so
        except StoreUnavailable as error:
            # It may be back any moment, and much does not need it: no reason to keep a process from starting.
            found.append(checks.Warning(f"{NAME}['STORES']['{alias}']: {error}", id="kfs_credentials.W010"))
        except SecretStoreError as error:
            found.append(Error(f"{NAME}['STORES']['{alias}']: {error}", id="kfs_credentials.E004"))
    return found


@checks.register(TAG)
def check_engine(**_: Any) -> list[CheckMessage]:
    """E005: the database that the sources live in is not PostgreSQL, or not through psycopg 3."""
    alias = router.db_for_write(Source)
    connection = connections[alias]
    if connection.vendor != "postgresql":
        return [
            Error(
                f"kfs_credentials needs PostgreSQL, and DATABASES['{alias}'] is {connection.display_name}.",
                hint="Route the app to a PostgreSQL database (DATABASE_ROUTERS), or change the ENGINE.",
                id="kfs_credentials.E005",
            )
        ]
    from django.db.backends.postgresql.psycopg_any import is_psycopg3

    if not is_psycopg3:
        return [
            Error(
                "kfs_credentials needs psycopg 3, and Django uses psycopg2 here.",
                hint='Install it: pip install "kfs-credentials[binary]".',
                id="kfs_credentials.E005",
            )
        ]
    return []


@checks.register(TAG, Tags.database)
def check_database(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """E006: the server is too old. E007: row-level security hides rows. E008: an index of ours is INVALID.

    W009: the database could not be asked.
    """
    alias = router.db_for_write(Source)
    if alias not in (databases or ()) or connections[alias].vendor != "postgresql":
        return []
    try:
        connections[alias].ensure_connection()
        return [*_old_server(alias), *_hidden_rows(alias), *_invalid_indexes(alias)]
    except (DatabaseError, InterfaceError) as error:
        return [
            checks.Warning(
                f"DATABASES['{alias}'] could not be asked for its version, row-level security and indexes "
                f"({type(error).__name__}).",
                hint="Check again once it can be reached.",
                id="kfs_credentials.W009",
            )
        ]


@checks.register(TAG, Tags.security, deploy=True)
def check_closed_key(**_: Any) -> list[CheckMessage]:
    """E016: the first key is closed. Where the database cannot be asked, W012 says so."""
    alias = router.db_for_write(Source)
    try:
        if connections[alias].vendor == "postgresql":
            refuse_closed(alias)
    except KeyClosed as error:
        return [Error(str(error), id="kfs_credentials.E016")]
    except (InvalidKey, InvalidSetting, DatabaseError, InterfaceError):
        pass  # E001, E002 and W012 say so
    return []


@checks.register(TAG, Tags.security, deploy=True)
def check_binding(**_: Any) -> list[CheckMessage]:
    """E012: the database and a secret store do not know each other. W013: that could not be found out."""
    alias = router.db_for_write(Source)
    if connections[alias].vendor != "postgresql":
        return []  # E005 says so
    found: list[CheckMessage] = []
    try:
        for store in settings.STORES:
            found += _binding(alias, store)
    except InvalidSetting:
        pass  # E001 says so
    except (DatabaseError, InterfaceError) as error:
        found.append(
            checks.Warning(
                f"DATABASES['{alias}'] could not be asked which secret store it is bound to ({type(error).__name__}).",
                hint="Check again once it can be reached and `manage.py migrate` has run.",
                id="kfs_credentials.W013",
            )
        )
    return found


def _binding(using: str, store: str) -> Iterator[CheckMessage]:
    try:
        check_bindable(using, store)
    except BindingBroken as error:
        yield Error(str(error), id="kfs_credentials.E012")
    except (InvalidKey, SecretStoreError):
        pass  # E002 to E004 say so


@checks.register(TAG, Tags.security, deploy=True)
def check_held_keys(**_: Any) -> list[CheckMessage]:
    """E011: a key that secrets are sealed under is missing. W015: of some it is not known under which key they are.

    W012: the database could not be asked.

    With --deploy, and whatever --database says: without the key, these secrets are lost.
    """
    alias = router.db_for_write(Source)
    try:
        key_ring()
        if connections[alias].vendor == "postgresql":
            keys = held_keys(alias)
            return [*_missing_keys(alias, keys), *_unknown_keys(alias, keys)]
    except (InvalidKey, InvalidSetting):
        pass  # E001 and E002 say so
    except (DatabaseError, InterfaceError) as error:
        return [
            checks.Warning(
                f"DATABASES['{alias}'] could not be asked which keys its secrets are sealed under "
                f"({type(error).__name__}).",
                hint="Check again once it can be reached, and is migrated.",
                id="kfs_credentials.W012",
            )
        ]
    return []


def _missing_keys(alias: str, keys: Sequence[HeldKey]) -> Iterator[CheckMessage]:
    for key in missing_from_ring(keys):
        yield Error(
            f"{NAME}['KEYS'] lacks key {key['key_id']}, and {refs_held(key):,} ref(s) in DATABASES['{alias}'] that are "
            f"not erased are sealed under it: {key['live']:,} in use, {key['retired']:,} to be erased, "
            f"{key['candidate']:,} reserved.",
            hint="Put the key back, behind the others. `manage.py reencrypt_secrets` moves what it holds to the "
            "first one; then it can go.",
            id="kfs_credentials.E011",
        )


def _unknown_keys(alias: str, keys: Sequence[HeldKey]) -> Iterator[CheckMessage]:
    if unknown := unknown_in_use(keys):
        yield checks.Warning(
            f"Of {unknown:,} ref(s) in use in DATABASES['{alias}'] it is not known under which key they are sealed.",
            hint="`manage.py reencrypt_secrets` finds out, and moves them to the first key. Until then, remove no key "
            f"from {NAME}['KEYS'].",
            id="kfs_credentials.W015",
        )


@checks.register(TAG, Tags.security, deploy=True)
def check_legacy_reads(**_: Any) -> list[CheckMessage]:
    """E013: LEGACY_READS is off too early. W014: the database could not be asked whether it is.

    What lies in clear without a ref is then read by nobody.
    """
    alias = router.db_for_write(Source)
    try:
        if settings.LEGACY_READS or connections[alias].vendor != "postgresql":
            return []
        rows = Selection.of(alias)
        left = rows.sources().legacy().filter(rows.is_open()).count()
    except InvalidSetting:
        return []  # E001 says so
    except (DatabaseError, InterfaceError) as error:
        return [
            checks.Warning(
                f"DATABASES['{alias}'] could not be asked whether credentials still lie in clear "
                f"({type(error).__name__}).",
                hint="Check again once it can be reached, and is migrated.",
                id="kfs_credentials.W014",
            )
        ]
    if not left:
        return []
    return [
        Error(
            f"{NAME}['LEGACY_READS'] is False, and {left:,} source(s) in DATABASES['{alias}'] have credentials in "
            "clear and no ref: `resolve_credentials` refuses them.",
            hint="Leave it True until `manage.py run_credential_backfill` has moved them; "
            "`manage.py credential_status` says what is left.",
            id="kfs_credentials.E013",
        )
    ]


def _old_server(alias: str) -> Iterator[CheckMessage]:
    version = connections[alias].get_database_version()[0]
    if version < OLDEST_POSTGRESQL:
        yield Error(
            f"kfs_credentials needs PostgreSQL {OLDEST_POSTGRESQL} or newer, and DATABASES['{alias}'] is "
            f"PostgreSQL {version}.",
            hint="Upgrade the server.",
            id="kfs_credentials.E006",
        )


def _hidden_rows(alias: str) -> Iterator[CheckMessage]:
    for table in hidden_tables(alias):
        yield Error(
            f"Row-level security hides rows of {table} from this role, and a source that cannot be seen would "
            "be taken for one that was deleted.",
            hint="Use a role with BYPASSRLS, or the owner of the tables without FORCE ROW LEVEL SECURITY.",
            id="kfs_credentials.E007",
        )


def _invalid_indexes(alias: str) -> Iterator[CheckMessage]:
    for index in invalid_indexes(alias):
        yield Error(
            f"The index {index} is INVALID: an interrupted CREATE INDEX CONCURRENTLY left it behind.",
            hint=f"DROP INDEX CONCURRENTLY {index}; then build it again as the migration has it.",
            id="kfs_credentials.E008",
        )


TABLES = ("knowledge_spaces", "sources", "source_credential_backfills", "source_secret_lifecycle_refs")


def hidden_tables(using: str) -> list[str]:
    """Return the tables that row-level security hides rows of, from the role of alias `using`."""
    with connections[using].cursor() as cursor:
        cursor.execute(
            "SELECT name FROM unnest(%s::text[]) AS name "
            "WHERE to_regclass(name) IS NOT NULL AND row_security_active(to_regclass(name))",
            [list(TABLES)],
        )
        return [name for (name,) in cursor.fetchall()]


def invalid_indexes(using: str) -> list[str]:
    """Return the indexes of our models that are not valid, and are not being built at this moment.

    Other indexes of a host on these tables are its own business.
    """
    models = apps.get_app_config("kfs_credentials").get_models()
    names = [wanted.name for model in models for wanted in (*model._meta.indexes, *model._meta.constraints)]
    with connections[using].cursor() as cursor:
        cursor.execute(
            "SELECT indexrelid::regclass::text FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid "
            "WHERE NOT indisvalid AND relname = ANY (%s) "
            "AND indrelid IN (SELECT to_regclass(name) FROM unnest(%s::text[]) AS name) "
            "AND indexrelid NOT IN (SELECT index_relid FROM pg_stat_progress_create_index)",
            [names, list(TABLES)],
        )
        return [name for (name,) in cursor.fetchall()]

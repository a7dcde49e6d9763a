"""Each error has a code that may be shown to a client, and keeps it. Where knowledge-fs has one, it is the same."""

from __future__ import annotations

from collections.abc import Iterator

from kfs_credentials import errors
from kfs_credentials.errors import KfsCredentialsError

CODES: dict[type[KfsCredentialsError], str] = {
    # Of values that a caller passed in.
    errors.InvalidCredentials: "SOURCE_CREDENTIALS_INVALID",
    errors.CredentialsTooLarge: "SOURCE_SECRET_TOO_LARGE",
    errors.InvalidScope: "SOURCE_SCOPE_INVALID",
    errors.InvalidMetadata: "SOURCE_METADATA_INVALID",
    errors.CredentialsRejected: "SOURCE_CREDENTIAL_TEST_FAILED",
    # Of the store.
    errors.SecretStoreError: "SOURCE_SECRET_STORE_FAILED",
    errors.SecretNotFound: "SOURCE_CREDENTIAL_UNAVAILABLE",
    errors.SecretIntegrityError: "SOURCE_SECRET_INTEGRITY_FAILED",
    errors.SecretConflict: "SOURCE_SECRET_REF_CONFLICT",
    errors.StoreUnavailable: "SOURCE_SECRET_STORE_UNAVAILABLE",
    errors.NotAsSaid: "SOURCE_SECRET_STORE_CONTRADICTED",
    errors.SecretLost: "SOURCE_SECRET_STORE_CONTRADICTED",
    errors.StoreFull: "SOURCE_SECRET_STORE_UNAVAILABLE",
    errors.StoreDenied: "SOURCE_SECRET_STORE_DENIED",
    errors.StoreMisconfigured: "SOURCE_SECRET_STORE_MISCONFIGURED",
    errors.BindingBroken: "SOURCE_SECRET_STORE_MISCONFIGURED",
    errors.StoreNotConfigured: "SOURCE_SECRET_STORE_MISCONFIGURED",
    errors.SecretRetained: "SOURCE_SECRET_RETAINED",
    # Of the services.
    errors.SourceNotFound: "SOURCE_NOT_FOUND",
    errors.SpaceNotFound: "KNOWLEDGE_SPACE_NOT_FOUND",
    errors.SourceExists: "SOURCE_EXISTS",
    errors.BeingDeleted: "SOURCE_BEING_DELETED",
    errors.VersionConflict: "SOURCE_VERSION_CONFLICT",
    errors.NoCredentials: "SOURCE_CREDENTIALS_MISSING",
    errors.SourceBusy: "SOURCE_BUSY",
    errors.InvalidOperation: "SOURCE_OPERATION_INVALID",
    # An operation that did not come to its end, for whatever other reason.
    errors.ServiceError: "SOURCE_CREDENTIAL_MUTATION_FAILED",
    errors.MutationFailed: "SOURCE_CREDENTIAL_MUTATION_FAILED",
    errors.OperationOver: "SOURCE_CREDENTIAL_MUTATION_FAILED",
    errors.KeyClosed: "SOURCE_SECRET_KEY_CLOSED",
}


def family(error: type[KfsCredentialsError] = KfsCredentialsError) -> Iterator[type[KfsCredentialsError]]:
    """Yield an error and all that are of its kind, as far as they are public."""
    yield error
    for kind in error.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from family(kind)


def test_each_error_keeps_its_code() -> None:
    assert {error: error.code for error in CODES} == CODES


def test_every_other_error_has_the_code_of_the_family() -> None:
    others = {error.__name__: error.code for error in family() if error not in CODES}
    assert set(others.values()) == {"SOURCE_CREDENTIAL_ERROR"}
    # None of these comes from a client's request: settings, keys, workers.
    assert others.keys() == {
        *("KfsCredentialsError", "InvalidKey", "InvalidRef", "InvalidSetting", "LeaseLost", "ImproperlyPrepared"),
        *("NotMigrated", "RowsHidden", "InvalidIndex", "DatabaseRefused"),
        "WorkersPaused",
    }


def test_every_error_of_the_services_is_one_of_theirs() -> None:
    assert set(family(errors.ServiceError)) <= CODES.keys()

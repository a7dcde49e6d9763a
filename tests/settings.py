"""Settings for the tests. The database is DATABASE_URL's server, or a private one: see tests/conftest.py."""

from __future__ import annotations

import secrets
import tempfile

SECRET_KEY = "tests-only"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "kfs_credentials",
    "example_project",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
ROOT_URLCONF = "example_project.urls"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
STATIC_URL = "static/"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

# The name is enough to import these settings (mypy does); conftest fills in the server before the first connection.
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres"}}

KFS_CREDENTIALS = {
    "KEYS": [secrets.token_bytes(32)],
    "STORES": {
        "default": {
            "BACKEND": "kfs_credentials.stores.encrypted.EncryptedStore",
            "OPTIONS": {
                "storage": {
                    "BACKEND": "kfs_credentials.stores.files.DurableFileStorage",
                    # Each test gets a directory of its own: the fixture `store`. This one is made by nobody.
                    "OPTIONS": {"location": f"{tempfile.gettempdir()}/kfs-credentials-no-such-directory"},
                },
            },
        },
    },
    "POLL_INTERVAL": 0.05,
}

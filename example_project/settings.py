"""The example project's settings, all from the environment; without it, those of `make demo`.

DATABASE_URL, KFS_SECRETS_DIR, KFS_CREDENTIALS_KEYS (separated by commas), and KFS_CREDENTIALS_<NAME> for each other
setting (durations in seconds). What knowledge-fs's own service reads is honoured too.
"""

from __future__ import annotations

from example_project import environment
from example_project.environment import env

SECRET_KEY = env.str("DJANGO_SECRET_KEY", default="example-project-only")
DEBUG = env.bool("DJANGO_DEBUG", default=False)
ALLOWED_HOSTS = env.list("DJANGO_ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]"])

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "kfs_credentials",
    "example_project",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
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
TIME_ZONE = "UTC"
STATIC_URL = "static/"

DATABASES = {"default": environment.database()}

KFS_CREDENTIALS = {
    "KEYS": environment.keys(),
    "STORES": {
        "default": {
            "BACKEND": "kfs_credentials.stores.encrypted.EncryptedStore",
            "OPTIONS": {
                "storage": {
                    "BACKEND": "kfs_credentials.stores.files.DurableFileStorage",
                    "OPTIONS": {"location": environment.secrets_directory()},
                },
            },
        },
    },
    **environment.credentials_settings(),
}

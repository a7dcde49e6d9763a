"""The example project with everything logged that can be."""

from __future__ import annotations

from example_project.settings import *  # noqa: F403

DEBUG = True
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"everything": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["everything"], "level": "DEBUG"},
    "loggers": {
        "django": {"handlers": [], "level": "DEBUG"},
        "django.db.backends": {"level": "DEBUG"},
        "kfs_credentials": {"level": "DEBUG"},
    },
}

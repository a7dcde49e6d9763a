"""The application's entry in INSTALLED_APPS."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class KfsCredentialsConfig(AppConfig):
    """Registers the system checks, and what logs."""

    name = "kfs_credentials"
    label = "kfs_credentials"
    verbose_name = _("Source credentials")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Import the checks and the receivers, which register themselves."""
        from kfs_credentials import checks, receivers  # noqa: F401

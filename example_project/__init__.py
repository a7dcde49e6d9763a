"""A Django project that uses kfs_credentials, and the demo data that it shows it with."""

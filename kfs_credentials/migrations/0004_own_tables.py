from django.db import migrations, models

from kfs_credentials.sql.operations import RunFile


class Migration(migrations.Migration):
    dependencies = [("kfs_credentials", "0003_ledger")]
    operations = [
        RunFile(
            "0004_own_tables",
            reversible=True,
            state_operations=[
                migrations.CreateModel(
                    name="Acknowledgement",
                    fields=[
                        (
                            "source_id",
                            models.UUIDField(primary_key=True, serialize=False, verbose_name="source"),
                        ),
                        (
                            "shape",
                            models.TextField(
                                choices=[
                                    ("string", "string"),
                                    ("number", "number"),
                                    ("boolean", "boolean"),
                                    ("array", "array"),
                                    ("too_large", "too large"),
                                ],
                                verbose_name="shape",
                            ),
                        ),
                        ("acknowledged_by", models.TextField(verbose_name="acknowledged by")),
                        ("acknowledged_at", models.DateTimeField(verbose_name="acknowledged at")),
                    ],
                    options={
                        "verbose_name": "acknowledgement",
                        "verbose_name_plural": "acknowledgements",
                        "db_table": "kfs_credentials_acknowledgement",
                    },
                ),
                migrations.CreateModel(
                    name="SecretObject",
                    fields=[
                        (
                            "credential_ref",
                            models.TextField(primary_key=True, serialize=False, verbose_name="credential ref"),
                        ),
                        ("store", models.TextField(verbose_name="store alias")),
                        ("key_id", models.TextField(blank=True, null=True, verbose_name="key id")),
                        ("size", models.IntegerField(blank=True, null=True, verbose_name="size in bytes")),
                        ("created_at", models.DateTimeField(verbose_name="created at")),
                        ("updated_at", models.DateTimeField(verbose_name="updated at")),
                    ],
                    options={
                        "verbose_name": "secret object",
                        "verbose_name_plural": "secret objects",
                        "db_table": "kfs_credentials_secret_object",
                    },
                ),
            ],
        ),
    ]

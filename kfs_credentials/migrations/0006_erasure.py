from django.db import migrations, models

import kfs_credentials.models.schema
import kfs_credentials.models.secret_object
from kfs_credentials.sql.operations import RunFile


class Migration(migrations.Migration):
    dependencies = [("kfs_credentials", "0005_register_refs")]
    operations = [
        RunFile(
            "0006_erasure",
            reversible=True,
            state_operations=[
                migrations.CreateModel(
                    name="Round",
                    fields=[
                        ("name", models.TextField(primary_key=True, serialize=False, verbose_name="name")),
                        ("worker_id", models.TextField(blank=True, null=True, verbose_name="worker")),
                        ("lease_token", models.UUIDField(blank=True, null=True, verbose_name="lease token")),
                        (
                            "lease_expires_at",
                            models.DateTimeField(blank=True, null=True, verbose_name="lease expires at"),
                        ),
                        ("started_at", models.DateTimeField(blank=True, null=True, verbose_name="started at")),
                        ("covers_until", models.DateTimeField(blank=True, null=True, verbose_name="covers until")),
                        ("completed_at", models.DateTimeField(blank=True, null=True, verbose_name="completed at")),
                        ("found", models.IntegerField(verbose_name="found")),
                    ],
                    options={
                        "verbose_name": "round",
                        "verbose_name_plural": "rounds",
                        "db_table": "kfs_credentials_round",
                    },
                ),
                migrations.AlterModelOptions(
                    name="sourcesecretlifecycleref",
                    options={
                        "base_manager_name": "objects",
                        "permissions": [
                            ("view_full_ref", "Can view full refs"),
                            ("settle_sourcesecretlifecycleref", "Can retry erasures and choose between displaced refs"),
                            ("abandon_sourcesecretlifecycleref", "Can give up on erasures that fail"),
                        ],
                        "verbose_name": "credential ref",
                        "verbose_name_plural": "credential refs",
                    },
                ),
                migrations.AddField(
                    model_name="secretobject",
                    name="abandoned_at",
                    field=models.DateTimeField(blank=True, null=True, verbose_name="abandoned at"),
                ),
                migrations.AddField(
                    model_name="secretobject",
                    name="abandoned_by",
                    field=models.TextField(blank=True, null=True, verbose_name="abandoned by"),
                ),
                migrations.AddField(
                    model_name="secretobject",
                    name="abandoned_reason",
                    field=models.TextField(blank=True, null=True, verbose_name="reason"),
                ),
                migrations.AddField(
                    model_name="secretobject",
                    name="attention",
                    field=models.TextField(
                        blank=True,
                        choices=[
                            ("erasure_fails", "its erasure failed PARK_AFTER times; tried again once a day"),
                            ("retained", "the store may not erase it yet"),
                            ("displaced", "an old writer brought back an older ref; readable until a person chooses"),
                            ("unreadable", "a source names it, and it can neither be used again nor be copied"),
                        ],
                        null=True,
                        verbose_name="attention",
                    ),
                ),
                migrations.AddField(
                    model_name="secretobject",
                    name="first_claimed_at",
                    field=models.DateTimeField(blank=True, null=True, verbose_name="first claimed for erasure at"),
                ),
                migrations.AddField(
                    model_name="secretobject",
                    name="first_erased_at",
                    field=models.DateTimeField(blank=True, null=True, verbose_name="first erased at"),
                ),
                migrations.AddField(
                    model_name="secretobject",
                    name="receipt",
                    field=models.TextField(
                        blank=True,
                        choices=[("erased", "erased"), ("absent", "already absent")],
                        null=True,
                        verbose_name="receipt",
                    ),
                ),
                migrations.AddIndex(
                    model_name="secretobject",
                    index=kfs_credentials.models.schema.SeedIndex(
                        kfs_credentials.models.secret_object.Digest("credential_ref"),
                        name="kfs_credentials_secret_object_digest_idx",
                    ),
                ),
                migrations.AddIndex(
                    model_name="secretobject",
                    index=kfs_credentials.models.schema.SeedIndex(
                        condition=models.Q(("attention__isnull", False)),
                        fields=["attention"],
                        name="kfs_credentials_secret_object_attention_idx",
                    ),
                ),
            ],
        ),
    ]

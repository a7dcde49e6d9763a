import uuid

from django.db import migrations, models

import kfs_credentials.models.schema
from kfs_credentials.sql.operations import RunFile


class Migration(migrations.Migration):
    dependencies = [("kfs_credentials", "0006_erasure")]
    operations = [
        RunFile(
            "0007_operations",
            reversible=True,
            state_operations=[
                migrations.CreateModel(
                    name="Binding",
                    fields=[
                        ("store", models.TextField(primary_key=True, serialize=False, verbose_name="store alias")),
                        ("environment_id", models.UUIDField(default=uuid.uuid4, verbose_name="environment id")),
                        ("environment", models.TextField(verbose_name="environment")),
                        ("system_identifier", models.TextField(verbose_name="system identifier of the server")),
                        ("database_oid", models.BigIntegerField(verbose_name="OID of the database")),
                        ("epoch", models.BigIntegerField(verbose_name="epoch")),
                        ("shown_epoch", models.BigIntegerField(verbose_name="epoch that the store has shown")),
                        ("bound_at", models.DateTimeField(verbose_name="bound at")),
                        ("bound_by", models.TextField(verbose_name="bound by")),
                        ("confirmed_at", models.DateTimeField(blank=True, null=True, verbose_name="confirmed at")),
                        ("worker_id", models.TextField(blank=True, null=True, verbose_name="worker")),
                        ("lease_token", models.UUIDField(blank=True, null=True, verbose_name="lease token")),
                        (
                            "lease_expires_at",
                            models.DateTimeField(blank=True, null=True, verbose_name="lease expires at"),
                        ),
                    ],
                    options={
                        "verbose_name": "binding",
                        "verbose_name_plural": "bindings",
                        "db_table": "kfs_credentials_binding",
                    },
                ),
                migrations.CreateModel(
                    name="Checkpoint",
                    fields=[
                        ("name", models.TextField(primary_key=True, serialize=False, verbose_name="name")),
                        ("position", models.TextField(verbose_name="position")),
                        ("data", models.JSONField(default=dict, verbose_name="data")),
                        ("started_at", models.DateTimeField(verbose_name="started at")),
                        ("updated_at", models.DateTimeField(verbose_name="updated at")),
                    ],
                    options={
                        "verbose_name": "checkpoint",
                        "verbose_name_plural": "checkpoints",
                        "db_table": "kfs_credentials_checkpoint",
                    },
                ),
                migrations.CreateModel(
                    name="ClosedKey",
                    fields=[
                        ("key_id", models.TextField(primary_key=True, serialize=False, verbose_name="key id")),
                        ("closed_at", models.DateTimeField(verbose_name="closed at")),
                        ("closed_by", models.TextField(verbose_name="closed by")),
                    ],
                    options={
                        "verbose_name": "closed key",
                        "verbose_name_plural": "closed keys",
                        "db_table": "kfs_credentials_closed_key",
                    },
                ),
                migrations.CreateModel(
                    name="Tick",
                    fields=[
                        ("role", models.TextField(primary_key=True, serialize=False, verbose_name="role")),
                        ("worker_id", models.TextField(verbose_name="worker")),
                        ("ticked_at", models.DateTimeField(verbose_name="last tick")),
                    ],
                    options={
                        "verbose_name": "tick",
                        "verbose_name_plural": "ticks",
                        "db_table": "kfs_credentials_tick",
                    },
                ),
                migrations.CreateModel(
                    name="Event",
                    fields=[
                        ("id", models.BigAutoField(primary_key=True, serialize=False)),
                        ("created_at", models.DateTimeField(verbose_name="at")),
                        ("kind", models.TextField(verbose_name="event")),
                        ("actor", models.TextField(verbose_name="actor")),
                        ("credential_ref", models.TextField(blank=True, null=True, verbose_name="credential ref")),
                        ("tenant_id", models.TextField(blank=True, null=True, verbose_name="tenant")),
                        ("knowledge_space_id", models.UUIDField(blank=True, null=True, verbose_name="knowledge space")),
                        ("source_id", models.UUIDField(blank=True, null=True, verbose_name="source")),
                        ("detail", models.TextField(blank=True, null=True, verbose_name="detail")),
                    ],
                    options={
                        "verbose_name": "event",
                        "verbose_name_plural": "events",
                        "db_table": "kfs_credentials_event",
                        "indexes": [
                            kfs_credentials.models.schema.SeedIndex(
                                fields=["credential_ref", "id"], name="kfs_credentials_event_ref_idx"
                            ),
                            kfs_credentials.models.schema.SeedIndex(
                                fields=["kind", "created_at"], name="kfs_credentials_event_kind_idx"
                            ),
                        ],
                    },
                ),
                migrations.CreateModel(
                    name="Pause",
                    fields=[
                        ("id", models.SmallIntegerField(default=1, editable=False, primary_key=True, serialize=False)),
                        ("paused_at", models.DateTimeField(verbose_name="paused at")),
                        ("paused_by", models.TextField(verbose_name="paused by")),
                        ("reason", models.TextField(verbose_name="reason")),
                    ],
                    options={
                        "verbose_name": "pause",
                        "verbose_name_plural": "pauses",
                        "db_table": "kfs_credentials_pause",
                        "constraints": [
                            models.CheckConstraint(condition=models.Q(("id", 1)), name="kfs_credentials_pause_id_ck")
                        ],
                    },
                ),
                migrations.CreateModel(
                    name="Refusal",
                    fields=[
                        (
                            "id",
                            models.BigAutoField(
                                auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                            ),
                        ),
                        ("role", models.TextField(verbose_name="role")),
                        ("reason", models.TextField(verbose_name="reason")),
                        ("count", models.BigIntegerField(verbose_name="count")),
                        ("refused_at", models.DateTimeField(verbose_name="last refused at")),
                    ],
                    options={
                        "verbose_name": "refusal",
                        "verbose_name_plural": "refusals",
                        "db_table": "kfs_credentials_refusal",
                        "constraints": [
                            models.UniqueConstraint(fields=("role", "reason"), name="kfs_credentials_refusal_uq")
                        ],
                    },
                ),
            ],
        ),
    ]

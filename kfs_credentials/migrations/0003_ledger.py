import uuid

import django.db.models.deletion
from django.db import migrations, models

import kfs_credentials.models.schema
from kfs_credentials.sql.operations import RunFile


class Migration(migrations.Migration):
    dependencies = [("kfs_credentials", "0002_source_indexes")]
    operations = [
        RunFile(
            "0003_ledger",
            state_operations=[
                migrations.CreateModel(
                    name="SourceCredentialBackfill",
                    fields=[
                        ("worker_id", models.TextField(blank=True, null=True, verbose_name="worker")),
                        ("lease_token", models.UUIDField(blank=True, null=True, verbose_name="lease token")),
                        (
                            "lease_expires_at",
                            models.DateTimeField(blank=True, null=True, verbose_name="lease expires at"),
                        ),
                        (
                            "heartbeat_at",
                            models.DateTimeField(blank=True, null=True, verbose_name="heartbeat at"),
                        ),
                        ("row_version", models.IntegerField(verbose_name="row version")),
                        (
                            "last_error_code",
                            models.TextField(blank=True, null=True, verbose_name="last error code"),
                        ),
                        (
                            "last_error_message",
                            models.TextField(blank=True, null=True, verbose_name="last error message"),
                        ),
                        ("created_at", models.DateTimeField(verbose_name="created at")),
                        ("updated_at", models.DateTimeField(verbose_name="updated at")),
                        (
                            "id",
                            models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False),
                        ),
                        ("tenant_id", models.TextField(verbose_name="tenant")),
                        ("source_version", models.IntegerField(verbose_name="source version")),
                        ("candidate_credential_ref", models.TextField(verbose_name="candidate ref")),
                        (
                            "secret_fingerprint",
                            kfs_credentials.models.schema.FixedCharField(max_length=64, verbose_name="fingerprint"),
                        ),
                        (
                            "run_state",
                            models.TextField(
                                choices=[
                                    ("queued", "queued"),
                                    ("running", "running"),
                                    ("succeeded", "succeeded"),
                                    ("failed", "failed"),
                                ],
                                verbose_name="state",
                            ),
                        ),
                        ("retry_count", models.IntegerField(verbose_name="retry count")),
                        (
                            "completed_at",
                            models.DateTimeField(blank=True, null=True, verbose_name="completed at"),
                        ),
                        (
                            "knowledge_space",
                            models.ForeignKey(
                                db_constraint=False,
                                db_index=False,
                                on_delete=django.db.models.deletion.DO_NOTHING,
                                related_name="+",
                                to="kfs_credentials.knowledgespace",
                                verbose_name="knowledge space",
                            ),
                        ),
                        (
                            "source",
                            models.ForeignKey(
                                db_constraint=False,
                                db_index=False,
                                on_delete=django.db.models.deletion.DO_NOTHING,
                                related_name="backfills",
                                to="kfs_credentials.source",
                                verbose_name="source",
                            ),
                        ),
                    ],
                    options={
                        "verbose_name": "backfill job",
                        "verbose_name_plural": "backfill jobs",
                        "permissions": [("retry_sourcecredentialbackfill", "Can retry failed backfill jobs")],
                        "db_table": "source_credential_backfills",
                        "base_manager_name": "objects",
                    },
                ),
                migrations.CreateModel(
                    name="SourceSecretLifecycleRef",
                    fields=[
                        ("worker_id", models.TextField(blank=True, null=True, verbose_name="worker")),
                        ("lease_token", models.UUIDField(blank=True, null=True, verbose_name="lease token")),
                        (
                            "lease_expires_at",
                            models.DateTimeField(blank=True, null=True, verbose_name="lease expires at"),
                        ),
                        (
                            "heartbeat_at",
                            models.DateTimeField(blank=True, null=True, verbose_name="heartbeat at"),
                        ),
                        ("row_version", models.IntegerField(verbose_name="row version")),
                        (
                            "last_error_code",
                            models.TextField(blank=True, null=True, verbose_name="last error code"),
                        ),
                        (
                            "last_error_message",
                            models.TextField(blank=True, null=True, verbose_name="last error message"),
                        ),
                        ("created_at", models.DateTimeField(verbose_name="created at")),
                        ("updated_at", models.DateTimeField(verbose_name="updated at")),
                        (
                            "id",
                            models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False),
                        ),
                        ("tenant_id", models.TextField(verbose_name="tenant")),
                        ("knowledge_space_id", models.UUIDField(verbose_name="knowledge space")),
                        ("source_id", models.UUIDField(verbose_name="source")),
                        ("credential_ref", models.TextField(verbose_name="credential ref")),
                        ("operation_id", models.TextField(verbose_name="operation")),
                        (
                            "purpose",
                            models.TextField(
                                choices=[
                                    ("create", "create"),
                                    ("rotate", "rotate"),
                                    ("backfill", "backfill"),
                                ],
                                verbose_name="purpose",
                            ),
                        ),
                        (
                            "state",
                            models.TextField(
                                choices=[
                                    ("staged", "staged"),
                                    ("candidate", "candidate"),
                                    ("active", "active"),
                                    ("retired", "retired"),
                                    ("deleting", "deleting"),
                                    ("deleted", "deleted"),
                                ],
                                verbose_name="state",
                            ),
                        ),
                        (
                            "source_version",
                            models.IntegerField(blank=True, null=True, verbose_name="source version"),
                        ),
                        ("recover_after", models.DateTimeField(verbose_name="recover after")),
                        (
                            "next_delete_at",
                            models.DateTimeField(blank=True, null=True, verbose_name="next erasure at"),
                        ),
                        ("delete_attempts", models.IntegerField(verbose_name="erasure attempts")),
                        ("deleted_at", models.DateTimeField(blank=True, null=True, verbose_name="erased at")),
                    ],
                    options={
                        "verbose_name": "credential ref",
                        "verbose_name_plural": "credential refs",
                        "permissions": [("view_full_ref", "Can view full refs")],
                        "db_table": "source_secret_lifecycle_refs",
                        "base_manager_name": "objects",
                        "indexes": [
                            kfs_credentials.models.schema.SeedIndex(
                                fields=["operation_id", "state", "id"],
                                name="source_secret_lifecycle_refs_operation_idx",
                            ),
                            kfs_credentials.models.schema.SeedIndex(
                                fields=["state", "next_delete_at", "lease_expires_at", "updated_at", "id"],
                                name="source_secret_lifecycle_refs_claim_idx",
                            ),
                            kfs_credentials.models.schema.SeedIndex(
                                fields=["state", "recover_after", "id"],
                                name="source_secret_lifecycle_refs_recovery_idx",
                            ),
                            kfs_credentials.models.schema.SeedIndex(
                                fields=["tenant_id", "knowledge_space_id", "source_id", "id"],
                                name="source_secret_lifecycle_refs_scope_idx",
                            ),
                        ],
                        "constraints": [
                            models.CheckConstraint(
                                condition=models.Q(
                                    ("source_version__isnull", True),
                                    ("source_version__gte", 1),
                                    _connector="OR",
                                ),
                                name="source_secret_lifecycle_refs_source_version_ck",
                            ),
                            models.CheckConstraint(
                                condition=models.Q(("purpose__in", ["create", "rotate", "backfill"])),
                                name="source_secret_lifecycle_refs_purpose_ck",
                            ),
                            models.CheckConstraint(
                                condition=models.Q(("delete_attempts__gte", 0), ("row_version__gte", 0)),
                                name="source_secret_lifecycle_refs_counts_ck",
                            ),
                            models.CheckConstraint(
                                condition=models.Q(
                                    (
                                        "state__in",
                                        ["staged", "candidate", "active", "retired", "deleting", "deleted"],
                                    )
                                ),
                                name="source_secret_lifecycle_refs_state_ck",
                            ),
                            models.CheckConstraint(
                                condition=models.Q(
                                    models.Q(
                                        ("deleted_at__isnull", True),
                                        ("heartbeat_at__isnull", False),
                                        ("lease_expires_at__isnull", False),
                                        ("lease_token__isnull", False),
                                        ("state", "deleting"),
                                        ("worker_id__isnull", False),
                                    ),
                                    models.Q(
                                        models.Q(("state", "deleting"), _negated=True),
                                        ("heartbeat_at__isnull", True),
                                        ("lease_expires_at__isnull", True),
                                        ("lease_token__isnull", True),
                                        ("worker_id__isnull", True),
                                    ),
                                    _connector="OR",
                                ),
                                name="source_secret_lifecycle_refs_lease_ck",
                            ),
                            models.CheckConstraint(
                                condition=models.Q(
                                    models.Q(("deleted_at__isnull", False), ("state", "deleted")),
                                    models.Q(
                                        models.Q(("state", "deleted"), _negated=True),
                                        ("deleted_at__isnull", True),
                                    ),
                                    _connector="OR",
                                ),
                                name="source_secret_lifecycle_refs_terminal_ck",
                            ),
                            models.UniqueConstraint(
                                fields=("credential_ref",), name="source_secret_lifecycle_refs_ref_uq"
                            ),
                        ],
                    },
                ),
                migrations.AddIndex(
                    model_name="sourcecredentialbackfill",
                    index=kfs_credentials.models.schema.SeedIndex(
                        fields=["run_state", "lease_expires_at", "updated_at", "id"],
                        name="source_credential_backfills_claim_idx",
                    ),
                ),
                migrations.AddIndex(
                    model_name="sourcecredentialbackfill",
                    index=kfs_credentials.models.schema.SeedIndex(
                        fields=["tenant_id", "knowledge_space", "source", "id"],
                        name="source_credential_backfills_scope_idx",
                    ),
                ),
                migrations.AddConstraint(
                    model_name="sourcecredentialbackfill",
                    constraint=models.CheckConstraint(
                        condition=models.Q(("source_version__gte", 1)),
                        name="source_credential_backfills_source_version_ck",
                    ),
                ),
                migrations.AddConstraint(
                    model_name="sourcecredentialbackfill",
                    constraint=models.CheckConstraint(
                        condition=models.Q(("retry_count__gte", 0), ("row_version__gte", 0)),
                        name="source_credential_backfills_counts_ck",
                    ),
                ),
                migrations.AddConstraint(
                    model_name="sourcecredentialbackfill",
                    constraint=models.CheckConstraint(
                        condition=models.Q(("run_state__in", ["queued", "running", "succeeded", "failed"])),
                        name="source_credential_backfills_state_ck",
                    ),
                ),
                migrations.AddConstraint(
                    model_name="sourcecredentialbackfill",
                    constraint=models.CheckConstraint(
                        condition=models.Q(
                            models.Q(
                                ("completed_at__isnull", True),
                                ("heartbeat_at__isnull", False),
                                ("lease_expires_at__isnull", False),
                                ("lease_token__isnull", False),
                                ("run_state", "running"),
                                ("worker_id__isnull", False),
                            ),
                            models.Q(
                                models.Q(("run_state", "running"), _negated=True),
                                ("heartbeat_at__isnull", True),
                                ("lease_expires_at__isnull", True),
                                ("lease_token__isnull", True),
                                ("worker_id__isnull", True),
                            ),
                            _connector="OR",
                        ),
                        name="source_credential_backfills_lease_ck",
                    ),
                ),
                migrations.AddConstraint(
                    model_name="sourcecredentialbackfill",
                    constraint=models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("completed_at__isnull", False), ("run_state__in", ["succeeded", "failed"])),
                            models.Q(("completed_at__isnull", True), ("run_state__in", ["queued", "running"])),
                            _connector="OR",
                        ),
                        name="source_credential_backfills_terminal_ck",
                    ),
                ),
                migrations.AddConstraint(
                    model_name="sourcecredentialbackfill",
                    constraint=models.UniqueConstraint(
                        fields=("tenant_id", "knowledge_space", "source"),
                        name="source_credential_backfills_source_uq",
                    ),
                ),
                migrations.AddConstraint(
                    model_name="sourcecredentialbackfill",
                    constraint=models.UniqueConstraint(
                        fields=("candidate_credential_ref",),
                        name="source_credential_backfills_candidate_ref_uq",
                    ),
                ),
            ],
        ),
    ]

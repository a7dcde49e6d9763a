import uuid

import django.db.models.deletion
from django.db import migrations, models

import kfs_credentials.models.schema
from kfs_credentials.sql.operations import RunFile


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        RunFile(
            "0001_base",
            state_operations=[
                migrations.CreateModel(
                    name="KnowledgeSpace",
                    fields=[
                        (
                            "id",
                            models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False),
                        ),
                        ("tenant_id", models.TextField(verbose_name="tenant")),
                        ("slug", models.TextField(verbose_name="slug")),
                        ("name", models.TextField(verbose_name="name")),
                        ("description", models.TextField(blank=True, null=True, verbose_name="description")),
                        ("created_at", models.DateTimeField(verbose_name="created at")),
                        ("updated_at", models.DateTimeField(verbose_name="updated at")),
                    ],
                    options={
                        "verbose_name": "knowledge space",
                        "verbose_name_plural": "knowledge spaces",
                        "db_table": "knowledge_spaces",
                        "constraints": [
                            models.UniqueConstraint(
                                fields=("tenant_id", "slug"), name="knowledge_spaces_tenant_slug_uq"
                            ),
                            models.UniqueConstraint(fields=("tenant_id", "id"), name="knowledge_spaces_tenant_id_uq"),
                        ],
                    },
                ),
                migrations.CreateModel(
                    name="Source",
                    fields=[
                        (
                            "id",
                            models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False),
                        ),
                        ("type", models.TextField(verbose_name="type")),
                        ("status", models.TextField(verbose_name="status")),
                        ("name", models.TextField(verbose_name="name")),
                        ("uri", models.TextField(verbose_name="URI")),
                        (
                            "metadata",
                            models.JSONField(
                                decoder=kfs_credentials.models.schema.ExactJSONDecoder,
                                encoder=kfs_credentials.models.schema.ExactJSONEncoder,
                                verbose_name="metadata",
                            ),
                        ),
                        (
                            "permission_scope",
                            models.JSONField(
                                decoder=kfs_credentials.models.schema.ExactJSONDecoder,
                                encoder=kfs_credentials.models.schema.ExactJSONEncoder,
                                verbose_name="permission scope",
                            ),
                        ),
                        ("version", models.IntegerField(verbose_name="version")),
                        ("created_at", models.DateTimeField(verbose_name="created at")),
                        ("updated_at", models.DateTimeField(verbose_name="updated at")),
                        (
                            "credential_ref",
                            models.TextField(blank=True, editable=False, null=True, verbose_name="credential ref"),
                        ),
                        (
                            "knowledge_space",
                            models.ForeignKey(
                                db_constraint=False,
                                db_index=False,
                                on_delete=django.db.models.deletion.DO_NOTHING,
                                related_name="sources",
                                to="kfs_credentials.knowledgespace",
                                verbose_name="knowledge space",
                            ),
                        ),
                    ],
                    options={
                        "verbose_name": "source",
                        "verbose_name_plural": "sources",
                        "db_table": "sources",
                        "base_manager_name": "objects",
                    },
                ),
                migrations.AddIndex(
                    model_name="source",
                    index=kfs_credentials.models.schema.SeedIndex(
                        fields=["knowledge_space", "status"], name="sources_space_status_idx"
                    ),
                ),
            ],
        ),
    ]

from django.db import migrations, models

import kfs_credentials.models.schema
import kfs_credentials.models.source
from kfs_credentials.sql.operations import RunFile


class Migration(migrations.Migration):
    dependencies = [("kfs_credentials", "0001_base")]
    operations = [
        RunFile(
            "0002_source_indexes",
            reversible=True,
            state_operations=[
                migrations.AddIndex(
                    model_name="source",
                    index=kfs_credentials.models.schema.SeedIndex(
                        condition=models.Q(("credential_ref__isnull", True)),
                        fields=["id"],
                        name="sources_credential_backfill_discovery_idx",
                    ),
                ),
                migrations.AddIndex(
                    model_name="source",
                    index=kfs_credentials.models.schema.SeedIndex(
                        condition=models.Q(
                            ("credential_ref__isnull", True),
                            kfs_credentials.models.source.HasLegacyCredentials("metadata"),
                        ),
                        fields=["id"],
                        name="kfs_credentials_legacy_idx",
                    ),
                ),
                migrations.AddConstraint(
                    model_name="source",
                    constraint=models.UniqueConstraint(fields=("knowledge_space", "id"), name="sources_space_id_uq"),
                ),
                migrations.AddConstraint(
                    model_name="source",
                    constraint=models.UniqueConstraint(
                        condition=models.Q(("credential_ref__isnull", False)),
                        fields=("credential_ref",),
                        name="sources_credential_ref_uq",
                    ),
                ),
            ],
        ),
    ]

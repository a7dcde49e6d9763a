from django.db import migrations

from kfs_credentials.sql.operations import RunFile


class Migration(migrations.Migration):
    dependencies = [("kfs_credentials", "0004_own_tables")]
    operations = [
        RunFile("0005_register_refs"),
    ]

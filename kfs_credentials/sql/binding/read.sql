-- The database's half of a binding, and whether it was made in this very database.
SELECT "environment_id", "system_identifier", "database_oid", "epoch", "confirmed_at" IS NOT NULL,
  "system_identifier" = (SELECT "system_identifier"::text FROM pg_control_system())
    AND "database_oid" = (SELECT "oid" FROM "pg_database" WHERE "datname" = current_database())
FROM "kfs_credentials_binding"
WHERE "store" = %(store)s

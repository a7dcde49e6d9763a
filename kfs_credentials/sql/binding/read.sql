-- The database's half of a binding; whether it was made in this very database, and whether somebody is changing it now.
SELECT "environment_id", "environment", "system_identifier", "database_oid", "epoch", "shown_epoch",
  "confirmed_at" IS NOT NULL,
  "system_identifier" = (SELECT "system_identifier"::text FROM pg_control_system())
    AND "database_oid" = (SELECT "oid" FROM "pg_database" WHERE "datname" = current_database()),
  COALESCE("lease_expires_at" > statement_timestamp(), FALSE)
FROM "kfs_credentials_binding"
WHERE "store" = %(store)s

-- The first half, of a database without live refs. Whoever comes second takes the first one's.
INSERT INTO "kfs_credentials_binding"
  ("store", "environment_id", "system_identifier", "database_oid", "epoch", "bound_at", "bound_by")
SELECT %(store)s, %(environment)s, (SELECT "system_identifier"::text FROM pg_control_system()), "oid", 0,
  statement_timestamp(), %(by)s
FROM "pg_database" WHERE "datname" = current_database()
ON CONFLICT ("store") DO NOTHING
RETURNING "store"

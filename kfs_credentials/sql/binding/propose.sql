-- The first half, of a database without live refs. Whoever comes second takes the first one's.
INSERT INTO "kfs_credentials_binding"
  ("store", "environment_id", "environment", "system_identifier", "database_oid", "epoch", "shown_epoch", "bound_at",
   "bound_by")
SELECT %(store)s, %(id)s, %(environment)s, (SELECT "system_identifier"::text FROM pg_control_system()), "oid", 0, 0,
  statement_timestamp(), %(by)s
FROM "pg_database" WHERE "datname" = current_database()
ON CONFLICT ("store") DO NOTHING
RETURNING "store"

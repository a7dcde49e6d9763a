-- A new binding in the place of the old one: whoever holds to that one, a copy of this database for instance, is out.
INSERT INTO "kfs_credentials_binding"
  ("store", "environment_id", "environment", "system_identifier", "database_oid", "epoch", "shown_epoch", "bound_at",
   "bound_by", "worker_id", "lease_token", "lease_expires_at")
SELECT %(store)s, %(id)s, %(environment)s, (SELECT "system_identifier"::text FROM pg_control_system()), "oid",
  %(epoch)s, %(epoch)s, statement_timestamp(), %(by)s, %(worker)s, %(token)s,
  statement_timestamp() + make_interval(secs => %(lease)s)
FROM "pg_database" WHERE "datname" = current_database()
ON CONFLICT ("store") DO UPDATE SET
  "environment_id" = EXCLUDED."environment_id",
  "environment" = EXCLUDED."environment",
  "system_identifier" = EXCLUDED."system_identifier",
  "database_oid" = EXCLUDED."database_oid",
  "epoch" = EXCLUDED."epoch",
  "shown_epoch" = EXCLUDED."shown_epoch",
  "bound_at" = EXCLUDED."bound_at",
  "bound_by" = EXCLUDED."bound_by",
  "confirmed_at" = NULL,
  "worker_id" = EXCLUDED."worker_id",
  "lease_token" = EXCLUDED."lease_token",
  "lease_expires_at" = EXCLUDED."lease_expires_at"
WHERE "kfs_credentials_binding"."lease_expires_at" IS NULL
  OR "kfs_credentials_binding"."lease_expires_at" <= statement_timestamp()
RETURNING "environment_id"

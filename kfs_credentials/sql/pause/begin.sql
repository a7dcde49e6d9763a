-- The first pause stands: its reason is what has to be settled before work goes on.
INSERT INTO "kfs_credentials_pause" ("id", "paused_at", "paused_by", "reason")
VALUES (1, statement_timestamp(), %(by)s, %(reason)s)
ON CONFLICT ("id") DO NOTHING
RETURNING "id"

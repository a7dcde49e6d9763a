-- Which file the table sources lies in now (another one after it was rewritten), when the database says it is (in UTC,
-- as all times here: they are kept as text, and compared), what its statements would name, what else may hold what was
-- in it, when plaintext was last removed from it, and whether a ref may ever have been in use. Jobs go with their
-- sources, and events when EVENT_RETENTION is over: the one knows of what the other does not.
SELECT pg_relation_filenode('sources'::regclass)::text,
  statement_timestamp() AT TIME ZONE 'UTC',
  'sources'::regclass::text,
  pg_size_pretty(pg_total_relation_size('sources'::regclass)),
  current_setting('archive_mode'),
  (SELECT count(*) FROM pg_replication_slots),
  (SELECT count(*) FROM pg_stat_replication),
  GREATEST(
    (SELECT max(job.updated_at) FROM (
      SELECT updated_at FROM source_credential_backfills
      WHERE run_state = 'succeeded' AND lease_expires_at IS NULL ORDER BY updated_at DESC LIMIT 1
    ) job),
    (SELECT max(event.created_at) FROM kfs_credentials_event event WHERE event.kind = 'scrubbed'),
    (SELECT max(event.created_at) FROM (
      SELECT created_at FROM kfs_credentials_event WHERE kind = 'activated' AND detail = 'backfill'
      ORDER BY created_at DESC LIMIT 1
    ) event)
  ) AT TIME ZONE 'UTC',
  EXISTS (SELECT FROM sources WHERE credential_ref IS NOT NULL)
    OR EXISTS (SELECT FROM source_secret_lifecycle_refs WHERE state NOT IN ('staged', 'candidate'))
    OR EXISTS (SELECT FROM kfs_credentials_event WHERE kind IN ('activated', 'adopted', 'rescued', 'restored'))

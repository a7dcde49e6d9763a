-- Which file the table sources lies in now (another one after it was rewritten), when the database says it is, what its
-- statements would name, and what else may hold what was in it.
SELECT pg_relation_filenode('sources'::regclass)::text, statement_timestamp(), 'sources'::regclass::text,
  pg_size_pretty(pg_total_relation_size('sources'::regclass)),
  current_setting('archive_mode'),
  (SELECT count(*) FROM pg_replication_slots),
  (SELECT count(*) FROM pg_stat_replication),
  GREATEST(
    (SELECT max(job.updated_at) FROM (
      SELECT updated_at FROM source_credential_backfills
      WHERE run_state = 'succeeded' AND lease_expires_at IS NULL ORDER BY updated_at DESC LIMIT 1
    ) job),
    (SELECT max(event.created_at) FROM kfs_credentials_event event WHERE event.kind = 'scrubbed')
  )

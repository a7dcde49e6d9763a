-- Jobs, candidates and what is known of their objects, inserted together: already claimed by this worker, since
-- queueing them first and claiming them next would write every row twice.
--
-- A source whose job succeeded long ago, and which has legacy credentials again, gets an update of its row. Any other
-- job that came between the page and here is somebody else's work: its source is left out, in all three tables.
WITH item AS (
  SELECT * FROM unnest(
    %(jobs)s::uuid[], %(ledger)s::uuid[], %(tenants)s::text[], %(spaces)s::uuid[], %(sources)s::uuid[],
    %(versions)s::integer[], %(refs)s::text[], %(fingerprints)s::bpchar[], %(sizes)s::integer[]
  ) AS item (job, ledger, tenant, space, source, version, ref, fingerprint, size)
), job AS (
  INSERT INTO source_credential_backfills AS existing (
    id, tenant_id, knowledge_space_id, source_id, source_version, candidate_credential_ref, secret_fingerprint,
    run_state, worker_id, lease_token, lease_expires_at, heartbeat_at, retry_count, row_version, created_at, updated_at
  )
  SELECT job, tenant, space, source, greatest(version, 1), ref, fingerprint,
    'running', %(worker)s, %(token)s, statement_timestamp() + make_interval(secs => %(lease)s), statement_timestamp(), 0, 0,
    statement_timestamp(), statement_timestamp()
  FROM item
  ON CONFLICT (tenant_id, knowledge_space_id, source_id) DO UPDATE SET
    source_version = excluded.source_version,
    candidate_credential_ref = excluded.candidate_credential_ref,
    secret_fingerprint = excluded.secret_fingerprint,
    run_state = excluded.run_state,
    worker_id = excluded.worker_id,
    lease_token = excluded.lease_token,
    lease_expires_at = excluded.lease_expires_at,
    heartbeat_at = excluded.heartbeat_at,
    retry_count = 0,
    row_version = existing.row_version + 1,
    last_error_code = NULL,
    last_error_message = NULL,
    updated_at = excluded.updated_at,
    completed_at = NULL
  WHERE existing.run_state = 'succeeded'
  RETURNING id, candidate_credential_ref
), ledger AS (
  INSERT INTO source_secret_lifecycle_refs (
    id, tenant_id, knowledge_space_id, source_id, credential_ref, operation_id, purpose, state, source_version,
    recover_after, delete_attempts, row_version, created_at, updated_at
  )
  SELECT item.ledger, tenant, space, source, ref, job.id::text, 'backfill', 'candidate',
    CASE WHEN version >= 1 THEN version END, statement_timestamp() + make_interval(secs => %(recover_after)s), 0, 0,
    statement_timestamp(), statement_timestamp()
  FROM item JOIN job ON job.candidate_credential_ref = item.ref
), event AS (
  INSERT INTO kfs_credentials_event (created_at, kind, actor, credential_ref, tenant_id, knowledge_space_id, source_id)
  SELECT statement_timestamp(), 'reserved', %(actor)s, ref, tenant, space, source
  FROM item JOIN job ON job.candidate_credential_ref = item.ref
), object AS (
  INSERT INTO kfs_credentials_secret_object (credential_ref, store, key_id, size, created_at, updated_at)
  SELECT ref, %(store)s, %(key_id)s, size, statement_timestamp(), statement_timestamp()
  FROM item JOIN job ON job.candidate_credential_ref = item.ref
)
SELECT id, candidate_credential_ref FROM job

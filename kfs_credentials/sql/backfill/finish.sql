-- Jobs that end without a move, and what becomes of their candidates; all rows are locked. `ref_state` is 'retired'
-- (nobody will use the candidate) or 'active' (the source names it already, which only the ledger did not know).
WITH item AS (
  SELECT * FROM unnest(
    %(jobs)s::uuid[], %(refs)s::text[], %(codes)s::text[], %(messages)s::text[], %(versions)s::integer[]
  ) AS item (job, ref, code, message, version)
), job AS (
  UPDATE source_credential_backfills job SET
    run_state = %(run_state)s,
    worker_id = NULL,
    lease_token = NULL,
    lease_expires_at = NULL,
    heartbeat_at = NULL,
    last_error_code = item.code,
    last_error_message = item.message,
    row_version = job.row_version + 1,
    updated_at = statement_timestamp(),
    completed_at = statement_timestamp()
  FROM item
  WHERE job.id = item.job AND job.candidate_credential_ref = item.ref
  RETURNING job.id, job.tenant_id, job.knowledge_space_id, job.source_id, item.ref, item.code, item.version
), ledger AS (
  UPDATE source_secret_lifecycle_refs ledger SET
    state = %(ref_state)s,
    source_version = CASE
      WHEN %(ref_state)s = 'active' AND job.version >= 1 THEN job.version ELSE ledger.source_version END,
    next_delete_at = CASE WHEN %(ref_state)s = 'retired' THEN statement_timestamp() + make_interval(secs => %(grace)s) END,
    last_error_code = job.code,
    row_version = ledger.row_version + 1,
    updated_at = statement_timestamp()
  FROM job
  WHERE ledger.credential_ref = job.ref
    AND ledger.tenant_id = job.tenant_id
    AND ledger.knowledge_space_id = job.knowledge_space_id
    AND ledger.source_id = job.source_id
    AND ledger.state = 'candidate'
  RETURNING ledger.credential_ref, ledger.tenant_id, ledger.knowledge_space_id, ledger.source_id, job.code
), event AS (
  INSERT INTO kfs_credentials_event (
    created_at, kind, actor, credential_ref, tenant_id, knowledge_space_id, source_id, detail
  )
  SELECT statement_timestamp(), CASE %(ref_state)s WHEN 'retired' THEN 'retired' ELSE 'activated' END, %(actor)s,
    credential_ref, tenant_id, knowledge_space_id, source_id, code
  FROM ledger
  UNION ALL
  SELECT statement_timestamp(), 'job_failed', %(actor)s, ref, tenant_id, knowledge_space_id, source_id, code
  FROM job
  WHERE %(run_state)s = 'failed'
  RETURNING kind, credential_ref, detail
)
SELECT kind, credential_ref, detail FROM event

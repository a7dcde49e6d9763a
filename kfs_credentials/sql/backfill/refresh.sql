-- A fresh candidate for each job, whose rows are all locked: the old one is retired and the job is queued again. For a
-- refresh (the job is running, under our lease) and for a retry by an operator (it has failed).
WITH item AS (
  SELECT * FROM unnest(
    %(jobs)s::uuid[], %(old_refs)s::text[], %(ledger)s::uuid[], %(refs)s::text[], %(versions)s::integer[],
    %(fingerprints)s::bpchar[], %(sizes)s::integer[]
  ) AS item (job, old_ref, ledger, ref, version, fingerprint, size)
), job AS (
  UPDATE source_credential_backfills job SET
    run_state = 'queued',
    source_version = greatest(item.version, 1),
    candidate_credential_ref = item.ref,
    secret_fingerprint = item.fingerprint,
    worker_id = NULL,
    lease_token = NULL,
    lease_expires_at = NULL,
    heartbeat_at = NULL,
    retry_count = CASE WHEN job.run_state = 'running' THEN job.retry_count + 1 ELSE 0 END,
    last_error_code = NULL,
    last_error_message = NULL,
    row_version = job.row_version + 1,
    updated_at = statement_timestamp(),
    completed_at = NULL
  FROM item
  WHERE job.id = item.job AND job.candidate_credential_ref = item.old_ref
  RETURNING job.id, job.tenant_id, job.knowledge_space_id, job.source_id,
    item.old_ref, item.ledger, item.ref, item.version, item.size
), retired AS (
  UPDATE source_secret_lifecycle_refs ledger SET
    state = 'retired',
    next_delete_at = statement_timestamp() + make_interval(secs => %(grace)s),
    last_error_code = 'SOURCE_CREDENTIALS_CHANGED',
    row_version = ledger.row_version + 1,
    updated_at = statement_timestamp()
  FROM job
  WHERE ledger.credential_ref = job.old_ref
    AND ledger.tenant_id = job.tenant_id
    AND ledger.knowledge_space_id = job.knowledge_space_id
    AND ledger.source_id = job.source_id
    AND ledger.state = 'candidate'
  RETURNING ledger.credential_ref, ledger.tenant_id, ledger.knowledge_space_id, ledger.source_id
), ledger AS (
  INSERT INTO source_secret_lifecycle_refs (
    id, tenant_id, knowledge_space_id, source_id, credential_ref, operation_id, purpose, state, source_version,
    recover_after, delete_attempts, row_version, created_at, updated_at
  )
  SELECT ledger, tenant_id, knowledge_space_id, source_id, ref, id::text, 'backfill', 'candidate',
    CASE WHEN version >= 1 THEN version END, statement_timestamp() + make_interval(secs => %(recover_after)s), 0, 0,
    statement_timestamp(), statement_timestamp()
  FROM job
  RETURNING credential_ref, tenant_id, knowledge_space_id, source_id
), event AS (
  INSERT INTO kfs_credentials_event (
    created_at, kind, actor, credential_ref, tenant_id, knowledge_space_id, source_id, detail
  )
  SELECT statement_timestamp(), 'retired', %(actor)s, credential_ref, tenant_id, knowledge_space_id, source_id,
    'SOURCE_CREDENTIALS_CHANGED'
  FROM retired
  UNION ALL
  SELECT statement_timestamp(), 'reserved', %(actor)s, credential_ref, tenant_id, knowledge_space_id, source_id, NULL
  FROM ledger
  RETURNING kind, credential_ref, detail
), object AS (
  INSERT INTO kfs_credentials_secret_object (credential_ref, store, key_id, size, created_at, updated_at)
  SELECT ref, %(store)s, %(key_id)s, size, statement_timestamp(), statement_timestamp()
  FROM job
)
SELECT kind, credential_ref, detail FROM event

-- The move itself, for rows that are all locked already, ledger first, then jobs, then sources. Each part repeats its
-- condition, and the caller compares the three counts: an UPDATE that matches nothing would not stop the others.
--
-- The key is removed here, on the row as it is now: what else a user changed in metadata meanwhile stays.
WITH item AS (
  SELECT * FROM unnest(
    %(jobs)s::uuid[], %(sources)s::uuid[], %(refs)s::text[], %(key_ids)s::text[], %(sizes)s::integer[]
  ) AS item (job, source, ref, key_id, size)
), source AS (
  UPDATE sources src SET
    credential_ref = item.ref,
    metadata = src.metadata - 'credentials',
    version = src.version + 1,
    updated_at = statement_timestamp()
  FROM item
  WHERE src.id = item.source
    -- Written so that no partial index is of use: it would be read whole, for every batch, instead of the primary key.
    AND COALESCE(src.credential_ref, '') = ''
    AND COALESCE(jsonb_typeof(src.metadata -> 'credentials'), '') = 'object'
  RETURNING src.id, src.version, item.job, item.ref
), ledger AS (
  UPDATE source_secret_lifecycle_refs ledger SET
    state = 'active',
    source_version = CASE WHEN source.version >= 1 THEN source.version END,
    row_version = ledger.row_version + 1,
    updated_at = statement_timestamp()
  FROM source
  WHERE ledger.credential_ref = source.ref AND ledger.source_id = source.id AND ledger.state = 'candidate'
  RETURNING ledger.credential_ref, ledger.tenant_id, ledger.knowledge_space_id, ledger.source_id
), event AS (
  -- The detail says that plaintext was removed with it: an event of its own for that would cost every move some time.
  INSERT INTO kfs_credentials_event (
    created_at, kind, actor, credential_ref, tenant_id, knowledge_space_id, source_id, detail
  )
  SELECT statement_timestamp(), 'activated', %(actor)s, credential_ref, tenant_id, knowledge_space_id, source_id,
    %(detail)s
  FROM ledger
), job AS (
  UPDATE source_credential_backfills job SET
    run_state = 'succeeded',
    worker_id = NULL,
    lease_token = NULL,
    lease_expires_at = NULL,
    heartbeat_at = NULL,
    last_error_code = NULL,
    last_error_message = NULL,
    row_version = job.row_version + 1,
    updated_at = statement_timestamp(),
    completed_at = statement_timestamp()
  FROM source
  WHERE job.id = source.job
    AND job.candidate_credential_ref = source.ref
    AND job.run_state = 'running'
    AND job.lease_token = %(token)s  -- unexpired when it was locked, and nobody claims a row that is locked
  RETURNING job.id
), object AS (
  -- Usually right since the reservation: the key ring changed meanwhile, or another worker had put it before.
  UPDATE kfs_credentials_secret_object object SET
    key_id = item.key_id, size = item.size, updated_at = statement_timestamp()
  FROM item
  WHERE object.credential_ref = item.ref AND (object.key_id, object.size) IS DISTINCT FROM (item.key_id, item.size)
)
SELECT (SELECT count(*) FROM source), (SELECT count(*) FROM ledger), (SELECT count(*) FROM job)

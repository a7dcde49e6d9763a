-- A ref is reserved before any byte is written. The id of the row is made of the operation's id: whoever repeats an
-- operation finds the first one's row instead of reserving a second ref.
WITH ledger AS (
  INSERT INTO source_secret_lifecycle_refs (
    id, tenant_id, knowledge_space_id, source_id, credential_ref, operation_id, purpose, state, source_version,
    recover_after, delete_attempts, row_version, created_at, updated_at
  )
  VALUES (
    %(id)s, %(tenant)s, %(space)s, %(source)s, %(ref)s, %(operation)s, %(purpose)s, 'staged', NULL,
    statement_timestamp() + make_interval(secs => %(recover_after)s), 0, 0, statement_timestamp(), statement_timestamp()
  )
  ON CONFLICT (id) DO NOTHING
  RETURNING credential_ref, tenant_id, knowledge_space_id, source_id
), event AS (
  INSERT INTO kfs_credentials_event (created_at, kind, actor, credential_ref, tenant_id, knowledge_space_id, source_id)
  SELECT statement_timestamp(), %(event)s, %(actor)s, credential_ref, tenant_id, knowledge_space_id, source_id
  FROM ledger
), object AS (
  INSERT INTO kfs_credentials_secret_object (credential_ref, store, key_id, size, created_at, updated_at)
  SELECT credential_ref, %(store)s, %(key_id)s, %(size)s, statement_timestamp(), statement_timestamp()
  FROM ledger
)
SELECT credential_ref FROM ledger

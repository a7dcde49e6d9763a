-- A ledger row for a ref that a source names and the ledger does not know, as the seed's migration registers them. The
-- id of the source is free for it as a rule; where it is taken, a random one serves.
WITH ledger AS (
  INSERT INTO source_secret_lifecycle_refs (
    id, tenant_id, knowledge_space_id, source_id, credential_ref, operation_id, purpose, state, source_version,
    recover_after, delete_attempts, row_version, created_at, updated_at
  )
  SELECT
    CASE WHEN EXISTS (SELECT FROM source_secret_lifecycle_refs taken WHERE taken.id = src.id)
      THEN gen_random_uuid() ELSE src.id END,
    space.tenant_id, src.knowledge_space_id, src.id, src.credential_ref,
    'legacy-source:' || src.id::text || ':' || src.version::text, 'rotate', 'active',
    CASE WHEN src.version >= 1 THEN src.version END, statement_timestamp(), 0, 0,
    statement_timestamp(), statement_timestamp()
  FROM sources src
  JOIN knowledge_spaces space ON space.id = src.knowledge_space_id
  WHERE src.credential_ref = %(ref)s
  ON CONFLICT DO NOTHING
  RETURNING credential_ref, tenant_id, knowledge_space_id, source_id
), event AS (
  INSERT INTO kfs_credentials_event (created_at, kind, actor, credential_ref, tenant_id, knowledge_space_id, source_id)
  SELECT statement_timestamp(), 'adopted', %(actor)s, credential_ref, tenant_id, knowledge_space_id, source_id
  FROM ledger
), object AS (
  INSERT INTO kfs_credentials_secret_object (credential_ref, store, created_at, updated_at)
  SELECT credential_ref, %(store)s, statement_timestamp(), statement_timestamp() FROM ledger
  ON CONFLICT DO NOTHING
)
SELECT credential_ref FROM ledger

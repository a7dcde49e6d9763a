-- Final rows whose time is up, and which a patrol has passed since: nothing of them is in the store. A row that a source
-- still names stays, as the only thing that tells what became of its secret.
WITH final AS (
  SELECT ledger.id, ledger.credential_ref, ledger.tenant_id, ledger.knowledge_space_id, ledger.source_id
  FROM source_secret_lifecycle_refs ledger
  LEFT JOIN kfs_credentials_secret_object object ON object.credential_ref = ledger.credential_ref
  JOIN kfs_credentials_round patrol ON patrol.name = 'patrol:' || COALESCE(object.store, 'default')
  WHERE ledger.state = 'deleted'
    AND ledger.next_delete_at IS NULL
    AND ledger.lease_expires_at IS NULL
    AND ledger.updated_at <= statement_timestamp() - make_interval(secs => %(retention)s)
    AND ledger.updated_at < patrol.covers_until
    AND NOT EXISTS (SELECT FROM sources src WHERE src.credential_ref = ledger.credential_ref)
  -- In the order of the claim index: those that are too young, or many, are not read.
  ORDER BY ledger.next_delete_at, ledger.lease_expires_at, ledger.updated_at, ledger.id
  LIMIT %(limit)s
  FOR UPDATE OF ledger SKIP LOCKED
), object AS (
  DELETE FROM kfs_credentials_secret_object object USING final WHERE object.credential_ref = final.credential_ref
), event AS (
  INSERT INTO kfs_credentials_event (created_at, kind, actor, credential_ref, tenant_id, knowledge_space_id, source_id)
  SELECT statement_timestamp(), 'forgotten', %(actor)s, credential_ref, tenant_id, knowledge_space_id, source_id
  FROM final
)
DELETE FROM source_secret_lifecycle_refs ledger USING final WHERE ledger.id = final.id
RETURNING ledger.credential_ref

-- What is known of a ref that a source names: the source, the ledger's row, and whether it was ever claimed for erasure.
SELECT space.tenant_id, src.knowledge_space_id, src.id, src.version, src.status, ledger.state,
  (ledger.tenant_id, ledger.knowledge_space_id, ledger.source_id)
    IS NOT DISTINCT FROM (space.tenant_id, src.knowledge_space_id, src.id),
  COALESCE(ledger.delete_attempts > 0 OR object.first_claimed_at IS NOT NULL, FALSE),
  COALESCE(object.store, 'default')
FROM sources src
JOIN knowledge_spaces space ON space.id = src.knowledge_space_id
LEFT JOIN source_secret_lifecycle_refs ledger ON ledger.credential_ref = src.credential_ref
LEFT JOIN kfs_credentials_secret_object object ON object.credential_ref = src.credential_ref
WHERE src.credential_ref = %(ref)s

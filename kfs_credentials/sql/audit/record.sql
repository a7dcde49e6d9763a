-- The same thing has become of all of these refs. The ledger says whose they are.
INSERT INTO kfs_credentials_event (
  created_at, kind, actor, credential_ref, tenant_id, knowledge_space_id, source_id, detail
)
SELECT statement_timestamp(), %(kind)s, %(actor)s, credential_ref, tenant_id, knowledge_space_id, source_id, %(detail)s
FROM source_secret_lifecycle_refs
WHERE credential_ref = ANY (%(refs)s::text[])
RETURNING credential_ref

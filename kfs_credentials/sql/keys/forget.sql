-- Nothing lies under these refs, whose ledger rows are locked: the key that was noted when they were reserved holds
-- nothing of theirs. Whoever puts something there yet notes its key as it is activated.
UPDATE kfs_credentials_secret_object object SET key_id = NULL, updated_at = statement_timestamp()
FROM unnest(%(refs)s::text[], %(key_ids)s::text[]) AS item (ref, key_id), source_secret_lifecycle_refs ledger
WHERE object.credential_ref = item.ref
  AND object.key_id = item.key_id
  AND ledger.credential_ref = item.ref
  AND ledger.state IN ('staged', 'candidate', 'retired')
RETURNING object.credential_ref

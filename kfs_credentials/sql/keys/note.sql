-- What the store said that these objects are sealed under; their ledger rows are locked.
WITH item AS (
  SELECT * FROM unnest(%(refs)s::text[], %(stores)s::text[], %(key_ids)s::text[], %(sizes)s::integer[])
    AS item (ref, store, key_id, size)
)
INSERT INTO kfs_credentials_secret_object AS object (credential_ref, store, key_id, size, created_at, updated_at)
SELECT item.ref, item.store, item.key_id, item.size, statement_timestamp(), statement_timestamp()
FROM item
JOIN source_secret_lifecycle_refs ledger ON ledger.credential_ref = item.ref
ORDER BY item.ref
ON CONFLICT (credential_ref) DO UPDATE SET
  key_id = excluded.key_id, size = excluded.size, updated_at = excluded.updated_at
RETURNING credential_ref

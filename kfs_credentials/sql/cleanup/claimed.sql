-- What is known of the objects that are claimed for erasure; their ledger rows are locked, and not changed yet. The
-- first claim is kept: from then on the ref is never in use again. Tells whether this erasure is the confirmation.
INSERT INTO kfs_credentials_secret_object AS object (
  credential_ref, store, first_claimed_at, first_erased_at, created_at, updated_at
)
SELECT credential_ref, 'default', statement_timestamp(), deleted_at, statement_timestamp(), statement_timestamp()
FROM source_secret_lifecycle_refs
WHERE id = ANY (%(rows)s::uuid[])
ORDER BY credential_ref  -- as know.sql has it: both insert, and wait for each other
ON CONFLICT (credential_ref) DO UPDATE SET
  first_claimed_at = COALESCE(object.first_claimed_at, excluded.first_claimed_at),
  first_erased_at = COALESCE(object.first_erased_at, excluded.first_erased_at),
  updated_at = excluded.updated_at
RETURNING credential_ref, store,
  COALESCE(first_erased_at + make_interval(secs => %(horizon)s) <= statement_timestamp(), FALSE)

-- Rows about objects whose refs somebody else reserved: from here on the patrol can get from object to ref.
INSERT INTO kfs_credentials_secret_object (credential_ref, store, created_at, updated_at)
SELECT ref, 'default', statement_timestamp(), statement_timestamp()
FROM unnest(%(refs)s::text[]) AS ref
ORDER BY ref
ON CONFLICT DO NOTHING
RETURNING credential_ref

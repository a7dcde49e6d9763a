-- Of objects that the store listed, those that should not be there: their row is final (with its id), or there is none.
SELECT wanted.digest, ledger.id
FROM unnest(%(digests)s::bytea[]) AS wanted (digest)
LEFT JOIN kfs_credentials_secret_object object ON sha256(replace(object.credential_ref, '\', '')::bytea) = wanted.digest
LEFT JOIN source_secret_lifecycle_refs ledger ON ledger.credential_ref = object.credential_ref
WHERE ledger.id IS NULL OR (ledger.state = 'deleted' AND ledger.next_delete_at IS NULL)

-- Of objects that have no row in our own table, those that the ledger knows. Reads the whole ledger, once a patrol that
-- found any: no index leads from an object to a ref that somebody else has reserved a moment ago.
SELECT ledger.credential_ref, sha256(replace(ledger.credential_ref, '\', '')::bytea)
FROM source_secret_lifecycle_refs ledger
WHERE sha256(replace(ledger.credential_ref, '\', '')::bytea) = ANY (%(digests)s::bytea[])

-- Of objects that have no row in our own table, those that somebody accounts for all the same, in one snapshot: the ledger,
-- whoever has reserved the ref; or a source that names it, and for which the cleanup would register it. Reads both tables
-- whole, and so only if there is such an object: no index leads from an object to a ref that is not ours.
SELECT sha256(replace(ledger.credential_ref, '\', '')::bytea) AS digest, FALSE
FROM source_secret_lifecycle_refs ledger
WHERE sha256(replace(ledger.credential_ref, '\', '')::bytea) = ANY (%(digests)s::bytea[])
UNION ALL
SELECT sha256(replace(src.credential_ref, '\', '')::bytea), TRUE
FROM sources src
WHERE src.credential_ref IS NOT NULL
  AND sha256(replace(src.credential_ref, '\', '')::bytea) = ANY (%(digests)s::bytea[])

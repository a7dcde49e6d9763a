-- For each start the next ref in use of this store, with its scope: spread over all of them.
SELECT DISTINCT found.*
FROM unnest(%(starts)s::text[]) AS start
CROSS JOIN LATERAL (
  SELECT ledger."credential_ref", "tenant_id", "knowledge_space_id", "source_id"
  FROM "source_secret_lifecycle_refs" AS ledger
  LEFT JOIN "kfs_credentials_secret_object" AS object ON object."credential_ref" = ledger."credential_ref"
  WHERE ledger."credential_ref" >= start AND "state" = 'active' AND COALESCE(object."store", 'default') = %(store)s
  ORDER BY ledger."credential_ref"
  LIMIT 1
) AS found

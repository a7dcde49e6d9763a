-- For each start the next ref in use of this store, with its scope: spread over all of them. Where few of many are in this
-- store, a start looks no further than a few hundred refs.
SELECT DISTINCT found.*
FROM unnest(%(starts)s::text[]) AS start
CROSS JOIN LATERAL (
  SELECT few.*
  FROM (
    SELECT "credential_ref", "tenant_id", "knowledge_space_id", "source_id"
    FROM "source_secret_lifecycle_refs"
    WHERE "credential_ref" >= start AND "state" = 'active'
    ORDER BY "credential_ref"
    LIMIT 300
  ) AS few
  LEFT JOIN "kfs_credentials_secret_object" AS object ON object."credential_ref" = few."credential_ref"
  WHERE COALESCE(object."store", 'default') = %(store)s
  ORDER BY few."credential_ref"
  LIMIT 1
) AS found

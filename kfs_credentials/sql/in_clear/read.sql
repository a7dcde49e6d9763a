-- What lies in clear in the credentials of sources, and the ref beside it, if there is one: whether the ledger has that as
-- theirs and active, and where its object lies. Values come only as far as the batch may hold them; the sources beyond
-- are left for the next call. Of a value that no batch can hold comes its SHA-256, by which lock.sql tells whether it is
-- the same still. Locks nothing.
WITH found AS (
  SELECT src.id, space.tenant_id, src.knowledge_space_id, src.version, src.credential_ref,
    jsonb_typeof(src.metadata -> 'credentials') AS shape,
    (src.metadata -> 'credentials')::text AS credentials,
    COALESCE((ledger.state, ledger.tenant_id, ledger.knowledge_space_id, ledger.source_id)
      = ('active', space.tenant_id, src.knowledge_space_id, src.id), FALSE) AS in_use,
    COALESCE(object.store, 'default') AS store,
    src.status = 'deleting'
      OR src.id = ANY (%(leaving)s::uuid[]) OR src.knowledge_space_id = ANY (%(leaving)s::uuid[]) AS leaving
  FROM sources src
  JOIN knowledge_spaces space ON space.id = src.knowledge_space_id
  LEFT JOIN source_secret_lifecycle_refs ledger ON ledger.credential_ref = src.credential_ref
  LEFT JOIN kfs_credentials_secret_object object ON object.credential_ref = src.credential_ref
  WHERE src.id = ANY (%(sources)s::uuid[])
    AND (%(tenant)s::text IS NULL OR space.tenant_id = %(tenant)s)
), measured AS (
  SELECT *, octet_length(credentials) AS size,
    COALESCE(sum(octet_length(credentials)) OVER (ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)
      AS before
  FROM found
)
SELECT id, tenant_id, knowledge_space_id, version, credential_ref, shape,
  CASE WHEN size <= %(bytes)s THEN credentials END,
  CASE WHEN size > %(bytes)s THEN sha256(convert_to(credentials, 'UTF8')) END,
  in_use, store, leaving
FROM measured
WHERE before < %(bytes)s
ORDER BY id

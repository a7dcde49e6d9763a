-- The tenant and space of every ledger row of a source, or of a space, that may be gone.
--
-- Nothing but the ledger knows them then, and its index begins with the tenant. Steps from one space to the next in
-- that index, and looks for the source in each: the cost grows with the number of spaces, not of refs.
WITH RECURSIVE scopes AS (
  (
    SELECT tenant_id, knowledge_space_id
    FROM source_secret_lifecycle_refs
    ORDER BY tenant_id, knowledge_space_id
    LIMIT 1
  )
  UNION ALL
  SELECT following.*
  FROM scopes
  CROSS JOIN LATERAL (
    SELECT refs.tenant_id, refs.knowledge_space_id
    FROM source_secret_lifecycle_refs AS refs
    WHERE (refs.tenant_id, refs.knowledge_space_id) > (scopes.tenant_id, scopes.knowledge_space_id)
    ORDER BY refs.tenant_id, refs.knowledge_space_id
    LIMIT 1
  ) AS following
)
SELECT tenant_id, knowledge_space_id
FROM scopes
WHERE knowledge_space_id = %(id)s
  OR EXISTS (
    SELECT FROM source_secret_lifecycle_refs AS refs
    WHERE refs.tenant_id = scopes.tenant_id
      AND refs.knowledge_space_id = scopes.knowledge_space_id
      AND refs.source_id = %(id)s
  )

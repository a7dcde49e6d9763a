-- The first tenants in order. Steps from one to the next in the index, whatever the number of spaces of each.
WITH RECURSIVE tenants AS (
  (SELECT tenant_id FROM knowledge_spaces ORDER BY tenant_id LIMIT 1)
  UNION ALL
  SELECT (
    SELECT spaces.tenant_id
    FROM knowledge_spaces AS spaces
    WHERE spaces.tenant_id > tenants.tenant_id
    ORDER BY spaces.tenant_id
    LIMIT 1
  )
  FROM tenants
  WHERE tenants.tenant_id IS NOT NULL
)
SELECT tenant_id FROM tenants WHERE tenant_id IS NOT NULL LIMIT %(limit)s

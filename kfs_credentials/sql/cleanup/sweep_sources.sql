-- A page of the sources that name a ref, in the order of the refs, and whether the ledger has it as theirs and active.
-- Locks nothing.
WITH page AS MATERIALIZED (
  SELECT src.id, src.knowledge_space_id, src.credential_ref, space.tenant_id
  FROM sources src
  JOIN knowledge_spaces space ON space.id = src.knowledge_space_id
  WHERE src.credential_ref IS NOT NULL
    AND (%(after)s::text IS NULL OR src.credential_ref > %(after)s)
    AND (%(tenant)s::text IS NULL OR space.tenant_id = %(tenant)s)
    AND (%(space)s::uuid IS NULL OR src.knowledge_space_id = %(space)s)
  ORDER BY src.credential_ref
  LIMIT %(limit)s
)
SELECT page.credential_ref,
  (ledger.state, ledger.tenant_id, ledger.knowledge_space_id, ledger.source_id)
    IS NOT DISTINCT FROM ('active', page.tenant_id, page.knowledge_space_id, page.id)
FROM page
LEFT JOIN source_secret_lifecycle_refs ledger ON ledger.credential_ref = page.credential_ref
ORDER BY page.credential_ref

-- A page of the sources that name a ref, in the order of the refs: whether the ledger has it as theirs and active, and
-- whether credentials lie in clear beside it. Returns what is wrong, a row each, and the last row of the page anyhow,
-- with how many were looked at. `only`: these alone, for the second look. Locks nothing.
WITH page AS MATERIALIZED (
  SELECT src.id, src.knowledge_space_id, src.credential_ref, space.tenant_id,
    jsonb_typeof(src.metadata -> 'credentials') AS shape,
    src.status <> 'deleting'
      AND src.id <> ALL (%(leaving)s::uuid[]) AND src.knowledge_space_id <> ALL (%(leaving)s::uuid[])
      AND (%(tenant)s::text IS NULL OR space.tenant_id = %(tenant)s)
      AND (%(space)s::uuid IS NULL OR src.knowledge_space_id = %(space)s) AS wanted
  FROM sources src
  LEFT JOIN knowledge_spaces space ON space.id = src.knowledge_space_id
  WHERE src.credential_ref IS NOT NULL
    AND (%(after)s::text IS NULL OR src.credential_ref > %(after)s)
    AND (%(only)s::text[] IS NULL OR src.credential_ref = ANY (%(only)s::text[]))
  ORDER BY src.credential_ref
  LIMIT %(limit)s
), numbered AS (
  SELECT page.*, row_number() OVER (ORDER BY credential_ref) = count(*) OVER () AS is_last,
    count(*) FILTER (WHERE wanted) OVER () AS seen
  FROM page
)
SELECT page.credential_ref, problem.class, page.tenant_id, page.id, page.credential_ref, problem.detail, page.seen
FROM numbered page
LEFT JOIN source_secret_lifecycle_refs ledger ON ledger.credential_ref = page.credential_ref
CROSS JOIN LATERAL (VALUES
  (CASE
    WHEN NOT page.wanted THEN NULL
    WHEN ledger.id IS NULL THEN 'ref_unknown'
    WHEN (ledger.tenant_id, ledger.knowledge_space_id, ledger.source_id)
      IS DISTINCT FROM (page.tenant_id, page.knowledge_space_id, page.id) THEN 'ref_misplaced'
    -- A reservation that its source names is made active once its time is over.
    WHEN ledger.state IN ('staged', 'candidate') AND ledger.recover_after > statement_timestamp() THEN NULL
    WHEN ledger.state <> 'active' THEN 'ref_not_active'
  END, ledger.state),
  (CASE
    WHEN NOT page.wanted OR page.shape IS NULL OR page.shape = 'null' THEN NULL
    WHEN page.shape = 'object' THEN 'plaintext'
    WHEN EXISTS (
      SELECT FROM kfs_credentials_acknowledgement seen WHERE seen.source_id = page.id AND seen.shape = page.shape
    ) THEN NULL
    ELSE 'plaintext'
  END, page.shape)
) AS problem (class, detail)
WHERE problem.class IS NOT NULL OR page.is_last
ORDER BY page.credential_ref

-- A page of the ledger, in the order of the refs: those whose objects are to be read. Active ones; retired ones that nobody
-- has begun to erase; those that wait for a person. `needed`: in use, or the only copy of something: the others may never
-- have been put. Returns them, and the last row of the page anyhow. `only`: these alone, for the second look.
WITH page AS MATERIALIZED (
  SELECT ledger.credential_ref, ledger.state, ledger.tenant_id, ledger.knowledge_space_id, ledger.source_id,
    ledger.delete_attempts,
    (%(tenant)s::text IS NULL OR ledger.tenant_id = %(tenant)s)
      AND (%(space)s::uuid IS NULL OR ledger.knowledge_space_id = %(space)s) AS wanted
  FROM source_secret_lifecycle_refs ledger
  WHERE (%(after)s::text IS NULL OR ledger.credential_ref > %(after)s)
    AND (%(only)s::text[] IS NULL OR ledger.credential_ref = ANY (%(only)s::text[]))
  ORDER BY ledger.credential_ref
  LIMIT %(limit)s
), looked_at AS (
  SELECT page.*, COALESCE(object.store, 'default') AS store, object.size,
    row_number() OVER (ORDER BY page.credential_ref) = count(*) OVER () AS is_last,
    page.state = 'active' OR COALESCE(object.attention = 'displaced', FALSE)
      OR EXISTS (SELECT FROM sources src WHERE src.credential_ref = page.credential_ref) AS needed,
    page.delete_attempts > 0 OR object.first_claimed_at IS NOT NULL AS claimed
  FROM page
  LEFT JOIN kfs_credentials_secret_object object ON object.credential_ref = page.credential_ref
)
SELECT credential_ref, wanted AND (state = 'active' OR (state = 'retired' AND (needed OR NOT claimed))),
  needed, tenant_id, knowledge_space_id, source_id, store, size
FROM looked_at
WHERE is_last OR (wanted AND (state = 'active' OR (state = 'retired' AND (needed OR NOT claimed))))
ORDER BY credential_ref

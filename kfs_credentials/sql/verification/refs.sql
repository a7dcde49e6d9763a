-- A page of the ledger, in the order of the refs: what is active has its source, and what is not final has its next move
-- at a known time, or waits for a person with a reason. Returns as named.sql does. Locks nothing.
-- A source that is deleted by others than services leaves its ref active until the next sweep: that is no problem while
-- sweeps are made (`sweeps`: so far apart, at the most), and `unswept`.
WITH page AS MATERIALIZED (
  SELECT ledger.*,
    (%(tenant)s::text IS NULL OR ledger.tenant_id = %(tenant)s)
      AND (%(space)s::uuid IS NULL OR ledger.knowledge_space_id = %(space)s) AS wanted
  FROM source_secret_lifecycle_refs ledger
  WHERE (%(after)s::text IS NULL OR ledger.credential_ref > %(after)s)
    AND (%(only)s::text[] IS NULL OR ledger.credential_ref = ANY (%(only)s::text[]))
  ORDER BY ledger.credential_ref
  LIMIT %(limit)s
), looked_at AS (
  SELECT page.credential_ref, page.tenant_id, page.source_id, page.state,
    row_number() OVER (ORDER BY page.credential_ref) = count(*) OVER () AS is_last,
    count(*) FILTER (WHERE wanted) OVER () AS seen,
    CASE
      WHEN NOT page.wanted THEN NULL
      WHEN page.state = 'active' AND NOT EXISTS (
        SELECT FROM sources src
        WHERE src.credential_ref = page.credential_ref
          AND (src.id, src.knowledge_space_id) = (page.source_id, page.knowledge_space_id)
      ) THEN CASE
        WHEN EXISTS (SELECT FROM sources src WHERE src.credential_ref = page.credential_ref) THEN 'ref_unnamed'
        WHEN EXISTS (
          SELECT FROM kfs_credentials_round round
          WHERE round.name = 'sweep' AND round.covers_until > statement_timestamp() - make_interval(secs => %(sweeps)s)
        ) THEN 'unswept'
        ELSE 'ref_unnamed'
      END
      WHEN page.state IN ('staged', 'candidate', 'active')
        AND (page.delete_attempts > 0 OR object.first_claimed_at IS NOT NULL) THEN 'ref_claimed'
      WHEN page.state = 'retired' AND page.next_delete_at IS NULL
        AND object.attention IS NULL AND object.abandoned_at IS NULL
        -- Held, until the source that names it is repaired: that is a finding of its own.
        AND NOT EXISTS (SELECT FROM sources src WHERE src.credential_ref = page.credential_ref) THEN 'ref_undated'
      WHEN page.state IN ('retired', 'deleted') AND page.next_delete_at = 'infinity' THEN 'ref_stuck'
      WHEN page.state IN ('staged', 'candidate') AND page.recover_after = 'infinity' THEN 'ref_stuck'
      -- No lease is that long: nobody would take the row over before.
      WHEN page.lease_expires_at > statement_timestamp() + make_interval(secs => %(longest_lease)s) THEN 'ref_stuck'
      WHEN page.state = 'deleted' AND page.next_delete_at IS NULL AND object.first_erased_at IS NULL
        THEN 'erasure_unproved'
    END AS problem
  FROM page
  LEFT JOIN kfs_credentials_secret_object object ON object.credential_ref = page.credential_ref
)
SELECT credential_ref, problem, tenant_id, source_id, credential_ref, state, seen
FROM looked_at
WHERE problem IS NOT NULL OR is_last
ORDER BY credential_ref

-- A page of the jobs, in the order of their ids: what is not over can be claimed, now or at a known time, and what is over
-- has left nothing behind. Returns as named.sql does. Locks nothing.
WITH page AS MATERIALIZED (
  SELECT job.*,
    (%(tenant)s::text IS NULL OR job.tenant_id = %(tenant)s)
      AND (%(space)s::uuid IS NULL OR job.knowledge_space_id = %(space)s)
      AND job.source_id <> ALL (%(leaving)s::uuid[]) AND job.knowledge_space_id <> ALL (%(leaving)s::uuid[])
      AS wanted
  FROM source_credential_backfills job
  WHERE (%(after)s::uuid IS NULL OR job.id > %(after)s)
    AND (%(only)s::uuid[] IS NULL OR job.id = ANY (%(only)s::uuid[]))
  ORDER BY job.id
  LIMIT %(limit)s
), looked_at AS (
  SELECT page.id, page.tenant_id, page.source_id, page.candidate_credential_ref, page.run_state,
    row_number() OVER (ORDER BY page.id) = count(*) OVER () AS is_last,
    count(*) FILTER (WHERE wanted) OVER () AS seen,
    CASE
      WHEN NOT page.wanted OR src.status = 'deleting' THEN NULL
      WHEN page.run_state = 'succeeded' AND src.credential_ref IS NULL
        AND jsonb_typeof(src.metadata -> 'credentials') = 'object' THEN 'job_in_clear'
      WHEN page.run_state IN ('succeeded', 'failed') AND ledger.state IN ('staged', 'candidate')
        AND ledger.recover_after <= statement_timestamp() THEN 'job_candidate_left'
      WHEN page.run_state = 'failed' AND COALESCE(page.last_error_code, '') = '' THEN 'job_unexplained'
      WHEN page.run_state = 'queued'
        AND page.updated_at > statement_timestamp() + make_interval(secs => %(longest_lease)s) THEN 'job_stuck'
      WHEN page.run_state = 'running'
        AND page.lease_expires_at > statement_timestamp() + make_interval(secs => %(longest_lease)s) THEN 'job_stuck'
      WHEN page.run_state IN ('queued', 'running') AND ledger.state IS DISTINCT FROM 'candidate'
        THEN 'job_candidate_lost'
    END AS problem
  FROM page
  LEFT JOIN sources src ON src.id = page.source_id AND src.knowledge_space_id = page.knowledge_space_id
  LEFT JOIN source_secret_lifecycle_refs ledger ON ledger.credential_ref = page.candidate_credential_ref
    AND ledger.source_id = page.source_id
)
SELECT id, problem, tenant_id, source_id, candidate_credential_ref, run_state, seen
FROM looked_at
WHERE problem IS NOT NULL OR is_last
ORDER BY id

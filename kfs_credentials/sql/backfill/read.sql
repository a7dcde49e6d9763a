-- What the jobs of a claim have to move, as it is now; whether the candidate's ledger row lets anything be put under it;
-- and whether the source names the candidate already. Locks nothing: it is read again, under locks, before anything is
-- activated. Values come only as far as the batch may hold them; the jobs beyond are left for the next claim.
WITH job AS (
  SELECT * FROM unnest(%(jobs)s::uuid[]) WITH ORDINALITY AS job (id, place)
), found AS (
  SELECT job.place, work.id, work.tenant_id, work.knowledge_space_id, work.source_id, work.candidate_credential_ref,
    work.secret_fingerprint, work.retry_count,
    CASE WHEN jsonb_typeof(src.metadata -> 'credentials') = 'object'
      THEN (src.metadata -> 'credentials')::text END AS credentials,
    COALESCE(ledger.state IN ('candidate', 'active'), FALSE) AS usable,
    COALESCE(src.credential_ref = work.candidate_credential_ref, FALSE) AS named
  FROM job
  JOIN source_credential_backfills work ON work.id = job.id
  LEFT JOIN sources src ON src.id = work.source_id AND src.knowledge_space_id = work.knowledge_space_id
  LEFT JOIN source_secret_lifecycle_refs ledger ON ledger.credential_ref = work.candidate_credential_ref
    AND ledger.tenant_id = work.tenant_id
    AND ledger.knowledge_space_id = work.knowledge_space_id
    AND ledger.source_id = work.source_id
), measured AS (
  SELECT *, COALESCE(octet_length(credentials), 0) AS size,
    COALESCE(sum(octet_length(credentials)) OVER (ORDER BY place) - COALESCE(octet_length(credentials), 0), 0) AS before
  FROM found
)
SELECT id, tenant_id, knowledge_space_id, source_id, candidate_credential_ref, secret_fingerprint, retry_count,
  credentials IS NOT NULL,
  CASE WHEN size <= %(bytes)s THEN credentials END, usable, named
FROM measured
WHERE before < %(bytes)s
ORDER BY place

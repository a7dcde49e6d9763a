-- A page of legacy sources that no job is at work on, locked until their jobs are there.
--
-- The space FOR KEY SHARE keeps it from being deleted under the new rows; the source FOR NO KEY UPDATE keeps a second
-- discoverer off it. Both SKIP LOCKED: the Node service holds a space's row while it talks to its store, and DELETE
-- takes source and job in the other order. What is passed over is found by the next pass.
--
-- Values come only as far as the batch may hold them; `size` says how large the others are.
WITH page AS MATERIALIZED (
  SELECT src.id, src.knowledge_space_id, space.tenant_id, src.version,
    (src.metadata -> 'credentials')::text AS credentials
  FROM sources src
  JOIN knowledge_spaces space ON space.id = src.knowledge_space_id
  WHERE src.credential_ref IS NULL
    AND jsonb_typeof(src.metadata -> 'credentials') = 'object'
    AND (%(after)s::uuid IS NULL OR src.id > %(after)s)
    AND src.status <> 'deleting'
    AND src.id <> ALL (%(leaving)s::uuid[]) AND src.knowledge_space_id <> ALL (%(leaving)s::uuid[])
    AND (%(tenant)s::text IS NULL OR space.tenant_id = %(tenant)s)
    AND (%(space)s::uuid IS NULL OR src.knowledge_space_id = %(space)s)
    AND NOT EXISTS (
      SELECT FROM source_credential_backfills job
      WHERE job.tenant_id = space.tenant_id
        AND job.knowledge_space_id = src.knowledge_space_id
        AND job.source_id = src.id
        AND job.run_state <> 'succeeded'
    )
  ORDER BY src.id
  LIMIT %(limit)s
  FOR NO KEY UPDATE OF src SKIP LOCKED
  FOR KEY SHARE OF space SKIP LOCKED
), measured AS (
  SELECT *, octet_length(credentials) AS size,
    sum(octet_length(credentials)) OVER (ORDER BY id) - octet_length(credentials) AS before
  FROM page
)
SELECT id, knowledge_space_id, tenant_id, version, CASE WHEN size <= %(bytes)s THEN credentials END
FROM measured
WHERE before < %(bytes)s
ORDER BY id

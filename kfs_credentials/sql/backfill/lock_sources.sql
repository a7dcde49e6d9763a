-- The sources of a batch, locked, with their credentials as they are under the lock. SKIP LOCKED: a DELETE holds its
-- source and waits for the job, which this transaction holds already. What is locked comes later again.
SELECT src.id, src.version, src.credential_ref,
  COALESCE(jsonb_typeof(src.metadata -> 'credentials') = 'object', FALSE),
  CASE WHEN jsonb_typeof(src.metadata -> 'credentials') = 'object'
    AND octet_length((src.metadata -> 'credentials')::text) <= %(bytes)s
    THEN (src.metadata -> 'credentials')::text END,
  src.status = 'deleting'
FROM sources src
WHERE src.id = ANY (%(sources)s::uuid[])
ORDER BY src.id
FOR NO KEY UPDATE SKIP LOCKED

-- Sources that are about to lose what lies in clear in them, locked, with that as it is under the lock: as read.sql has it.
-- Their refs' ledger rows are locked before. SKIP LOCKED: a DELETE holds its source and waits for the job.
SELECT src.id, src.version, src.credential_ref, jsonb_typeof(src.metadata -> 'credentials'),
  CASE WHEN octet_length((src.metadata -> 'credentials')::text) <= %(bytes)s
    THEN (src.metadata -> 'credentials')::text END,
  CASE WHEN octet_length((src.metadata -> 'credentials')::text) > %(bytes)s
    THEN sha256(convert_to((src.metadata -> 'credentials')::text, 'UTF8')) END
FROM sources src
WHERE src.id = ANY (%(sources)s::uuid[])
ORDER BY src.id
FOR NO KEY UPDATE SKIP LOCKED

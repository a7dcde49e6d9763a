-- What a database holds some time after 0014: refs with and without a ledger row, and rows in every state.
UPDATE sources SET
  credential_ref = replace(id::text, 'a0000000-', 'source-secret:v1:b0000000-'),
  metadata = metadata - 'credentials',
  version = greatest(version, 1)
WHERE id BETWEEN 'a0000000-0000-4000-8000-000000000001' AND 'a0000000-0000-4000-8000-000000000007';

-- 1 to 4 are registered: as the seed did it, by a service, by a worker. 5 to 7 are not.
INSERT INTO source_secret_lifecycle_refs (
  id, tenant_id, knowledge_space_id, source_id, credential_ref, operation_id, purpose, state, source_version,
  recover_after, delete_attempts, row_version, created_at, updated_at
)
SELECT
  CASE WHEN number = 1 THEN src.id ELSE md5('ledger' || number)::uuid END,
  space.tenant_id, space.id, src.id, src.credential_ref, operation, purpose, 'active', src.version,
  '2025-06-07 08:14:10+00', 0, number, '2025-06-07 08:09:10+00', '2025-06-07 08:10:10+00'
FROM (VALUES
  (1, 'legacy-source:a0000000-0000-4000-8000-000000000001:1', 'rotate'),
  (2, 'operation-2', 'create'),
  (3, 'operation-3', 'rotate'),
  (4, 'operation-4', 'backfill')
) AS registered (number, operation, purpose)
JOIN sources src ON src.id = ('a0000000-0000-4000-8000-' || lpad(number::text, 12, '0'))::uuid
JOIN knowledge_spaces space ON space.id = src.knowledge_space_id;

-- Every other state, of sources that are there (19: what 2 had before) and of sources that are gone.
INSERT INTO source_secret_lifecycle_refs (
  id, tenant_id, knowledge_space_id, source_id, credential_ref, operation_id, purpose, state, source_version,
  recover_after, next_delete_at, worker_id, lease_token, lease_expires_at, heartbeat_at, delete_attempts, row_version,
  last_error_code, last_error_message, created_at, updated_at, deleted_at
)
SELECT
  md5('ledger' || number)::uuid, 'tenant-a', '50000000-0000-4000-8000-000000000001', source::uuid,
  'source-secret:v1:b0000000-0000-4000-8000-' || lpad(number::text, 12, '0'), 'operation-' || number, purpose, state,
  source_version, '2025-06-07 08:14:10+00', next_delete_at::timestamptz, worker_id,
  CASE WHEN worker_id IS NOT NULL THEN md5('token')::uuid END,
  CASE WHEN worker_id IS NOT NULL THEN timestamptz '2025-06-07 08:15:10+00' END,
  CASE WHEN worker_id IS NOT NULL THEN timestamptz '2025-06-07 08:14:10+00' END,
  attempts, 3, error, error, '2025-06-07 08:09:10+00', '2025-06-07 08:10:10+00', deleted_at::timestamptz
FROM (VALUES
  (31, 'a0000000-0000-4000-8000-000000000013', 'create', 'staged', NULL, NULL, NULL, 0, NULL, NULL),
  (32, 'a0000000-0000-4000-8000-000000000021', 'backfill', 'candidate', 1, NULL, NULL, 0, NULL, NULL),
  (33, 'a0000000-0000-4000-8000-000000000002', 'rotate', 'retired', 6, '2025-06-07 08:20:10+00', NULL, 1, 'SOURCE_SECRET_DELETE_FAILED', NULL),
  (34, 'a0000000-0000-4000-8000-000000000098', 'rotate', 'deleting', 2, '2025-06-07 08:20:10+00', 'node-1', 2, NULL, NULL),
  (35, 'a0000000-0000-4000-8000-000000000099', 'create', 'deleted', 1, NULL, NULL, 1, NULL, '2025-06-07 08:30:10+00'),
  (36, 'a0000000-0000-4000-8000-000000000024', 'backfill', 'candidate', 1, NULL, NULL, 0, NULL, NULL)
) AS refs (number, source, purpose, state, source_version, next_delete_at, worker_id, attempts, error, deleted_at);

-- A job in every state.
INSERT INTO source_credential_backfills (
  id, tenant_id, knowledge_space_id, source_id, source_version, candidate_credential_ref, secret_fingerprint, run_state,
  worker_id, lease_token, lease_expires_at, heartbeat_at, retry_count, row_version, last_error_code, created_at,
  updated_at, completed_at
)
SELECT
  md5('job' || number)::uuid, space.tenant_id, space.id, src.id, greatest(src.version, 1), ref, repeat('0f', 32), state,
  CASE WHEN state = 'running' THEN 'node-1' END,
  CASE WHEN state = 'running' THEN md5('token')::uuid END,
  CASE WHEN state = 'running' THEN timestamptz '2025-06-07 08:15:10+00' END,
  CASE WHEN state = 'running' THEN timestamptz '2025-06-07 08:14:10+00' END,
  retries, 2, error, '2025-06-07 08:09:10+00', '2025-06-07 08:10:10+00', completed_at::timestamptz
FROM (VALUES
  (21, 'source-secret:v1:b0000000-0000-4000-8000-000000000032', 'queued', 0, NULL, NULL),
  (24, 'source-secret:v1:b0000000-0000-4000-8000-000000000036', 'running', 1, NULL, NULL),
  (4, 'source-secret:v1:b0000000-0000-4000-8000-000000000004', 'succeeded', 0, NULL, '2025-06-07 08:20:10+00'),
  (23, 'source-secret:v1:b0000000-0000-4000-8000-000000000037', 'failed', 5, 'SOURCE_CREDENTIAL_BACKFILL_FAILED', '2025-06-07 08:20:10+00')
) AS jobs (number, ref, state, retries, error, completed_at)
JOIN sources src ON src.id = ('a0000000-0000-4000-8000-' || lpad(number::text, 12, '0'))::uuid
JOIN knowledge_spaces space ON space.id = src.knowledge_space_id;

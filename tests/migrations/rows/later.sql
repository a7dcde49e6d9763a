-- What later versions of knowledge-fs write beside it: a space and a source that are being deleted.
INSERT INTO knowledge_spaces (
  id, tenant_id, slug, name, created_at, updated_at, revision, lifecycle_state, deletion_job_id, deleting_at
) VALUES (
  '50000000-0000-4000-8000-000000000005', repeat('t', 255), 'leaving', 'On its way out', '2025-01-02 03:04:05+00',
  '2025-06-07 08:09:10+00', 4, 'deleting', 'd0000000-0000-4000-8000-000000000001', '2025-06-07 08:09:10+00'
);
INSERT INTO sources (
  id, knowledge_space_id, type, status, name, uri, metadata, permission_scope, version, created_at, updated_at,
  credential_ref, deletion_job_id, deleting_at
) VALUES
  ('a0000000-0000-4000-8000-000000000041', '50000000-0000-4000-8000-000000000005', 'online_drive', 'active', 'Source 41', '',
   '{"title": "With a ref"}', '{}', 3, '2025-01-02 03:04:05+00', '2025-06-07 08:09:10+00',
   'source-secret:v1:b0000000-0000-4000-8000-000000000041', NULL, NULL),
  ('a0000000-0000-4000-8000-000000000042', '50000000-0000-4000-8000-000000000001', 'online_drive', 'deleting', 'Source 42', '',
   '{"credentials": {"access_token": "made-up-42"}}', '{}', 3, '2025-01-02 03:04:05+00', '2025-06-07 08:09:10+00',
   NULL, 'd0000000-0000-4000-8000-000000000002', '2025-06-07 08:09:10+00');
INSERT INTO deletion_jobs (id, tenant_id, knowledge_space_id, target_type, target_id, active_slot, created_at) VALUES
  ('d0000000-0000-4000-8000-000000000001', repeat('t', 255), '50000000-0000-4000-8000-000000000005', 'knowledge_space',
   '50000000-0000-4000-8000-000000000005', 1, '2025-06-07 08:09:10+00'),
  ('d0000000-0000-4000-8000-000000000002', 'tenant-a', '50000000-0000-4000-8000-000000000001', 'source',
   'a0000000-0000-4000-8000-000000000042', NULL, '2025-06-07 08:09:10+00');

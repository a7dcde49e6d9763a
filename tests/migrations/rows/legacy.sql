-- What a live database holds before 0014: legacy credentials in every shape, and metadata of every kind.
INSERT INTO knowledge_spaces (id, tenant_id, slug, name, description, created_at, updated_at) VALUES
  ('50000000-0000-4000-8000-000000000001', 'tenant-a', 'handbook', 'Handbook', 'How we work', '2025-01-02 03:04:05+00', '2025-06-07 08:09:10.123456+00'),
  ('50000000-0000-4000-8000-000000000002', 'tenant-a', 'sales', 'Sales', NULL, '1969-12-31 23:59:59+00', '2025-06-07 08:09:10+02'),
  ('50000000-0000-4000-8000-000000000003', 'tenant-b', 'handbook', 'Handbuch "für alle"', '', '2025-01-02 03:04:05+00', '2025-06-07 08:09:10+00'),
  ('50000000-0000-4000-8000-000000000004', ' Tenant C ', 'empty', 'Nothing in it', NULL, '2025-01-02 03:04:05+00', '2025-06-07 08:09:10+00');

INSERT INTO sources (
  id, knowledge_space_id, type, status, name, uri, metadata, permission_scope, version, created_at, updated_at
)
SELECT
  ('a0000000-0000-4000-8000-' || lpad(number::text, 12, '0'))::uuid,
  ('50000000-0000-4000-8000-' || lpad((1 + number % 3)::text, 12, '0'))::uuid,
  'online_drive', status, 'Source ' || number, 'https://files.example/' || number, metadata::jsonb,
  '{"users": ["u-1"], "groups": []}', version, '2025-01-02 03:04:05+00', '2025-06-07 08:09:10.654321+00'
FROM (VALUES
  (1, 'active', 1, '{"title": "Plain", "credentials": {"access_token": "made-up-1"}}'),
  (2, 'active', 7, '{"credentials": {"credentials": "{\"type\": \"service_account\"}", "private_key": "-----BEGIN\nmade up\n-----END\n"}}'),
  (3, 'active', 2147483647, '{"credentials": {"id": 9007199254740993, "big": 1e400, "small": 1e-400, "exact": 0.1000000000000000055511151231257827}}'),
  (4, 'syncing', 0, '{"credentials": {"version": "zero"}, "other": {"client_secret": "made-up-4"}}'),
  (5, 'error', -3, '{"credentials": {"version": "below zero"}}'),
  (6, 'active', 1, '{"credentials": {"naïve 🔑": "\ud83d\udd11 \u2028 é"}}'),
  (7, 'active', 1, '{"credentials": {}}'),
  (8, 'active', 1, '{"credentials": null, "title": "None"}'),
  (9, 'active', 1, '{"credentials": "made-up-9"}'),
  (10, 'active', 1, '{"credentials": 42}'),
  (11, 'active', 1, '{"credentials": true}'),
  (12, 'active', 1, '{"credentials": [{"access_token": "made-up-12"}]}'),
  (13, 'active', 1, '{"title": "No credentials"}'),
  (14, 'active', 1, '{}'),
  (15, 'active', 1, '[]'),
  (16, 'active', 1, '["credentials"]'),
  (17, 'active', 1, '"credentials"'),
  (18, 'active', 1, 'null'),
  (19, 'active', 1, '{"credentials": {"ref": "source-secret:v1:b0000000-0000-4000-8000-000000000099"}}'),
  (20, 'active', 1, '{"credentials": {"algorithm": "aes-256-gcm", "ciphertext": "bWFkZSB1cA", "version": 1}}')
) AS shapes (number, status, version, metadata);

-- Large enough to be stored out of line.
INSERT INTO sources (
  id, knowledge_space_id, type, status, name, uri, metadata, permission_scope, version, created_at, updated_at
)
SELECT
  ('a0000000-0000-4000-8000-' || lpad(number::text, 12, '0'))::uuid, '50000000-0000-4000-8000-000000000001',
  'website_crawl', 'active', 'Large ' || number, '', jsonb_build_object('credentials', jsonb_build_object('key', text)),
  'null', 1, '2025-01-02 03:04:05+00', '2025-06-07 08:09:10+00'
FROM generate_series(21, 24) AS number,
  LATERAL (SELECT string_agg(md5(number || ':' || part), '') AS text FROM generate_series(1, 500 * (number - 20)) AS part) AS value;

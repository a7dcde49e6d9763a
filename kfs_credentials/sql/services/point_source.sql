-- Let a source, which is locked, name another ref or none, and remove what lies in clear in the same moment: so the row
-- that a constraint may reject, and that the server's log then quotes, has no credentials. The type is looked at first:
-- on an array, `-` would remove elements, and on a scalar it fails.
UPDATE sources src SET
  credential_ref = %(ref)s,
  metadata = CASE WHEN jsonb_typeof(src.metadata) = 'object' THEN src.metadata - 'credentials' ELSE src.metadata END,
  version = src.version + 1,
  updated_at = statement_timestamp()
WHERE src.id = %(source)s
RETURNING src.version

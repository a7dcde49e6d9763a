-- Removes what lies in clear beside a ref. The rows are locked; each condition is repeated, and the rows that were changed
-- are returned. The type is looked at: on an array, `-` would remove elements.
UPDATE sources src SET
  metadata = src.metadata - 'credentials',
  version = src.version + 1,
  updated_at = statement_timestamp()
FROM unnest(%(sources)s::uuid[], %(refs)s::text[]) AS item (source, ref)
WHERE src.id = item.source
  AND src.credential_ref = item.ref
  AND jsonb_typeof(src.metadata) = 'object'
RETURNING src.id, item.ref

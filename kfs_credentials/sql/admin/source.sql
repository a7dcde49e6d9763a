-- What a page shows of a source's JSON. The credentials do not leave the database, and what is large stays there too.
SELECT
  jsonb_typeof(metadata -> 'credentials'),
  CASE WHEN octet_length(other_metadata) <= %(most)s THEN other_metadata END,
  CASE WHEN octet_length(permission_scope::text) <= %(most)s THEN permission_scope::text END
FROM sources
CROSS JOIN LATERAL (
  SELECT (CASE jsonb_typeof(metadata) WHEN 'object' THEN metadata - 'credentials' ELSE metadata END)::text
) AS other (other_metadata)
WHERE id = %(id)s

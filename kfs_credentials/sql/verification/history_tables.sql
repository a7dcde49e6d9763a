-- Tables on the search_path, but sources itself, that have a json or jsonb column `metadata`: a host's history of it, a
-- copy, an outbox. Whether it is jsonb, and the number of their pages.
SELECT namespace.nspname, class.relname, attribute.atttypid = 'jsonb'::regtype,
  pg_relation_size(class.oid) / current_setting('block_size')::bigint
FROM pg_attribute attribute
JOIN pg_class class ON class.oid = attribute.attrelid
JOIN pg_namespace namespace ON namespace.oid = class.relnamespace
WHERE attribute.attname = 'metadata'
  AND NOT attribute.attisdropped
  AND attribute.atttypid IN ('json'::regtype, 'jsonb'::regtype)
  AND class.relkind IN ('r', 'm')
  AND namespace.nspname = ANY (current_schemas(FALSE))
  AND class.oid <> 'sources'::regclass
ORDER BY namespace.nspname, class.relname
LIMIT 100

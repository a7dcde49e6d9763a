-- The same thing was done about all of these sources.
INSERT INTO kfs_credentials_event (created_at, kind, actor, tenant_id, knowledge_space_id, source_id, detail)
SELECT statement_timestamp(), %(kind)s, %(actor)s, space.tenant_id, src.knowledge_space_id, src.id, %(detail)s
FROM sources src
JOIN knowledge_spaces space ON space.id = src.knowledge_space_id
WHERE src.id = ANY (%(sources)s::uuid[])
RETURNING source_id

-- A source of this tenant, locked, and what lies in clear in it, in the words of jsonb_typeof; no value. It is not waited
-- for, since DELETE takes a source and its job in the other order.
SELECT src.knowledge_space_id, src.version, src.credential_ref, src.status, jsonb_typeof(src.metadata -> 'credentials')
FROM sources src
JOIN knowledge_spaces space ON space.id = src.knowledge_space_id
WHERE src.id = %(source)s AND space.tenant_id = %(tenant)s
FOR NO KEY UPDATE OF src NOWAIT

-- A source of this tenant and the ref that it names. Locks nothing, reads no value.
SELECT src.knowledge_space_id, src.version, src.credential_ref, src.status
FROM sources src
JOIN knowledge_spaces space ON space.id = src.knowledge_space_id
WHERE src.id = %(source)s AND space.tenant_id = %(tenant)s

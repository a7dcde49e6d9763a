-- Where the credentials of a source of this tenant are, or what they are if they lie in clear. Locks nothing.
SELECT src.knowledge_space_id, src.credential_ref, object.store, object.key_id,
  jsonb_typeof(src.metadata -> 'credentials'),
  CASE WHEN src.credential_ref IS NULL AND jsonb_typeof(src.metadata -> 'credentials') = 'object'
    THEN (src.metadata -> 'credentials')::text END
FROM sources src
JOIN knowledge_spaces space ON space.id = src.knowledge_space_id
LEFT JOIN kfs_credentials_secret_object object ON object.credential_ref = src.credential_ref
WHERE src.id = %(source)s AND space.tenant_id = %(tenant)s

-- A new source that names its ref from the first moment on. One of this id that is there already is left alone.
INSERT INTO sources (
  id, knowledge_space_id, type, status, name, uri, metadata, permission_scope, version, created_at, updated_at,
  credential_ref
)
VALUES (
  %(id)s, %(space)s, %(type)s, %(status)s, %(name)s, %(uri)s, %(metadata)s::jsonb, %(permission_scope)s::jsonb, 1,
  statement_timestamp(), statement_timestamp(), %(ref)s
)
ON CONFLICT (id) DO NOTHING
RETURNING created_at

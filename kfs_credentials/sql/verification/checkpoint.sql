-- How far a run has got. When it was begun stays as it was first written.
INSERT INTO kfs_credentials_checkpoint AS checkpoint (name, position, data, started_at, updated_at)
VALUES (%(name)s, %(position)s, %(data)s::jsonb, statement_timestamp(), statement_timestamp())
ON CONFLICT (name) DO UPDATE SET
  position = excluded.position, data = excluded.data, updated_at = excluded.updated_at
RETURNING started_at

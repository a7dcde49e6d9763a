-- A worker of this role is at work. A row that another one is just writing says the same: nobody waits for it.
WITH free AS (
  SELECT role FROM kfs_credentials_tick WHERE role = %(role)s FOR NO KEY UPDATE SKIP LOCKED
), ticked AS (
  UPDATE kfs_credentials_tick tick SET worker_id = %(worker)s, ticked_at = statement_timestamp()
  FROM free
  WHERE tick.role = free.role
)
INSERT INTO kfs_credentials_tick (role, worker_id, ticked_at)
SELECT %(role)s, %(worker)s, statement_timestamp()
WHERE NOT EXISTS (SELECT FROM kfs_credentials_tick WHERE role = %(role)s)
ON CONFLICT DO NOTHING
RETURNING role

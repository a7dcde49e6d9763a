-- Of the oldest events those whose time is up. By their id, which is the order of their age: so a page is all that is
-- read, also where none of it is old enough.
WITH oldest AS (
  SELECT id, created_at FROM kfs_credentials_event
  ORDER BY id
  LIMIT %(limit)s
  FOR UPDATE SKIP LOCKED
)
DELETE FROM kfs_credentials_event event USING oldest
WHERE event.id = oldest.id AND oldest.created_at <= statement_timestamp() - make_interval(secs => %(retention)s)
RETURNING event.id

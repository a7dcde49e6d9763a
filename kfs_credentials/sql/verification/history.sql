-- How many rows of a part of another table have credentials in their metadata. `sample` is a share of its pages, in percent.
-- What is json and not jsonb is looked at as text: it may hold what the operators refuse, and fail all of the others.
SELECT count(*) FROM {table} TABLESAMPLE SYSTEM (%(sample)s)
WHERE CASE
  WHEN %(jsonb)s THEN COALESCE(("metadata" -> 'credentials')::text, 'null') <> 'null'
  ELSE "metadata"::text ~ '"credentials"\s*:\s*[^n[:space:]]'
END

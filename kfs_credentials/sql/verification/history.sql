-- How many rows of a part of another table have credentials in their metadata. `sample` is a share of its pages, in percent.
-- Works on json as on jsonb, and on json that jsonb would refuse.
SELECT count(*) FROM {table} TABLESAMPLE SYSTEM (%(sample)s)
WHERE COALESCE(("metadata" -> 'credentials')::text, 'null') <> 'null'

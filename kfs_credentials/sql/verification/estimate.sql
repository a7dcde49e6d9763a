-- About how many rows there are to look at, by what the last VACUUM or ANALYZE has counted: for progress alone.
SELECT COALESCE(sum(GREATEST(reltuples, 0)), 0)::bigint
FROM pg_class
WHERE oid IN ('sources'::regclass, 'source_secret_lifecycle_refs'::regclass, 'source_credential_backfills'::regclass)

-- Which of these refs have been erased, or may have been, since their objects were read. The rows that are there are
-- locked. Not those that a source names by a stale save: what it names is copied before it is erased, if it is there.
SELECT ref FROM unnest(%(refs)s::text[]) AS ref
WHERE NOT EXISTS (
    SELECT FROM source_secret_lifecycle_refs ledger
    WHERE ledger.credential_ref = ref AND ledger.state NOT IN ('deleting', 'deleted')
  )
  AND NOT EXISTS (SELECT FROM sources src WHERE src.credential_ref = ref)
ORDER BY ref

-- The next refs in order, what is known of their objects, and whether each has to be there: it is in use, or is kept for
-- a person to choose; and whether a source names one that is being erased: its object is copied if it is there.
WITH page AS MATERIALIZED (
  SELECT credential_ref, tenant_id, knowledge_space_id, source_id, state
  FROM source_secret_lifecycle_refs
  WHERE credential_ref > %(after)s
  ORDER BY credential_ref
  LIMIT %(limit)s
)
SELECT page.credential_ref, page.tenant_id, page.knowledge_space_id, page.source_id, page.state,
  COALESCE(object.store, 'default'), object.key_id, COALESCE(object.size, 0),
  page.state = 'active' OR COALESCE(object.attention = 'displaced', FALSE),
  page.state IN ('deleting', 'deleted') AND EXISTS (SELECT FROM sources src WHERE src.credential_ref = page.credential_ref)
FROM page
LEFT JOIN kfs_credentials_secret_object object ON object.credential_ref = page.credential_ref
ORDER BY page.credential_ref

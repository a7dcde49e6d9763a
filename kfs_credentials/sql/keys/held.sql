-- How many refs that are not erased each key holds, by what they are. What a person has given up on is not counted.
SELECT object.key_id,
  count(*) FILTER (WHERE ledger.state = 'active'),
  count(*) FILTER (WHERE ledger.state IN ('retired', 'deleting')),
  count(*) FILTER (WHERE ledger.state IN ('staged', 'candidate'))
FROM source_secret_lifecycle_refs ledger
LEFT JOIN kfs_credentials_secret_object object ON object.credential_ref = ledger.credential_ref
WHERE ledger.state <> 'deleted'
  AND object.abandoned_at IS NULL
  AND (%(tenant)s::text IS NULL OR ledger.tenant_id = %(tenant)s)
  AND (%(space)s::uuid IS NULL OR ledger.knowledge_space_id = %(space)s)
GROUP BY object.key_id

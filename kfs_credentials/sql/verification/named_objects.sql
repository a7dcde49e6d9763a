-- Whose objects these are: ledger rows by their ids, of which a listing says that their objects are there.
SELECT ledger.credential_ref, ledger.tenant_id, ledger.knowledge_space_id, ledger.source_id
FROM source_secret_lifecycle_refs ledger
WHERE ledger.id = ANY (%(rows)s::uuid[]) AND ledger.state = 'deleted' AND ledger.next_delete_at IS NULL
ORDER BY ledger.id

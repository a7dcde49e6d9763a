-- Whether anything may lie in this store: then nobody but a person can say where it is.
SELECT EXISTS (
  SELECT FROM "source_secret_lifecycle_refs" AS ledger
  LEFT JOIN "kfs_credentials_secret_object" AS object ON object."credential_ref" = ledger."credential_ref"
  WHERE ledger."state" IN ('staged', 'candidate', 'active', 'retired', 'deleting')
    AND COALESCE(object."store", 'default') = %(store)s
) OR (%(store)s = 'default' AND EXISTS (SELECT FROM "sources" WHERE "credential_ref" IS NOT NULL))

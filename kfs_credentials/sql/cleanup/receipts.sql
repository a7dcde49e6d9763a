-- What the store said about objects that are gone; their ledger rows are locked.
UPDATE kfs_credentials_secret_object object SET
  first_erased_at = COALESCE(object.first_erased_at, statement_timestamp()),
  -- That it was erased is worth more than that it was absent when looked at again.
  receipt = CASE WHEN item.receipt = 'erased' THEN item.receipt ELSE COALESCE(object.receipt, item.receipt) END,
  attention = NULL,
  updated_at = statement_timestamp()
FROM unnest(%(refs)s::text[], %(receipts)s::text[]) AS item (ref, receipt)
WHERE object.credential_ref = item.ref
RETURNING object.credential_ref

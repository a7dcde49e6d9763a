-- Going back forgets where secrets are. While one of them is not erased, that would lose it.
DO $kfs_credentials_reverse$
DECLARE
  refs BIGINT;
BEGIN
  SELECT count(*) INTO refs FROM (
    SELECT "credential_ref" FROM "source_secret_lifecycle_refs" WHERE "state" <> 'deleted'
    UNION
    SELECT "credential_ref" FROM "sources" WHERE "credential_ref" IS NOT NULL
  ) AS kept;
  IF refs > 0 THEN
    RAISE EXCEPTION 'cannot unapply kfs_credentials: % secret(s) are not erased, and their refs would be forgotten', refs
      USING HINT = 'Revoke these credentials and let the erasure finish; `manage.py credential_status` counts what is left.';
  END IF;
END
$kfs_credentials_reverse$;
DROP TABLE "kfs_credentials_checkpoint";
DROP TABLE "kfs_credentials_refusal";
DROP TABLE "kfs_credentials_tick";
DROP TABLE "kfs_credentials_event";
DROP TABLE "kfs_credentials_closed_key";
DROP TABLE "kfs_credentials_pause";
DROP TABLE "kfs_credentials_binding";

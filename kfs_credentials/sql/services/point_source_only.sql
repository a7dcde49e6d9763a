-- Let a source, which is locked, name another ref, and leave what lies in clear in it. Where a constraint or a trigger
-- rejects that, the server's own message, and with it the server's log, would quote the row as it was to be, and what
-- lies in clear with it. So the error is caught on the server, and another takes its place: of the same class, with the
-- name of the constraint, and without a word of the row.
DO $kfs_credentials_point$
DECLARE
  rejected_by TEXT;
BEGIN
  UPDATE sources src SET
    credential_ref = current_setting('kfs_credentials.ref'),
    version = src.version + 1,
    updated_at = statement_timestamp()
  WHERE src.id = current_setting('kfs_credentials.source')::uuid;
EXCEPTION WHEN OTHERS THEN
  GET STACKED DIAGNOSTICS rejected_by = CONSTRAINT_NAME;
  RAISE EXCEPTION USING
    ERRCODE = SQLSTATE,
    MESSAGE = 'a source cannot be changed: ' || COALESCE('constraint ' || NULLIF(rejected_by, ''), 'SQLSTATE ' || SQLSTATE),
    HINT = 'The row is not quoted here, since credentials lie in clear in it.';
END
$kfs_credentials_point$

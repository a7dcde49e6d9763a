-- Once more a worker of this role has refused to work, for this reason.
INSERT INTO kfs_credentials_refusal AS refusal (role, reason, count, refused_at)
VALUES (%(role)s, %(reason)s, 1, statement_timestamp())
ON CONFLICT (role, reason) DO UPDATE SET count = refusal.count + 1, refused_at = excluded.refused_at
RETURNING count

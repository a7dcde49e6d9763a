-- The seed's two tables, with their keys, CHECKs and indexes.
--
-- Each statement is issued only where its object is missing: CREATE INDEX IF NOT EXISTS locks the table before it looks.
-- The foreign keys take SHARE ROW EXCLUSIVE on knowledge_spaces and sources, for a moment: the new tables are empty.
DO $kfs_credentials_ledger$
DECLARE
  wanted RECORD;
  present RECORD;
  repeated BIGINT;
  differences TEXT;
BEGIN
  IF to_regclass('source_credential_backfills') IS NULL THEN
    CREATE TABLE "source_credential_backfills" (
      "id" UUID PRIMARY KEY NOT NULL,
      "tenant_id" TEXT NOT NULL,
      "knowledge_space_id" UUID NOT NULL,
      "source_id" UUID NOT NULL,
      "source_version" INTEGER NOT NULL,
      "candidate_credential_ref" TEXT NOT NULL,
      "secret_fingerprint" CHAR(64) NOT NULL,
      "run_state" TEXT NOT NULL,
      "worker_id" TEXT,
      "lease_token" UUID,
      "lease_expires_at" TIMESTAMPTZ,
      "heartbeat_at" TIMESTAMPTZ,
      "retry_count" INTEGER NOT NULL,
      "row_version" INTEGER NOT NULL,
      "last_error_code" TEXT,
      "last_error_message" TEXT,
      "created_at" TIMESTAMPTZ NOT NULL,
      "updated_at" TIMESTAMPTZ NOT NULL,
      "completed_at" TIMESTAMPTZ,
      CONSTRAINT "source_credential_backfills_source_version_ck"
        CHECK ("source_version" >= 1),
      CONSTRAINT "source_credential_backfills_counts_ck"
        CHECK ("retry_count" >= 0 AND "row_version" >= 0),
      CONSTRAINT "source_credential_backfills_state_ck"
        CHECK ("run_state" IN ('queued', 'running', 'succeeded', 'failed')),
      CONSTRAINT "source_credential_backfills_lease_ck"
        CHECK (
          (
            "run_state" = 'running'
            AND "worker_id" IS NOT NULL
            AND "lease_token" IS NOT NULL
            AND "lease_expires_at" IS NOT NULL
            AND "heartbeat_at" IS NOT NULL
            AND "completed_at" IS NULL
          )
          OR (
            "run_state" <> 'running'
            AND "worker_id" IS NULL
            AND "lease_token" IS NULL
            AND "lease_expires_at" IS NULL
            AND "heartbeat_at" IS NULL
          )
        ),
      CONSTRAINT "source_credential_backfills_terminal_ck"
        CHECK (
          ("run_state" IN ('succeeded', 'failed') AND "completed_at" IS NOT NULL)
          OR ("run_state" IN ('queued', 'running') AND "completed_at" IS NULL)
        ),
      FOREIGN KEY ("tenant_id", "knowledge_space_id")
        REFERENCES "knowledge_spaces" ("tenant_id", "id") ON DELETE CASCADE,
      FOREIGN KEY ("knowledge_space_id", "source_id")
        REFERENCES "sources" ("knowledge_space_id", "id") ON DELETE CASCADE
    );
  END IF;

  -- The ledger has no foreign keys on purpose: it outlives its source, until the bytes are erased.
  IF to_regclass('source_secret_lifecycle_refs') IS NULL THEN
    CREATE TABLE "source_secret_lifecycle_refs" (
      "id" UUID PRIMARY KEY NOT NULL,
      "tenant_id" TEXT NOT NULL,
      "knowledge_space_id" UUID NOT NULL,
      "source_id" UUID NOT NULL,
      "credential_ref" TEXT NOT NULL,
      "operation_id" TEXT NOT NULL,
      "purpose" TEXT NOT NULL,
      "state" TEXT NOT NULL,
      "source_version" INTEGER,
      "recover_after" TIMESTAMPTZ NOT NULL,
      "next_delete_at" TIMESTAMPTZ,
      "worker_id" TEXT,
      "lease_token" UUID,
      "lease_expires_at" TIMESTAMPTZ,
      "heartbeat_at" TIMESTAMPTZ,
      "delete_attempts" INTEGER NOT NULL,
      "row_version" INTEGER NOT NULL,
      "last_error_code" TEXT,
      "last_error_message" TEXT,
      "created_at" TIMESTAMPTZ NOT NULL,
      "updated_at" TIMESTAMPTZ NOT NULL,
      "deleted_at" TIMESTAMPTZ,
      CONSTRAINT "source_secret_lifecycle_refs_source_version_ck"
        CHECK ("source_version" IS NULL OR "source_version" >= 1),
      CONSTRAINT "source_secret_lifecycle_refs_purpose_ck"
        CHECK ("purpose" IN ('create', 'rotate', 'backfill')),
      CONSTRAINT "source_secret_lifecycle_refs_counts_ck"
        CHECK ("delete_attempts" >= 0 AND "row_version" >= 0),
      CONSTRAINT "source_secret_lifecycle_refs_state_ck"
        CHECK ("state" IN ('staged', 'candidate', 'active', 'retired', 'deleting', 'deleted')),
      CONSTRAINT "source_secret_lifecycle_refs_lease_ck"
        CHECK (
          (
            "state" = 'deleting'
            AND "worker_id" IS NOT NULL
            AND "lease_token" IS NOT NULL
            AND "lease_expires_at" IS NOT NULL
            AND "heartbeat_at" IS NOT NULL
            AND "deleted_at" IS NULL
          )
          OR (
            "state" <> 'deleting'
            AND "worker_id" IS NULL
            AND "lease_token" IS NULL
            AND "lease_expires_at" IS NULL
            AND "heartbeat_at" IS NULL
          )
        ),
      CONSTRAINT "source_secret_lifecycle_refs_terminal_ck"
        CHECK (
          ("state" = 'deleted' AND "deleted_at" IS NOT NULL)
          OR ("state" <> 'deleted' AND "deleted_at" IS NULL)
        )
    );
  END IF;

  -- What was there before is adopted only if it is the same. Text may be varchar, as in later versions of knowledge-fs.
  SELECT string_agg(
    known.relation || '.' || name
      || CASE
        WHEN attname IS NULL THEN format(' (%s) is missing', known.type)
        ELSE format(' is %s, not %s', format_type(atttypid, NULL), known.type)
      END,
    '; ' ORDER BY known.relation, name)
  INTO differences
  FROM (VALUES
    ('source_credential_backfills', 'uuid', '{id,knowledge_space_id,source_id,lease_token}'::TEXT[]),
    ('source_credential_backfills', 'text',
     '{tenant_id,candidate_credential_ref,run_state,worker_id,last_error_code,last_error_message}'),
    ('source_credential_backfills', 'character', '{secret_fingerprint}'),
    ('source_credential_backfills', 'integer', '{source_version,retry_count,row_version}'),
    ('source_credential_backfills', 'timestamp with time zone',
     '{lease_expires_at,heartbeat_at,created_at,updated_at,completed_at}'),
    ('source_secret_lifecycle_refs', 'uuid', '{id,knowledge_space_id,source_id,lease_token}'),
    ('source_secret_lifecycle_refs', 'text',
     '{tenant_id,credential_ref,operation_id,purpose,state,worker_id,last_error_code,last_error_message}'),
    ('source_secret_lifecycle_refs', 'integer', '{source_version,delete_attempts,row_version}'),
    ('source_secret_lifecycle_refs', 'timestamp with time zone',
     '{recover_after,next_delete_at,lease_expires_at,heartbeat_at,created_at,updated_at,deleted_at}')
  ) AS known (relation, type, names)
  CROSS JOIN unnest(known.names) AS name
  LEFT JOIN pg_attribute ON attrelid = to_regclass(known.relation) AND attname = name AND NOT attisdropped
  WHERE attname IS NULL
    OR format_type(atttypid, NULL) <> known.type AND (known.type <> 'text' OR atttypid <> 'varchar'::regtype);
  IF differences IS NOT NULL THEN
    RAISE EXCEPTION 'the tables of the ledger are not the ones that kfs_credentials knows: %', differences
      USING HINT = 'Add or convert these columns, or rename these tables, then migrate again.';
  END IF;

  FOR wanted IN
    SELECT * FROM (VALUES
      ('source_credential_backfills_source_uq', 'source_credential_backfills', TRUE,
       'tenant_id, knowledge_space_id, source_id'),
      ('source_credential_backfills_candidate_ref_uq', 'source_credential_backfills', TRUE,
       'candidate_credential_ref'),
      ('source_credential_backfills_claim_idx', 'source_credential_backfills', FALSE,
       'run_state, lease_expires_at, updated_at, id'),
      ('source_credential_backfills_scope_idx', 'source_credential_backfills', FALSE,
       'tenant_id, knowledge_space_id, source_id, id'),
      ('source_secret_lifecycle_refs_ref_uq', 'source_secret_lifecycle_refs', TRUE,
       'credential_ref'),
      ('source_secret_lifecycle_refs_operation_idx', 'source_secret_lifecycle_refs', FALSE,
       'operation_id, state, id'),
      ('source_secret_lifecycle_refs_claim_idx', 'source_secret_lifecycle_refs', FALSE,
       'state, next_delete_at, lease_expires_at, updated_at, id'),
      ('source_secret_lifecycle_refs_recovery_idx', 'source_secret_lifecycle_refs', FALSE,
       'state, recover_after, id'),
      ('source_secret_lifecycle_refs_scope_idx', 'source_secret_lifecycle_refs', FALSE,
       'tenant_id, knowledge_space_id, source_id, id')
    ) AS indexes (name, relation, is_unique, columns)
  LOOP
    SELECT
      indisvalid AS is_valid,
      indisunique AS is_unique,
      (
        SELECT string_agg(pg_get_indexdef(indexrelid, place, TRUE), ', ' ORDER BY place)
        FROM generate_series(1, indnkeyatts) AS place
      ) AS columns,
      pg_get_expr(indpred, indrelid, TRUE) AS predicate
    INTO present
    FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
    WHERE indrelid = wanted.relation::regclass AND relname = wanted.name;
    IF NOT FOUND THEN
      BEGIN
        EXECUTE format(
          'CREATE %s %I ON %I (%s)',
          CASE WHEN wanted.is_unique THEN 'UNIQUE INDEX' ELSE 'INDEX' END,
          wanted.name, wanted.relation, wanted.columns);
      EXCEPTION WHEN unique_violation THEN
        -- The server's own message would quote the value.
        EXECUTE format(
          'SELECT count(*) FROM (SELECT FROM %I GROUP BY %s HAVING count(*) > 1) AS repeated',
          wanted.relation, wanted.columns) INTO repeated;
        RAISE EXCEPTION 'index % on % cannot be built: % value(s) of (%) occur more than once',
          wanted.name, wanted.relation, repeated, wanted.columns
          USING HINT = 'Repair these rows, then migrate again.';
      END;
    ELSIF NOT present.is_valid THEN
      RAISE EXCEPTION 'index % on % is INVALID: its build was interrupted', wanted.name, wanted.relation
        USING HINT = format('Run DROP INDEX CONCURRENTLY %I; then migrate again.', wanted.name);
    ELSIF (present.is_unique, present.columns, present.predicate)
      IS DISTINCT FROM (wanted.is_unique, wanted.columns, NULL::TEXT)
    THEN
      RAISE EXCEPTION 'index % on % is not the one that kfs_credentials knows', wanted.name, wanted.relation
        USING HINT = 'Rename or drop it, then migrate again.';
    END IF;
  END LOOP;
END
$kfs_credentials_ledger$;

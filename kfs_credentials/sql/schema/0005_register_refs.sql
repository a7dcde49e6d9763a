-- Refs that live in sources already are registered as active; then both directions are checked.
--
-- It all aborts together, before the migration is recorded, and what is there already is left alone: a second run does nothing.
-- Differences from the seed: a deterministic id that is taken gets a random one, and a version below 1, which the
-- ledger forbids, is stored as NULL, so that neither makes the migration fail for good.
INSERT INTO "source_secret_lifecycle_refs" (
  "id", "tenant_id", "knowledge_space_id", "source_id", "credential_ref", "operation_id",
  "purpose", "state", "source_version", "recover_after", "delete_attempts", "row_version",
  "created_at", "updated_at"
)
SELECT
  CASE
    WHEN EXISTS (SELECT FROM "source_secret_lifecycle_refs" taken WHERE taken."id" = src."id") THEN gen_random_uuid()
    ELSE src."id"
  END,
  space."tenant_id", src."knowledge_space_id", src."id", src."credential_ref",
  'legacy-source:' || src."id"::TEXT || ':' || src."version"::TEXT,
  'rotate', 'active', CASE WHEN src."version" >= 1 THEN src."version" END,
  src."updated_at", 0, 0, src."updated_at", src."updated_at"
FROM "sources" src
INNER JOIN "knowledge_spaces" space ON space."id" = src."knowledge_space_id"
WHERE src."credential_ref" IS NOT NULL
  AND NOT EXISTS (
    SELECT FROM "source_secret_lifecycle_refs" known WHERE known."credential_ref" = src."credential_ref"
  )
ON CONFLICT DO NOTHING;

-- ON CONFLICT makes it safe beside a worker that registers the same ref, but it must never hide a collision or a partial
-- registry. The messages begin as the seed's do; then which class, and how many. Never a value.
DO $kfs_credentials_guard$
DECLARE
  found RECORD;
BEGIN
  SELECT
    count(*) AS sources,
    count(*) FILTER (WHERE lifecycle."id" IS NULL) AS missing,
    count(*) FILTER (WHERE lifecycle."state" <> 'active') AS inactive,
    count(*) FILTER (WHERE lifecycle."tenant_id" <> space."tenant_id") AS tenant,
    count(*) FILTER (WHERE lifecycle."knowledge_space_id" <> src."knowledge_space_id") AS space,
    count(*) FILTER (WHERE lifecycle."source_id" <> src."id") AS source,
    count(*) FILTER (WHERE space."id" IS NULL) AS homeless
  INTO found
  FROM "sources" src
  -- LEFT, unlike the seed: a restore can leave a foreign key unchecked, and then no such source may be passed over.
  LEFT JOIN "knowledge_spaces" space ON space."id" = src."knowledge_space_id"
  LEFT JOIN "source_secret_lifecycle_refs" lifecycle ON lifecycle."credential_ref" = src."credential_ref"
  WHERE src."credential_ref" IS NOT NULL
    AND (
      lifecycle."id" IS NULL
      OR lifecycle."state" <> 'active'
      OR lifecycle."tenant_id" <> space."tenant_id"
      OR lifecycle."knowledge_space_id" <> src."knowledge_space_id"
      OR lifecycle."source_id" <> src."id"
    );
  IF found.sources > 0 THEN
    RAISE EXCEPTION 'source credential_ref is missing a matching active lifecycle registry row: % (%)',
      format('%s source(s)', found.sources),
      concat_ws(', ',
        CASE WHEN found.missing > 0 THEN format('%s without a ledger row', found.missing) END,
        CASE WHEN found.inactive > 0 THEN format('%s whose ledger row is not active', found.inactive) END,
        CASE WHEN found.tenant > 0 THEN format('%s of another tenant', found.tenant) END,
        CASE WHEN found.space > 0 THEN format('%s of another knowledge space', found.space) END,
        CASE WHEN found.source > 0 THEN format('%s of another source', found.source) END,
        CASE WHEN found.homeless > 0 THEN format('%s without a knowledge space', found.homeless) END)
      USING HINT = 'Repair the rows of source_secret_lifecycle_refs or sources.credential_ref, then migrate again; nothing was recorded.';
  END IF;

  SELECT
    count(*) AS refs,
    count(*) FILTER (WHERE src."id" IS NULL) AS orphaned,
    count(*) FILTER (WHERE src."knowledge_space_id" <> lifecycle."knowledge_space_id") AS elsewhere,
    count(*) FILTER (WHERE src."id" IS NOT NULL AND src."credential_ref" IS NULL) AS unset,
    count(*) FILTER (WHERE src."credential_ref" <> lifecycle."credential_ref") AS other,
    count(*) FILTER (WHERE space."id" IS NULL) AS space,
    count(*) FILTER (WHERE space."tenant_id" <> lifecycle."tenant_id") AS tenant
  INTO found
  FROM "source_secret_lifecycle_refs" lifecycle
  LEFT JOIN "sources" src ON src."id" = lifecycle."source_id"
  LEFT JOIN "knowledge_spaces" space ON space."id" = lifecycle."knowledge_space_id"
  WHERE lifecycle."state" = 'active'
    AND (
      src."id" IS NULL
      OR src."knowledge_space_id" <> lifecycle."knowledge_space_id"
      OR src."credential_ref" IS DISTINCT FROM lifecycle."credential_ref"
      OR space."id" IS NULL
      OR space."tenant_id" IS DISTINCT FROM lifecycle."tenant_id"
    );
  IF found.refs > 0 THEN
    RAISE EXCEPTION 'active source secret lifecycle row is orphaned or does not match its source: % (%)',
      format('%s ref(s)', found.refs),
      concat_ws(', ',
        CASE WHEN found.orphaned > 0 THEN format('%s whose source is gone', found.orphaned) END,
        CASE WHEN found.elsewhere > 0 THEN format('%s whose source is in another knowledge space', found.elsewhere) END,
        CASE WHEN found.unset > 0 THEN format('%s whose source has no ref', found.unset) END,
        CASE WHEN found.other > 0 THEN format('%s whose source has another ref', found.other) END,
        CASE WHEN found.space > 0 THEN format('%s whose knowledge space is gone', found.space) END,
        CASE WHEN found.tenant > 0 THEN format('%s of another tenant', found.tenant) END)
      USING HINT = 'Set these ledger rows to retired, or repair their sources, then migrate again; nothing was recorded.';
  END IF;
END
$kfs_credentials_guard$;

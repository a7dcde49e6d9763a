-- The two tables as they are before the seed's migration, and the column for the ref.
--
-- Whatever is there is adopted as it is. DDL for what is there is not issued at all: even ADD COLUMN IF NOT EXISTS
-- takes ACCESS EXCLUSIVE, and would queue every reader behind the longest query on the table.
DO $kfs_credentials_base$
DECLARE
  differences TEXT;
BEGIN
  IF to_regclass('knowledge_spaces') IS NULL THEN
    CREATE TABLE "knowledge_spaces" (
      "id" UUID PRIMARY KEY NOT NULL,
      "tenant_id" TEXT NOT NULL,
      "slug" TEXT NOT NULL,
      "name" TEXT NOT NULL,
      "description" TEXT,
      "created_at" TIMESTAMPTZ NOT NULL,
      "updated_at" TIMESTAMPTZ NOT NULL
    );
    CREATE UNIQUE INDEX "knowledge_spaces_tenant_slug_uq" ON "knowledge_spaces" ("tenant_id", "slug");
    CREATE UNIQUE INDEX "knowledge_spaces_tenant_id_uq" ON "knowledge_spaces" ("tenant_id", "id");
  END IF;

  IF to_regclass('sources') IS NULL THEN
    CREATE TABLE "sources" (
      "id" UUID PRIMARY KEY NOT NULL,
      "knowledge_space_id" UUID NOT NULL REFERENCES "knowledge_spaces" ("id") ON DELETE CASCADE,
      "type" TEXT NOT NULL,
      "status" TEXT NOT NULL,
      "name" TEXT NOT NULL,
      "uri" TEXT NOT NULL,
      "metadata" JSONB NOT NULL,
      "permission_scope" JSONB NOT NULL,
      "version" INTEGER NOT NULL,
      "created_at" TIMESTAMPTZ NOT NULL,
      "updated_at" TIMESTAMPTZ NOT NULL
    );
    CREATE INDEX "sources_space_status_idx" ON "sources" ("knowledge_space_id", "status");
  END IF;

  -- A host's table of the same name that is something else is refused here, not at three in the morning.
  SELECT string_agg(
    known.relation || '.' || name
      || CASE
        WHEN attname IS NULL THEN format(' (%s) is missing', known.type)
        ELSE format(' is %s, not %s', format_type(atttypid, NULL), known.type)
      END,
    '; ' ORDER BY known.relation, name)
  INTO differences
  FROM (VALUES
    ('knowledge_spaces', 'uuid', '{id}'::TEXT[]),
    ('knowledge_spaces', 'text', '{tenant_id,slug,name,description}'),
    ('knowledge_spaces', 'timestamp with time zone', '{created_at,updated_at}'),
    ('sources', 'uuid', '{id,knowledge_space_id}'),
    ('sources', 'text', '{type,status,name,uri,credential_ref}'),
    ('sources', 'jsonb', '{metadata,permission_scope}'),
    ('sources', 'integer', '{version}'),
    ('sources', 'timestamp with time zone', '{created_at,updated_at}')
  ) AS known (relation, type, names)
  CROSS JOIN unnest(known.names) AS name
  LEFT JOIN pg_attribute ON attrelid = to_regclass(known.relation) AND attname = name AND NOT attisdropped
  WHERE CASE
    WHEN attname IS NULL THEN name <> 'credential_ref' -- which is added below
    ELSE format_type(atttypid, NULL) <> known.type AND (known.type <> 'text' OR atttypid <> 'varchar'::regtype)
  END;
  IF differences IS NOT NULL THEN
    RAISE EXCEPTION 'the tables knowledge_spaces and sources are not the ones that kfs_credentials knows: %', differences
      USING HINT = 'Add or convert these columns, or put the tables of knowledge-fs first on the search_path.';
  END IF;

  IF NOT EXISTS (
    SELECT FROM pg_attribute
    WHERE attrelid = to_regclass('sources') AND attname = 'credential_ref' AND NOT attisdropped
  ) THEN
    ALTER TABLE "sources" ADD COLUMN "credential_ref" TEXT;
  END IF;
END
$kfs_credentials_base$;

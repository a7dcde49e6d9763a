-- The seed's indexes on sources, and our one. Building an index blocks writers, so this is a transaction of its own.
--
-- An index that is there but INVALID is what an interrupted CREATE INDEX CONCURRENTLY leaves behind. IF NOT EXISTS
-- would take it for done, and a unique index that is not valid does not keep anything unique.
DO $kfs_credentials_source_indexes$
DECLARE
  wanted RECORD;
  present RECORD;
  repeated BIGINT;
BEGIN
  FOR wanted IN
    SELECT * FROM (VALUES
      ('sources_credential_ref_uq', TRUE, 'credential_ref', 'credential_ref IS NOT NULL'),
      ('sources_credential_backfill_discovery_idx', FALSE, 'id', 'credential_ref IS NULL'),
      ('sources_space_id_uq', TRUE, 'knowledge_space_id, id', NULL),
      ('kfs_credentials_legacy_idx', FALSE, 'id',
       'credential_ref IS NULL AND jsonb_typeof(metadata -> ''credentials''::text) = ''object''::text')
    ) AS indexes (name, is_unique, columns, predicate)
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
    WHERE indrelid = 'sources'::regclass AND relname = wanted.name;
    IF NOT FOUND THEN
      BEGIN
        EXECUTE format(
          'CREATE %s %I ON sources (%s) %s',
          CASE WHEN wanted.is_unique THEN 'UNIQUE INDEX' ELSE 'INDEX' END,
          wanted.name, wanted.columns, 'WHERE ' || wanted.predicate);
      EXCEPTION WHEN unique_violation THEN
        -- The server's own message would quote the value.
        EXECUTE format(
          'SELECT count(*) FROM (SELECT FROM sources WHERE %2$s GROUP BY %1$s HAVING count(*) > 1) AS repeated',
          wanted.columns, coalesce(wanted.predicate, 'TRUE')) INTO repeated;
        RAISE EXCEPTION 'index % on sources cannot be built: % value(s) of (%) occur more than once',
          wanted.name, repeated, wanted.columns
          USING HINT = 'Repair these rows, then migrate again.';
      END;
    ELSIF NOT present.is_valid THEN
      RAISE EXCEPTION 'index % on sources is INVALID: its build was interrupted', wanted.name
        USING HINT = format('Run DROP INDEX CONCURRENTLY %I; then migrate again.', wanted.name);
    ELSIF (present.is_unique, present.columns, present.predicate)
      IS DISTINCT FROM (wanted.is_unique, wanted.columns, wanted.predicate)
    THEN
      RAISE EXCEPTION 'index % on sources is not the one that kfs_credentials knows', wanted.name
        USING HINT = 'Rename or drop it, then migrate again.';
    END IF;
  END LOOP;
END
$kfs_credentials_source_indexes$;

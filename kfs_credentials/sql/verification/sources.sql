-- A page of all sources, in the order of their ids: credentials that are no object, and metadata outside of `credentials`
-- in which something may look like a secret. Whether it does, redaction.py decides: here is only passed over what cannot,
-- since reading every document there would take minutes. What redaction.py finds secret has to be found suspicious here.
-- A name with something else than `_`, `-`, `.` or a blank inside of such a word is passed over.
-- Returns what is to be looked at, a row each, and the last row of the page anyhow, with how many were looked at. A
-- document that is larger than `bytes` does not come along, and no more than that come at a time. Locks nothing.
WITH page AS MATERIALIZED (
  SELECT src.id, src.knowledge_space_id, src.credential_ref,
    jsonb_typeof(src.metadata -> 'credentials') AS shape,
    -- The type is looked at first: on an array, `-` would remove elements, and on a scalar it fails.
    (CASE WHEN jsonb_typeof(src.metadata) = 'object' THEN src.metadata - 'credentials' ELSE src.metadata END)::text
      AS document,
    src.status <> 'deleting'
      AND src.id <> ALL (%(leaving)s::uuid[]) AND src.knowledge_space_id <> ALL (%(leaving)s::uuid[]) AS wanted
  FROM sources src
  WHERE (%(space)s::uuid IS NULL OR src.knowledge_space_id = %(space)s)
    AND (%(after)s::uuid IS NULL OR src.id > %(after)s)
    AND (%(only)s::uuid[] IS NULL OR src.id = ANY (%(only)s::uuid[]))
  ORDER BY src.id
  LIMIT %(limit)s
), normal AS MATERIALIZED (
  -- Materialized, step by step: else each expression would be worked out anew for every word that is looked for.
  -- What is not ASCII is rare. normalize() is there in UTF-8 alone, where it is needed.
  SELECT page.*, octet_length(document) = char_length(document) AS is_ascii,
    lower((CASE WHEN octet_length(document) > char_length(document) AND getdatabaseencoding() = 'UTF8'
      THEN normalize(document, NFKC) ELSE document END) COLLATE "C") AS small
  FROM page
), plain AS MATERIALIZED (
  -- Letters and digits alone, as is_sensitive() has names; taken out quickly is only what stands inside of words as a rule.
  SELECT normal.*,
    CASE WHEN is_ascii THEN replace(replace(replace(replace(small, '_', ''), '-', ''), '.', ''), ' ', '')
      ELSE regexp_replace(small, '[^a-z0-9]', '', 'g') END AS letters
  FROM normal
), found AS MATERIALIZED (
  SELECT plain.id, plain.knowledge_space_id, plain.wanted, plain.document,
    CASE WHEN plain.wanted AND plain.credential_ref IS NULL
      AND plain.shape IN ('string', 'number', 'boolean', 'array')
      AND NOT EXISTS (
        SELECT FROM kfs_credentials_acknowledgement seen WHERE seen.source_id = plain.id AND seen.shape = plain.shape
      ) THEN plain.shape
    END AS unsupported,
    %(metadata)s AND plain.wanted AND (
      -- Without an `i`, of whose Turkish capital only the point is left.
      EXISTS (
        SELECT FROM unnest(ARRAY[
          'key', 'token', 'secret', 'credent', 'passw', 'passphrase', 'passcode', 'pwd', 'cook', 'author', 'bearer', 'jwt',
          'creds', 'dsn', 'connect', 'connstr', 'sess', 'gnature', 'phertext', 'bas'
        ]) AS word WHERE strpos(letters, word) > 0
      )
      OR EXISTS (
        SELECT FROM unnest(ARRAY[
          'eyj', 'ghp_', 'gho_', 'ghu_', 'ghs_', 'ghr_', 'github_pat_', 'glpat-', 'xox', 'ya29.', 'aiza', 'ntn_', 'hvb.',
          'hvs.', 'sk-', '\'
        ]) AS start WHERE strpos(small, start) > 0
      )
      -- Names that are innocent at the end of others, and user info.
      OR small ~ '(^|[^a-z0-9])(p[^a-z0-9]*a[^a-z0-9]*(t|s[^a-z0-9]*s)|s[^a-z0-9]*i?[^a-z0-9]*g)[^a-z0-9]*s?([^a-z0-9]|$)'
      OR document LIKE '%%//%%@%%'
    ) AS suspicious
  FROM plain
), measured AS (
  SELECT found.*,
    row_number() OVER (ORDER BY id) = count(*) OVER () AS is_last,
    count(*) FILTER (WHERE wanted) OVER (ORDER BY id) AS seen,
    octet_length(document) AS size,
    sum(CASE WHEN suspicious AND octet_length(document) <= %(bytes)s THEN octet_length(document) ELSE 0 END)
      OVER (ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
  FROM found
)
SELECT measured.id, space.tenant_id, measured.unsupported, measured.suspicious,
  CASE WHEN measured.suspicious AND measured.size <= %(bytes)s THEN measured.document END, measured.seen
FROM measured
LEFT JOIN knowledge_spaces space ON space.id = measured.knowledge_space_id
WHERE COALESCE(measured.before, 0) < %(bytes)s
  AND (measured.unsupported IS NOT NULL OR measured.suspicious OR measured.is_last)
ORDER BY measured.id

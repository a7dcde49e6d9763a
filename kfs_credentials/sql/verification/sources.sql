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
    CASE WHEN %(metadata)s
      THEN (CASE WHEN jsonb_typeof(src.metadata) = 'object' THEN src.metadata - 'credentials' ELSE src.metadata END)::text
    END AS document,
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
      -- Parts of names, also without an `i`, of whose Turkish capital only the point is left.
      strpos(letters, 'key') > 0 OR strpos(letters, 'token') > 0 OR strpos(letters, 'secret') > 0
      OR strpos(letters, 'cred') > 0 OR strpos(letters, 'pass') > 0 OR strpos(letters, 'pwd') > 0
      OR strpos(letters, 'cook') > 0 OR strpos(letters, 'authori') > 0 OR strpos(letters, 'authorz') > 0
      OR strpos(letters, 'bearer') > 0 OR strpos(letters, 'jwt') > 0 OR strpos(letters, 'dsn') > 0
      OR strpos(letters, 'nnstr') > 0 OR strpos(letters, 'onstr') > 0 OR strpos(letters, 'sess') > 0
      OR strpos(letters, 'gnature') > 0 OR strpos(letters, 'phertext') > 0 OR strpos(letters, 'basi') > 0
      OR strpos(letters, 'basc') > 0
      -- Tokens; and an escape, which may stand for anything.
      OR strpos(small, 'eyj') > 0 OR strpos(small, 'glpat-') > 0 OR strpos(small, 'xox') > 0
      OR strpos(small, 'ya29.') > 0 OR strpos(small, 'aiza') > 0 OR strpos(small, 'ntn_') > 0
      OR strpos(small, 'sk-') > 0 OR strpos(small, '\') > 0
      OR small LIKE '%%gh_\_%%' OR small LIKE '%%hv_.%%'
      -- User info, and names that are innocent at the end of others.
      OR document LIKE '%%//%%@%%'
      OR small ~ '(^|[^a-z0-9])(p[^a-z0-9]*a[^a-z0-9]*t|s[^a-z0-9]*i?[^a-z0-9]*g)[^a-z0-9]*s?([^a-z0-9]|$)'
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

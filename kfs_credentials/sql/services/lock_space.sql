-- A knowledge space of this tenant that must not go away before this transaction is over. Not waited for: the Node
-- service holds it while it talks to its store.
SELECT space.id FROM knowledge_spaces space
WHERE space.id = %(space)s AND space.tenant_id = %(tenant)s
FOR KEY SHARE NOWAIT

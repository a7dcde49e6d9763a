-- Held by each reservation and each activation until its transaction is over. In a statement of its own: only a later
-- one sees what was committed while this one waited.
SELECT pg_advisory_xact_lock_shared(%(closing)s, 0)

-- Waits for all reservations and activations that are under way, and keeps new ones waiting until the closed keys are
-- committed.
SELECT pg_advisory_xact_lock(%(closing)s, 0)

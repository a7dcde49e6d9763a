"""Settings that differ: clocks, time zones, isolation, poolers, replicas, time limits. The same things come of it."""

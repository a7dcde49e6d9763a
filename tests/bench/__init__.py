"""`make bench`: how fast the backfill is, beside the least durable work that is possible."""

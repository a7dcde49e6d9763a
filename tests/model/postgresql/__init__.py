"""Django's PostgreSQL, with the faults that a test has ordered; see `tests.model.faults`."""

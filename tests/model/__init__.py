"""A Hypothesis state machine beside the real thing: the same operations on a dictionary and on PostgreSQL."""

import pytest

# What they assert is shown with its values, as in a test.
pytest.register_assert_rewrite(
    *(f"{__name__}.{name}" for name in ("base", "dictionary", "cleanups", "operators", "machine"))
)

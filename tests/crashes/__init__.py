"""Real worker processes, and what becomes of their work when they are killed, frozen or cut off."""

import pytest

pytest.register_assert_rewrite("tests.crashes.scene", "tests.crashes.kills")

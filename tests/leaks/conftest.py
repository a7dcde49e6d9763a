"""What the tests of leaks share."""

from tests.services.conftest import space

__all__ = ["space"]

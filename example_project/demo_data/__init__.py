"""Made-up spaces and sources with legacy credentials, the same ones for the same seed and number.

They look like those of a live knowledge-fs database, awkward ones included. Nothing in them is real.
"""

from example_project.demo_data.content import Kind
from example_project.demo_data.database import DemoDataError, foreign_sources, load
from example_project.demo_data.rows import (
    AWKWARD_FROM,
    DEFAULT_NUMBER,
    DEFAULT_SEED,
    DemoSource,
    DemoSpace,
    Expected,
    expected,
    sources,
    spaces,
)

__all__ = [
    "AWKWARD_FROM",
    "DEFAULT_NUMBER",
    "DEFAULT_SEED",
    "DemoDataError",
    "DemoSource",
    "DemoSpace",
    "Expected",
    "Kind",
    "expected",
    "foreign_sources",
    "load",
    "sources",
    "spaces",
]

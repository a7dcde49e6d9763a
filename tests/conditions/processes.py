"""What processes of the nursery do here besides commands and calls to the services."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any


def tell_time(_: Sequence[Any]) -> None:
    """Print what time it is by this process's clock, as an application's answer."""
    sys.stdout.write(json.dumps({"time": time.time()}) + "\n")
    sys.stdout.flush()

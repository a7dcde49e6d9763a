"""Settings of a host project: those of the tests, and what the environment says on top (JSON)."""

import json
import os

from tests.settings import *  # noqa: F403
from tests.settings import KFS_CREDENTIALS

storage = KFS_CREDENTIALS["STORES"]["default"]["OPTIONS"]["storage"]  # type: ignore[index]
storage["OPTIONS"]["location"] = os.environ["KFS_HOST_SECRETS"]
globals().update(json.loads(os.environ["KFS_HOST_PROJECT"]))

"""The example project of somebody whose USE_TZ is off; its time zone is in the environment."""

from __future__ import annotations

import os

from example_project.settings import *  # noqa: F403

USE_TZ = False
TIME_ZONE = os.environ["KFS_TESTS_TIME_ZONE"]

"""Shared by all tests: one XLA thread, as the experiments have it, and no network."""

import os
import sys
from pathlib import Path

from hypothesis import settings

os.environ["NPROC"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(Path(__file__).parent / "sim"))

# Machines that run tests are busy at times: pytest's time limit is enough.
settings.register_profile("gradbus", deadline=None)
settings.load_profile("gradbus")

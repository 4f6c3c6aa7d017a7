"""Shared by all tests: one XLA thread, as the experiments have it, and no network."""

import os
import sys
from pathlib import Path

os.environ["NPROC"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(Path(__file__).parent / "sim"))

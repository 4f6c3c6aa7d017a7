"""What else decides a result, and where it was made: versions, commit, machine, seed and threads, for manifest.json.

Versions are read from the installed packages' metadata; nothing is imported for it.
"""

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("gradbus", "jax", "jaxlib", "numpy", "optax", "pyzmq")


def describe(*, name: str, seed: int, threads: int) -> dict[str, Any]:
    """The facts about this start of the run `name`; threads: XLA threads of each process."""
    uname = platform.uname()
    return {
        "name": name,
        "argv": sys.argv,
        "seed": seed,
        "threads": threads,
        "python": platform.python_version(),
        "packages": {package: _installed(package) for package in PACKAGES},
        **_commit(),
        "host": socket.gethostname(),
        "os": f"{uname.system} {uname.release} {uname.machine}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> dict[str, Any]:
    """The commit of Gradbus's own source tree, if it runs from one."""
    source = Path(__file__).resolve().parents[1]
    if not (source / ".git").exists():
        return {"commit": None, "commit_clean": None}

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(source), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)

    try:
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.TimeoutExpired):
        return {"commit": None, "commit_clean": None}
    return {"commit": commit.stdout.strip() or None, "commit_clean": changes.returncode == 0 and not changes.stdout}


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux; platform knows something about every system
    return platform.processor() or "unknown"

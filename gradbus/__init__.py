"""Gradbus: data-parallel JAX training over a ZeroMQ message bus. This is the public API; importing it loads no JAX."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradbus.settings import Settings, SettingsError, load
    from gradbus.workloads.base import Workload

__all__ = ["Settings", "SettingsError", "Workload", "__version__", "load"]

__version__ = importlib.metadata.version("gradbus")

_HOME = {
    "Settings": "gradbus.settings",
    "SettingsError": "gradbus.settings",
    "load": "gradbus.settings",
    "Workload": "gradbus.workloads.base",
}


def __getattr__(name: str) -> Any:
    """Load a public name at first use, so that `gradbus --help` and the launcher stay quick."""
    if name not in _HOME:
        raise AttributeError(f"module 'gradbus' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)

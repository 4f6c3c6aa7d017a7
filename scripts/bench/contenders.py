"""Who takes part: the table, and whether a contender can be had on this machine."""

import importlib.util
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

INSTALL = "pip install '.[bench]'"
# For libzmq, which allocates each message that it receives: keep the memory instead of handing it back every time.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
ONE_JAX_THREAD = {
    "JAX_PLATFORMS": "cpu",
    "NPROC": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}
# Ranks may be more than cores: they then yield while they poll. Shared memory, as it is the default on one host.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
RAY = {"RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True)
class Contender:
    """``module`` of this package does the rounds, in the way that ``path`` names. ``hub``: one process more than there
    are workers; ``ranks``: a process for each worker, started by mpirun if ``mpi``. ``packages`` have to be there."""

    what: str
    module: str
    path: str = ""
    hub: bool = False
    ranks: bool = True
    mpi: bool = False
    packages: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def lacks(self) -> str:
        """What is missing, in words; empty if nothing is."""
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed: {INSTALL}"
        if self.mpi and not mpirun():
            return f"mpirun is not found: {INSTALL}"
        return ""


def mpirun() -> str | None:
    """The one that was installed beside this Python, else any."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


CONTENDERS = {
    "gradbus-shm": Contender(
        "Gradbus in shared memory: the real loops, heartbeats, checks and SGD", "round_gradbus", "shm", hub=True
    ),
    "gradbus-tcp": Contender(
        "Gradbus over TCP: the real loops, heartbeats, checks and SGD", "round_gradbus", "tcp", hub=True
    ),
    "zmq-tcp": Contender(
        "bare pyzmq over TCP, tuned by hand", "round_zmq", "tcp", hub=True, environment=KEEP_MEMORY
    ),
    "zmq-ipc": Contender(
        "bare pyzmq over Unix sockets, tuned by hand", "round_zmq", "ipc", hub=True, environment=KEEP_MEMORY
    ),
    "shm-in": Contender("bare shared memory: copy in, add on one core, read in place", "round_shm", hub=True),
    "pickle": Contender("raw sockets and pickle, the original approach", "round_pickle", hub=True),
    "torch-gloo": Contender("torch.distributed all_reduce", "round_collective", "torch", packages=("torch",)),
    "mpi": Contender(
        "MPI Allreduce over shared memory", "round_collective", "mpi", mpi=True, packages=("mpi4py",),
        environment=OPEN_MPI,
    ),
    "jax-gloo": Contender("JAX psum over processes", "round_collective", "jax", environment=ONE_JAX_THREAD),
    "ray": Contender(
        "Ray actors and object store", "round_ray", hub=True, ranks=False, packages=("ray",), environment=RAY
    ),
}  # fmt: skip

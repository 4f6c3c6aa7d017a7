"""The measure of a synchronous round, for `scripts/bench.py`.

The driver's side: ``main`` (options, order of blocks), ``contenders`` (the table of them), ``team`` (the processes of
one), ``report`` (statistics and tables). A member's side: ``member`` (the process), ``payload`` (vectors and their
check), and one module for each way to do a round: ``round_gradbus``, ``round_zmq``, ``round_shm``, ``round_pickle``,
``round_collective`` (torch, MPI, JAX) and ``round_ray``. Both: ``link``. ``profile`` looks into a process, and
``profiling`` shows what it saw.
"""

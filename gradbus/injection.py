"""Faults on purpose in a real process: ``bus.faults`` says which, this brings them about.

Each is reported to the launcher first, so that it does not befall the next life of the process again.
"""

import os
import signal
import subprocess
import time
from collections.abc import Collection, Sequence

from bus.faults import ANYONE, PS, Clock, Fault, FaultyServer, FaultyWorker, parse
from bus.transport import ServerTransport, WorkerTransport
from gradbus.report import Reporter


class Injection:
    """What is to befall the process ``who``. ``texts``: all faults of the run, of which those at the positions
    ``spent`` are over."""

    def __init__(self, who: str, texts: Sequence[str], spent: Collection[int], reporter: Reporter) -> None:
        self._reporter = reporter
        every = [parse(text) for text in texts]
        ours = (who, ANYONE) if who == PS else (who,)  # a NaN is told of by the PS, which it reaches
        self.faults = [
            fault for index, fault in enumerate(every) if fault.who in ours and (fault.stays or index not in spent)
        ]
        self._index = {id(fault): index for index, fault in enumerate(every)}
        self.clock = Clock(time.monotonic)

    def server(self, transport: ServerTransport) -> ServerTransport:
        return FaultyServer(transport, self.faults, self._strike, time.monotonic) if self.faults else transport

    def worker(self, transport: WorkerTransport) -> WorkerTransport:
        return FaultyWorker(transport, self.faults, self._strike, time.monotonic) if self.faults else transport

    def tell(self, fault: Fault) -> None:
        """That it happens, to the launcher."""
        self._reporter.event("fault", index=self._index[id(fault)], text=fault.text, what=fault.what)

    def _strike(self, fault: Fault) -> None:
        self.tell(fault)
        match fault.what:
            case "SIGKILL" | "SIGTERM":
                os.kill(os.getpid(), getattr(signal, fault.what))
            case "SIGSTOP":
                waking = f"sleep {fault.amount:g}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", waking], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            case "clock":
                self.clock.offset_s += fault.amount

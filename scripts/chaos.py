"""A real cluster under random SIGKILL, SIGSTOP and cut connections, seeded: `make chaos`.

    python scripts/chaos.py [CONFIG] [key=value ...] [--seed 0] [--kills 30] [--ps-kills 5] [--workers 3]

First the run undisturbed, then the same run while its processes are killed and stopped, and while one more worker joins
through a relay that cuts its connections. In the end: the same params_sha256, a clean audit, nothing left behind.
"""

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
from runs import LIMIT_S, Run, left_behind

RELAY_HOST = "127.0.0.2"  # the ports of the PS, at another loopback address


class Relay:
    """Passes connections to ``RELAY_HOST`` on to 127.0.0.1, port by port, until it is told to cut them."""

    def __init__(self, ports: list[int]) -> None:
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listeners = [socket.create_server((RELAY_HOST, port)) for port in ports]
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return  # closed
            try:
                far = socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 2.0)
            except OSError:
                near.close()  # the PS is down
                continue
            self._pairs.append((near, far))
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, target), daemon=True).start()

    def cut(self) -> int:
        """Reset every connection; how many there were."""
        pairs, self._pairs = self._pairs, []
        for end in (end for pair in pairs for end in pair):
            _shut(end)
        return len(pairs)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self.cut()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except OSError:
        pass  # cut: that is what it is for
    _shut(source)
    _shut(target)


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # closed already


def disturb(run: Run, options: argparse.Namespace) -> Counter[str]:
    """Until the run is over: kill, stop and cut, at random, but for a PS that could never finish anything."""
    chance, done = random.Random(options.seed), Counter[str]()
    relay, guest = None, None
    ps_kills_left, last_ps_kill = options.ps_kills, time.monotonic()
    deadline = time.monotonic() + LIMIT_S
    while run.going_on() and time.monotonic() < deadline:
        _pause(run, chance.uniform(0.5, 2.0))
        here = run.processes()
        if not (run.version() and "ps" in here):
            continue
        if relay is None:
            bound = json.loads((run.latest / "manifest.json").read_text())["bound"]
            ports = [int(address.rsplit(":", 1)[1]) for address in bound]
            relay = Relay(ports)
        if guest is None or guest.poll() is not None:
            address = f"tcp://{RELAY_HOST}:{ports[0]}"
            guest = subprocess.Popen(
                [sys.executable, "-m", "gradbus", "worker", "--ps", address, "--name", "guest"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        kills = done["SIGKILL ps"] + done["SIGKILL worker"] + done["SIGKILL evaluator"]
        if kills >= options.kills and ps_kills_left <= 0:
            continue  # enough: let it finish
        what = chance.choice(["kill", "kill", "kill", "stop", "cut"])
        if ps_kills_left > 0 and time.monotonic() - last_ps_kill > 8.0:
            who, what, last_ps_kill, ps_kills_left = "ps", "kill", time.monotonic(), ps_kills_left - 1
        else:
            others = sorted(name for name in here if name != "ps")
            if not others:
                continue  # everyone is being started again
            who = chance.choice(others)
        role = who if who in ("ps", "evaluator") else "worker"
        if what == "cut":
            done["cut connections"] += relay.cut()
        elif what == "kill":
            _signal(here[who], signal.SIGKILL)
            done[f"SIGKILL {role}"] += 1
        else:
            who = chance.choice(sorted(here))
            _signal(here[who], signal.SIGSTOP)
            _pause(run, chance.uniform(0.2, 3.0))
            _signal(here[who], signal.SIGCONT)
            done[f"SIGSTOP {who if who in ('ps', 'evaluator') else 'worker'}"] += 1
    if relay:
        relay.close()
    if guest:
        guest.terminate()
        guest.wait(30)
    return done


def _pause(run: Run, seconds: float) -> None:
    """Wait, but not beyond the end of the run."""
    try:
        run.launcher.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # it was faster


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arguments", nargs="*", metavar="CONFIG or key=value")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--ps-kills", type=int, default=5)
    parser.add_argument("--workers", type=int, default=3)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gradbus-chaos-"))
    arguments = [*options.arguments, f"cluster.workers={options.workers}"]
    (folder / "calm").mkdir()
    (folder / "chaos").mkdir()

    began = time.monotonic()
    calm = Run(folder / "calm", arguments).finish()
    print(f"undisturbed: {calm['params_sha256']} after {time.monotonic() - began:.0f} s", flush=True)
    began = time.monotonic()
    run = Run(folder / "chaos", [*arguments, "cluster.restarts=1000", "checkpoint.every=50"])
    try:
        done = disturb(run, options)
        summary = run.finish()
    finally:
        run.launcher.kill()  # it takes everything with it; nothing to do where all went well
    seconds = time.monotonic() - began
    print(f"in chaos:    {summary['params_sha256']} after {seconds:.0f} s; restarts {summary['restarts']}")
    print("done to it:  " + ", ".join(f"{count} x {what}" for what, count in sorted(done.items())))
    print(f"refused:     {summary['refused']}")
    audit = subprocess.run(
        [sys.executable, "-m", "gradbus", "audit", str(run.latest)], capture_output=True, text=True, check=False
    )
    print(audit.stdout.strip() or audit.stderr.strip())
    leftovers = left_behind(folder)
    print("\n".join(["left behind:", *leftovers]) if leftovers else "nothing left behind")
    same = summary["params_sha256"] == calm["params_sha256"]
    print("the same bits" if same else "OTHER BITS")
    return 0 if same and audit.returncode == 0 and not leftovers else 1


if __name__ == "__main__":
    sys.exit(main())

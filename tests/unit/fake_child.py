"""Stands for `python -m gradbus.child` in the tests of the launcher: does what scenario.json says.

It lies in the run folder or beside it.

scenario.json: {name: [[step, ...] of its first life, [step, ...] of its second, ...]}; the last life is repeated.
Every wait ends with the launcher (the lifeline) and after 20 s.
"""

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
lifeline = int(os.environ["GRADBUS_LIFELINE_FD"])
reports = int(os.environ["GRADBUS_REPORT_FD"])


def await_that(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        if select.select([lifeline], [], [], 0.01)[0] or time.monotonic() > deadline:
            sys.exit(9)


role, *arguments = sys.argv[1:]
options = dict(itertools.pairwise(arguments))
run = Path(options["--run"] if role == "worker" else arguments[0])
name = options.get("--name", role)
scenario = next(folder / "scenario.json" for folder in (run, run.parent) if (folder / "scenario.json").exists())
lives = json.loads(scenario.read_text())[name]
life = len(list(run.glob(f"started-{name}-*")))
(run / f"started-{name}-{life}").write_text(
    json.dumps({"pid": os.getpid(), "group": os.getpgrp(), "argv": sys.argv[1:], "env": dict(os.environ)})
)
for verb, *details in lives[min(life, len(lives) - 1)]:
    match verb:
        case "report":
            event, fields = details
            os.write(reports, json.dumps({"event": event, **fields}).encode() + b"\n")
        case "print":
            print(*details, flush=True)
        case "touch":
            (run / details[0]).touch()
        case "until":  # a file is there
            await_that((run / details[0]).exists)
        case "until_asked":
            await_that(lambda: asked)
        case "ignore_asking":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "grandchild":  # ends with SIGKILL only, or with the lifeline
            code = "import signal,sys; signal.signal(15, signal.SIG_IGN); print('up', flush=True); sys.stdin.read()"
            command = [sys.executable, "-S", "-E", "-c", code]
            child = subprocess.Popen(command, stdin=lifeline, stdout=subprocess.PIPE)
            child.stdout.readline()
            (run / "grandchild").write_text(str(child.pid))
        case "die":
            os.kill(os.getpid(), details[0])
        case "exit":
            os._exit(details[0])

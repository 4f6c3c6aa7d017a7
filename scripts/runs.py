"""A real `gradbus cluster` as the scripts see it from outside: its processes, its ledger, its console, its end."""

import json
import subprocess
import sys
from pathlib import Path

import psutil

LIMIT_S = 1800.0  # of a whole run


class Run:
    """One `gradbus cluster` in ``folder``, and whoever belongs to it."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "gradbus", "cluster", *arguments, f"run.dir={folder}", "eval.every=0"]
        self._output = (folder / "console.txt").open("wb")
        self.launcher = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)

    @property
    def latest(self) -> Path:
        return self.folder / "latest"

    def going_on(self) -> bool:
        return self.launcher.poll() is None

    def processes(self) -> dict[str, psutil.Process]:
        """By role: ps, w0, w1, ..., evaluator."""
        found: dict[str, psutil.Process] = {}
        try:
            for child in psutil.Process(self.launcher.pid).children():
                words = child.cmdline()
                if "gradbus.child" in words:
                    role = words[words.index("gradbus.child") + 1]
                    found[words[words.index("--name") + 1] if role == "worker" else role] = child
        except (psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):
            return found  # gone while we looked
        return found

    def version(self) -> int:
        """Of the last update in the ledger."""
        try:
            with (self.latest / "ledger.jsonl").open("rb") as ledger:
                ledger.seek(0, 2)
                ledger.seek(max(0, ledger.tell() - 20_000))
                rows = [line for line in ledger.read().split(b"\n") if line.startswith(b'{"kind":"update"')]
        except OSError:
            return 0
        for line in reversed(rows):
            try:
                return int(json.loads(line)["version"])
            except ValueError:
                continue  # the last line, half written
        return 0

    def finish(self) -> dict[str, object]:
        code = self.launcher.wait(LIMIT_S)
        self._output.close()
        if code:
            tail = (self.folder / "console.txt").read_text().splitlines()[-25:]
            raise SystemExit("\n".join([*tail, f"gradbus cluster ended with {code}; see {self.folder}"]))
        summary: dict[str, object] = json.loads((self.latest / "summary.json").read_text())
        return summary


def left_behind(folder: Path) -> list[str]:
    """Processes that still name the run's folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "gradbus.child" in words and any(str(folder) in word for word in words):
            found.append(f"{process.pid}: {' '.join(words)}")
    return found

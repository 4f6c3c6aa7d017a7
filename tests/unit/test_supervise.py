"""The launcher with real processes: a small stand-in for the children, signals, exits, leftovers."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gradbus.policy import Limits
from gradbus.process import Process
from gradbus.records import RunFolder
from gradbus.supervise import Failure, Result, Supervisor

FAKE = (sys.executable, "-S", "-E", str(Path(__file__).with_name("fake_child.py")))
QUICK = Limits(start_s=20, grace_s=5, kill_s=0.3, leave_s=5, evaluator_s=5, evaluation_s=5, alone_s=5, backoff_s=0.05)
LISTENING = ["report", "listening", {"control": "tcp://127.0.0.1:4711", "session": 1}]
DONE = ["report", "finished", {"status": "done", "version": 40, "exit_code": 0, "loss": 0.5}]
EVALUATED = ["report", "evaluated", {"version": 40, "eval": {"accuracy": 0.97}, "seconds": 0.1}]

PS = [LISTENING, ["until", "enough"], ["until", "watched"], DONE, ["touch", "over"]]
WORKER = [["report", "joined", {"member": 1}], ["touch", "enough"], ["until", "over"], ["report", "left", {}]]
EVALUATOR = [["touch", "watched"], ["until", "over"], EVALUATED]


class Witness:
    """Remembers what it is told; `on` maps an event's name to something to do when it comes."""

    def __init__(self, on=None) -> None:
        self.events: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.failures: list[Failure] = []
        self._on = on or {}

    def reported(self, source, event, fields) -> None:
        self.events.append((source, event))
        self._on.get(event, lambda: None)()

    def note(self, text) -> None:
        self.notes.append(text)

    def failed(self, failure) -> None:
        self.failures.append(failure)

    def tick(self) -> None:
        pass


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path)
    (tmp_path / "logs").mkdir()
    return folder


def supervise(
    run, witness=None, *, workers=1, limits=QUICK, restarts=2, evaluator=True, child=FAKE, lives=None, **workers_and_ps
) -> Result:
    scenario = {"ps": [PS], "evaluator": [EVALUATOR], "eval": [[EVALUATED]]}
    scenario |= {f"w{index}": [WORKER] for index in range(workers)} | (lives or {}) | workers_and_ps
    (run.path / "scenario.json").write_text(json.dumps(scenario))
    witness = witness or Witness()
    supervisor = Supervisor(
        run, witness, workers=workers, evaluator=evaluator, restarts=restarts, threads=3, child=child, limits=limits
    )
    result = supervisor.run()
    assert living(run) == []
    return result


def living(run) -> list[str]:
    """Who of those that were started, or of their process groups, still runs; zombies do not."""
    groups = {json.loads(file.read_text())["group"]: file.name for file in run.path.glob("started-*")}
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if state != "Z" and int(group) in groups:
                found.append(groups[int(group)])
    return found


def started(run, name, life=0):
    return json.loads((run.path / f"started-{name}-{life}").read_text())


def test_a_run(run):
    witness = Witness()
    ps = [LISTENING, ["until", "second"], *PS[1:]]  # both workers are there before it ends
    result = supervise(run, witness, workers=2, ps=[ps], w1=[[["touch", "second"], *WORKER]])
    assert (result.outcome.status, result.outcome.exit_code) == ("done", 0)
    assert result.finished["loss"] == 0.5
    assert result.evaluations[40]["eval"] == {"accuracy": 0.97}
    assert result.failures == () and result.restarts == 0
    assert witness.events[0] == ("ps", "listening")
    assert started(run, "ps")["argv"] == ["ps", str(run.path)]
    worker = started(run, "w1")
    assert worker["argv"] == ["worker", "--ps", "tcp://127.0.0.1:4711", "--name", "w1", "--run", str(run.path)]
    assert worker["env"]["NPROC"] == "3"
    assert started(run, "evaluator")["env"]["JAX_PLATFORMS"] == "cpu"
    assert "--- " in run.log("w0").read_text()


def test_a_process_that_is_stopped_is_named_and_so_is_its_going_on(run):
    witness = Witness()

    def wake() -> None:
        os.kill(started(run, "w0")["pid"], signal.SIGCONT)

    note = witness.note
    witness.note = lambda text: (note(text), wake() if "was stopped" in text else None)
    supervise(run, witness, w0=[[["die", signal.SIGSTOP], *WORKER]])
    pid = started(run, "w0")["pid"]
    assert witness.notes == [
        f"w0 (pid {pid}) was stopped by SIGSTOP; it goes on after: kill -CONT {pid}",
        f"w0 (pid {pid}) goes on",
    ]


def test_a_fault_on_purpose_that_has_happened_is_not_for_the_next_life(run):
    fault = ["report", "fault", {"index": 2, "text": "worker 0: SIGKILL at version 7", "what": "SIGKILL"}]
    lives = [[fault, ["die", signal.SIGKILL]], [["die", signal.SIGKILL]], WORKER]
    result = supervise(run, w0=lives)
    assert "--spent" not in started(run, "w0")["argv"] and result.faults == {2}
    assert started(run, "w0", life=1)["argv"][-2:] == ["--spent", "2"]
    assert [failure.reason for failure in result.failures] == [
        "killed by SIGKILL, on purpose",
        "killed by SIGKILL: likely out of memory, or killed by hand",
    ]


def test_a_killed_worker_is_restarted_and_told(run):
    lives = [[["print", "about to die"], ["die", signal.SIGKILL]], WORKER]
    witness = Witness()
    result = supervise(run, witness, w0=lives)
    assert result.outcome.status == "done" and result.restarts == 1
    (failure,) = witness.failures
    assert failure == result.failures[0]
    assert (failure.name, failure.pid) == ("w0", started(run, "w0", 0)["pid"])
    assert "killed by SIGKILL: likely out of memory" in failure.reason
    assert failure.tail[-1] == "about to die" and failure.log == run.log("w0")
    assert "restart 1 of 2" in failure.answer


def test_a_failure_shows_the_last_lines_of_its_own_life(run):
    lives = [[["print", word], ["die", signal.SIGKILL]] for word in ("first", "second")]
    witness = Witness()
    supervise(run, witness, w0=[*lives, WORKER])
    for failure, word in zip(witness.failures, ("first", "second"), strict=True):
        assert failure.tail[0].startswith("--- ") and failure.tail[1:] == (word,)


def test_a_dead_ps_ends_everything(run):
    ps = [LISTENING, ["until", "enough"], ["print", "Segmentation fault"], ["die", signal.SIGSEGV]]
    result = supervise(run, ps=[ps], workers=2)
    assert (result.outcome.status, result.outcome.exit_code) == ("failed", 1)
    assert "killed by SIGSEGV" in result.outcome.reason
    assert result.failures[0].name == "ps" and "Segmentation fault" in result.failures[0].tail


def test_a_ps_that_cannot_start(run):
    ps = [["report", "failed", {"kind": "bind", "reason": "tcp://127.0.0.1:5555 is in use"}], ["exit", 2]]
    result = supervise(run, ps=[ps])
    assert (result.outcome.exit_code, result.outcome.reason) == (2, "tcp://127.0.0.1:5555 is in use")
    assert result.failures == () and not list(run.path.glob("started-w0*"))


def test_a_workload_that_raises_everywhere(run):
    ps = [
        LISTENING,
        ["until_asked"],
        ["report", "finished", {"status": "interrupted", "exit_code": 143}],
        ["exit", 143],
    ]
    worker = [
        ["report", "failed", {"kind": "workload", "reason": "mine.py:7: loss() raised ValueError: no"}],
        ["exit", 2],
    ]
    result = supervise(run, ps=[ps], w0=[worker], w1=[worker], workers=2, evaluator=False)
    assert (result.outcome.status, result.outcome.exit_code) == ("failed", 2)
    assert result.outcome.reason == "mine.py:7: loss() raised ValueError: no"
    assert result.restarts == 0


def test_the_final_evaluation_is_made_up_for(run):
    result = supervise(run, lives={"evaluator": [[["touch", "watched"], ["exit", 1]]]})
    assert result.outcome.status == "done"
    assert result.evaluations[40]["eval"] == {"accuracy": 0.97}
    assert started(run, "eval")["argv"] == ["eval", str(run.path)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_the_first_signal_lets_the_ps_finish(run, number, code):
    ps = [
        LISTENING,
        ["until_asked"],
        ["report", "finished", {"status": "interrupted", "version": 7, "exit_code": 143}],
        ["touch", "over"],
        ["exit", 143],
    ]
    witness = Witness({"joined": lambda: os.kill(os.getpid(), number)})
    before = signal.signal(number, signal.default_int_handler)  # whatever it was: nohup ignores SIGHUP
    try:
        result = supervise(run, witness, ps=[ps], evaluator=False)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert (result.outcome.status, result.outcome.exit_code) == ("interrupted", code)
    assert result.finished["version"] == 7
    assert ("w0", "left") in witness.events, "the worker was not signalled, it left"


def test_under_nohup_the_terminal_may_go(run):
    """SIGHUP is ignored then, and stays so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = supervise(run, Witness({"joined": lambda: os.kill(os.getpid(), signal.SIGHUP)}))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (result.outcome.status, result.outcome.exit_code) == ("done", 0)


def test_the_stubborn_are_killed_after_their_time(run):
    stubborn = [["ignore_asking"], ["touch", "enough"], ["until", "never"]]
    ps = [["ignore_asking"], LISTENING, ["until", "never"]]
    witness = Witness({"listening": lambda: os.kill(os.getpid(), signal.SIGINT)})
    begun = time.monotonic()
    limits = Limits(grace_s=0.2, kill_s=0.2)
    result = supervise(run, witness, ps=[ps], w0=[stubborn], limits=limits)
    assert (result.outcome.status, result.outcome.exit_code) == ("interrupted", 130)
    assert time.monotonic() - begun < 4


def test_the_second_signal_is_immediate(run):
    ps = [["ignore_asking"], LISTENING, ["until", "never"]]
    worker = [["ignore_asking"], ["report", "joined", {}], ["until", "never"]]

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    begun = time.monotonic()
    result = supervise(run, Witness({"joined": twice}), ps=[ps], w0=[worker], evaluator=False, limits=Limits())
    assert result.outcome.exit_code == 130
    assert time.monotonic() - begun < 4


def test_what_a_child_leaves_behind_is_ended_with_it(run):
    worker = [["grandchild"], *WORKER]
    result = supervise(run, w0=[worker])
    assert result.outcome.status == "done"
    assert (run.path / "grandchild").exists()


def test_a_wrapper_script_is_ended_with_what_it_started(run, tmp_path):
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    wrapper.chmod(0o755)
    ps = [["ignore_asking"], LISTENING, ["until", "never"]]
    witness = Witness({"joined": lambda: os.kill(os.getpid(), signal.SIGTERM)})
    limits = Limits(grace_s=0.2, kill_s=0.3)
    lives = [["report", "joined", {}], ["until", "never"]]
    result = supervise(run, witness, child=(str(wrapper), *FAKE), ps=[ps], w0=[lives], limits=limits, evaluator=False)
    assert result.outcome.exit_code == 143


def test_a_child_that_cannot_be_started(run):
    result = supervise(run, child=("/nonexistent/python",))
    assert (result.outcome.status, result.outcome.exit_code) == ("failed", 1)


def test_an_error_of_the_launcher_leaves_no_process(run):
    def fail() -> None:
        raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="terminal"):
        supervise(run, Witness({"joined": fail}), limits=Limits())
    assert living(run) == []


def test_children_end_with_a_killed_launcher(run):
    (run.path / "scenario.json").write_text(
        json.dumps({"ps": [[LISTENING, ["until", "never"]]], "w0": [[["report", "joined", {}], ["until", "never"]]]})
    )
    launcher = f"""
        import sys
        from pathlib import Path
        from gradbus.records import RunFolder
        from gradbus.supervise import Supervisor

        class Teller:
            def reported(self, source, event, fields): print(source, event, flush=True)
            def note(self, text): pass
            def failed(self, failure): pass
            def tick(self): pass

        options = dict(workers=1, evaluator=False, restarts=0, threads=1, child={FAKE!r})
        Supervisor(RunFolder(Path({str(run.path)!r})), Teller(), **options).run()
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(launcher)], stdout=subprocess.PIPE, text=True)
    with process:
        while process.stdout.readline() != "w0 joined\n":
            assert process.poll() is None
        pids = [os.pidfd_open(started(run, name)["pid"]) for name in ("ps", "w0")]
        process.kill()
        for pid in pids:
            with contextlib.closing(os.fdopen(pid)) as file:
                assert select.select([file], [], [], 10)[0], "the child outlived its launcher"


def test_zombies_do_not_count_as_members_of_a_group(tmp_path):
    popen = subprocess.Popen([sys.executable, "-S", "-E", "-c", ""], start_new_session=True)
    os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
    assert not Process("w0", popen, tmp_path / "log").group_alive()
    popen.wait()

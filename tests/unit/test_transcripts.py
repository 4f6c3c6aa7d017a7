"""Stories: each line that starts with ``>`` is told to a machine, indented is what it then wants done.

REGENERATE=1 writes tests/transcripts/server-*.txt and worker-*.txt anew; read the difference before you keep it.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from bus import messages
from bus.messages import (
    Alive,
    Assignment,
    Contribution,
    Failure,
    Fetch,
    Hello,
    Leave,
    Left,
    Ready,
    Refusal,
    Serving,
    Stop,
    Subscribed,
    Weights,
    Welcome,
)
from ps import actions as ps
from ps.machine import Machine as ServerMachine
from ps.machine import Rules
from worker import machine as worker
from worker.machine import Machine as WorkerMachine

TRANSCRIPTS = Path(__file__).parents[1] / "transcripts"
STORIES = sorted([*TRANSCRIPTS.glob("server-*.txt"), *TRANSCRIPTS.glob("worker-*.txt")])
SESSION = 1


def spans(nodes: Any) -> str:
    return ", ".join(f"{low}" if high == low + 1 else f"{low}-{high - 1}" for low, high in nodes) or "none"


def planned(plan: tuple[Assignment, ...]) -> str:
    return "; ".join(f"member {one.member}: shards {spans([(one.low, one.high)])}" for one in plan) or "nobody"


def words(message: Any) -> str:
    """A message, for people."""
    match message:
        case Weights():
            bucket = f" bucket {message.bucket}"
            return f"weights of version {message.version}{bucket}, plan {message.revision}: {planned(message.plan)}"
        case messages.Plan():
            return f"plan {message.revision} of version {message.version}: {planned(message.plan)}"
        case Serving():
            missing = spans(message.missing)
            return f"serving version {message.version}, plan {message.revision}, shards missing: {missing}"
        case Fetch():
            return f"fetch, holding version {message.version}"
        case Alive():
            return f"alive, {message.doing}"
        case Stop() | Failure():
            return f"{type(message).__name__.lower()}: {message.reason}"
        case Refusal():
            return f"refusal{', join again' if message.rejoin else ''}: {message.reason}"
        case _:
            return type(message).__name__.lower()


class Server:
    """``> server shards=4 ...`` makes one; it answers CloseStep by itself, as the edge does."""

    def __init__(self, rules: dict[str, Any]) -> None:
        defaults = dict(
            steps=9, shards=4, buckets=1, min_workers=1, max_wait_s=60.0, heartbeat_s=1.0, heartbeat_timeout_s=3.0,
            nonfinite="stop", nonfinite_limit=3, save_every=0, evaluate_every=0, evaluate=False,
        )  # fmt: skip
        self.now = 0.0
        self.machine = ServerMachine(Rules(**defaults | rules), session=SESSION, version=0, now=0.0)
        self.numbers: dict[str, int] = {}

    def __call__(self, verb: str, *rest: str) -> list[str]:
        name = rest[0] if rest else ""
        number = self.numbers.get(name, 0)
        match verb, *rest:
            case "hello", _:
                self.numbers[name] = self.machine.members.joined + 1
                return self.tell(Hello(name, "lab", 1, self.numbers[name], {}), name)
            case "ready", _:
                return self.tell(Subscribed(number)) + self.tell(Ready(SESSION, number, "cpu"), name)
            case "alive", _:
                return self.tell(Alive(SESSION, number, self.machine.version, "computing"), name)
            case "fetch", _:
                return self.tell(Fetch(SESSION, number, -1), name)
            case "leave", _:
                return self.tell(Leave(SESSION, number), name)
            case "gradient", _, shards, *more:
                low, _, last = shards.partition("-")
                return self.gradient(number, int(low), int(last or low) + 1, dict(one.split("=") for one in more))
            case "stop", "asked", "for":
                return self.tell(ps.StopRequested(5.0))
            case "seconds", _:
                return self.seconds(float(name))
        raise AssertionError(f"what is {verb} {rest}?")

    def gradient(self, member: int, low: int, high: int, more: dict[str, str]) -> list[str]:
        bad = tuple(int(shard) for shard in more.get("nan", "").split(",") if shard)
        version = int(more.get("version", self.machine.version))
        session = int(more.get("session", SESSION))
        trouble = "loss = nan" if bad else ""
        examples = 8 * (high - low - len(bad))
        return self.tell(Contribution(session, member, version, 0, low, high, examples, {}, bad, trouble))

    def seconds(self, passed_s: float) -> list[str]:
        said = []
        for _ in range(round(passed_s * 2)):
            self.now += 0.5
            said += self.tell(ps.Tick())
        return said

    def tell(self, event: Any, peer: str = "") -> list[str]:
        said: list[str] = []
        for action in self.machine.handle(event, now=self.now, peer=peer.encode()):
            said.append(self.said(action))
            if isinstance(action, ps.CloseStep):
                said += self.tell(ps.Updated(applied=not action.skip))
        self.machine.check()
        return said

    def said(self, action: Any) -> str:
        match action:
            case ps.Admit():
                return f"to {action.peer.decode()}: welcome, you are member {action.member}"
            case ps.Reply():
                return f"to {action.peer.decode()}: {words(action.message)}"
            case ps.SendSnapshot():
                weights = Weights(SESSION, self.machine.version, 0, action.revision, action.plan)
                return f"to {action.peer.decode()}: {words(weights)}"
            case ps.Broadcast():
                return f"to all: {words(action.message)}"
            case ps.Publish():
                return f"to all: {words(Weights(SESSION, action.version, 0, action.revision, action.plan))}"
            case ps.Accept():
                kept = f"hold shards {spans([(action.contribution.low, action.contribution.high)])}"
                return kept + "".join(f", add up {spans([node])}" for node in action.taken.sums)
            case ps.Refused():
                return f"refuse what {action.name} sent: {action.reason}"
            case ps.CloseStep():
                made = "; ".join(f"{spans([(low, high)])} by member {who}" for low, high, who in action.result.makers)
                what = "skip the update" if action.skip else "update the weights"
                return f"close step {action.version} of {action.result.examples} examples ({made}): {what}"
            case ps.MemberChanged():
                return f"{action.name} {action.event}{': ' if action.reason else ''}{action.reason}"
            case ps.Save():
                return f"save version {action.version}"
            case ps.Note():
                return action.text
            case ps.Finish():
                return f"{action.status}, exit code {action.exit_code}: {action.reason}"
        raise AssertionError(f"how is {action} said?")


class Worker:
    """``> worker`` makes one that has joined as member 1; ``> dialling worker`` one that has not."""

    def __init__(self, joined: bool) -> None:
        self.now = 0.0
        self.machine = WorkerMachine(
            Hello("w0", "lab", 1, 1, {}), address="tcp://ps:5555", connect_timeout_s=20.0, now=0.0
        )
        self.machine.buckets = 2
        if joined:
            self("welcome"), self("prepared")

    def __call__(self, verb: str, *rest: str) -> list[str]:
        match verb, *rest:
            case "welcome", *session:
                number = int(session[0]) if session else SESSION
                return self.tell(Welcome(number, 1, 0, "{}", (), 4096, "", "", 1.0, 5.0))
            case "prepared", *session:
                return self.tell(worker.Prepared(int(session[0]) if session else SESSION, "cpu"))
            case "weights", version, bucket, revision, *plan:
                return self.tell(Weights(SESSION, int(version), int(bucket), int(revision), self.plan(plan)))
            case "plan", version, revision, *plan:
                return self.tell(messages.Plan(SESSION, int(version), int(revision), self.plan(plan)))
            case "serving", version, revision, *missing:
                nodes = tuple((one.low, one.high) for one in self.plan([f"1:{shards}" for shards in missing]))
                return self.tell(Serving(SESSION, int(version), int(revision), nodes))
            case "another", "session":
                return self.tell(Serving(SESSION + 1, 0, 0, ()))
            case "computed", version, shards:
                (one,) = self.plan([f"1:{shards}"])
                return self.tell(worker.Computed(SESSION, int(version), (one.low, one.high)))
            case "stop", *reason:
                return self.tell(Stop(SESSION, 0, " ".join(reason)))
            case "left", *_:
                return self.tell(Left(SESSION, 1))
            case "seconds", passed_s:
                said = []
                for _ in range(round(float(passed_s) * 2)):
                    self.now += 0.5
                    said += self.tell(worker.Tick())
                return said
        raise AssertionError(f"what is {verb} {rest}?")

    def plan(self, texts: list[str]) -> tuple[Assignment, ...]:
        rows = [text.replace("-", ":").split(":") for text in texts]  # member:first-last
        return tuple(Assignment(int(row[0]), int(row[1]), int(row[-1]) + 1) for row in rows)

    def tell(self, event: Any) -> list[str]:
        return [self.said(action) for action in self.machine.handle(event, now=self.now)]

    def said(self, action: Any) -> str:
        match action:
            case worker.Send():
                return f"say: {words(action.message)}"
            case worker.Prepare():
                return "connect, load and compile"
            case worker.Keep():
                return f"keep bucket {action.weights.bucket} of version {action.weights.version}"
            case worker.Compute():
                return f"compute shards {spans(action.nodes)} of step {action.version}"
            case worker.Push():
                return f"push shards {spans([action.node])} of step {action.version}"
            case worker.Forget():
                return "forget the session and dial anew"
            case worker.Note():
                return action.text
            case worker.Exit():
                return f"exit code {action.exit_code}: {action.reason}"
        raise AssertionError(f"how is {action} said?")


def told(story: str) -> str:
    """``story`` with what the machine wants after each line that is told to it."""
    lines, machine = [], None
    for line in story.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if not line.startswith("> "):
            continue
        match line[2:].split():
            case ["server", *rules]:
                pairs = [rule.split("=") for rule in rules]
                machine = Server({key: int(value) if value.isdigit() else value for key, value in pairs})
            case ["worker"] | ["dialling", "worker"] as made:
                machine = Worker(joined=made == ["worker"])
            case spoken:
                assert machine is not None, "a story begins with > server or > worker"
                lines += ["    " + said for said in machine(*spoken) or ["(nothing)"]]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_goes_as_it_is_written(path: Path) -> None:
    written = path.read_text()
    found = told(written)
    if os.environ.get("REGENERATE"):
        path.write_text(found)
    assert found == written, f"{path.name} differs; if that is meant, run this test with REGENERATE=1 and read the diff"


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_that_is_not_so_would_be_seen(path: Path) -> None:
    written = path.read_text()
    actions = [line for line in written.splitlines() if line.startswith("    ")]
    assert len(actions) > 10
    assert told(written.replace(actions[3], "    something else", 1)) == written

"""What the PS tells while it runs, brought to where people look: the ledger, the metrics, the log, the launcher."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from gradbus.records import Ledger, Metrics, RunFolder, now_utc
from gradbus.report import Reporter
from ps.actions import MemberChanged, Refused
from ps.history import StepRecord
from ps.membership import Member

PROGRESS_EVERY_S = 0.5

log = logging.getLogger("gradbus.ps")


class RunRecorder:
    """A ``ps.history.Recorder``. ``members()`` are those of now; ``steps`` is where the run is to end; ``versions`` are
    the releases that the PS has, for comparison; ``workers`` those that the manifest knows from an earlier life."""

    def __init__(
        self,
        run: RunFolder,
        reporter: Reporter,
        *,
        steps: int,
        session: int,
        log_every: int,
        members: Callable[[], Mapping[int, Member]],
        versions: Mapping[str, str],
        workers: Mapping[str, Any],
    ) -> None:
        self._reporter, self._steps, self._session = reporter, steps, f"{session:016x}"
        self._run, self._log_every, self._members, self._versions = run, log_every, members, versions
        self._ledger = Ledger(run.ledger, self._fault)
        self._metrics = Metrics(run.metrics, self._fault)
        self._told_at = time.monotonic()
        self._workers: dict[str, Any] = dict(workers)
        self._examples = self._seconds = 0.0
        self._recent_examples = self._recent_seconds = 0.0

    @property
    def examples_per_second(self) -> float:
        """Over the whole session, while steps were open."""
        return self._examples / self._seconds if self._seconds else 0.0

    @property
    def workers(self) -> int:
        """How many have taken part, by their names, in all lives of the PS."""
        return len(self._workers)

    def begin(self, version: int, resumed_from: str | None) -> None:
        """A life of the PS begins, at ``version``."""
        self._ledger.append(
            {"kind": "session", "time": now_utc(), "session": self._session, "version": version,
             "resumed_from": resumed_from}
        )  # fmt: skip

    def step(self, record: StepRecord) -> None:
        self._examples += record.examples
        self._seconds += record.seconds
        self._recent_examples += record.examples
        self._recent_seconds += record.seconds
        row = {name: getattr(record, name) for name in record.__dataclass_fields__}
        self._ledger.append({"kind": "update", **row, "session": self._session, "time": now_utc()})
        if record.version % self._log_every == 0 or record.version == self._steps:
            self._log(record)
        if record.version == self._steps or time.monotonic() - self._told_at >= PROGRESS_EVERY_S:
            self._tell(record)

    def _log(self, record: StepRecord) -> None:
        rate = self._recent_examples / self._recent_seconds if self._recent_seconds else 0.0
        steps = self._recent_examples / record.examples if record.examples else 1.0
        per_step = self._recent_seconds / max(steps, 1.0)
        self._recent_examples = self._recent_seconds = 0.0
        loss = float("nan") if record.loss is None else record.loss
        log.info("step %d, loss = %.2f (%.1f examples/sec; %.3f sec/batch)", record.version, loss, rate, per_step)
        self._metrics.append(
            {"version": record.version, "time": now_utc(), "loss": record.loss, "loss_average": record.loss_average,
             "examples_per_second": rate, "seconds_per_step": per_step, "learning_rate": record.learning_rate,
             "metrics": record.metrics}
        )  # fmt: skip

    def _tell(self, record: StepRecord) -> None:
        self._told_at = time.monotonic()
        computed = {member: 0 for _, _, member in record.shards}
        for low, high, member in record.shards:
            computed[member] += high - low
        self._reporter.progress(
            version=record.version,
            steps=self._steps,
            loss=record.loss,
            loss_average=record.loss_average,
            examples_per_second=record.examples / record.seconds if record.seconds else None,
            seconds_per_step=record.seconds,
            members=[
                {"member": member.number, "name": member.name, "host": member.host, "doing": member.doing,
                 "ready": member.plannable, "shards": computed.get(member.number, 0),
                 "examples_per_second": member.examples_per_second}
                for member in self._members().values()
            ],
        )  # fmt: skip

    def refused(self, refused: Refused) -> None:
        contribution = refused.contribution
        log.warning(
            "refused: shards %d..%d of step %d from %s: %s",
            contribution.low, contribution.high - 1, contribution.version, refused.name, refused.reason,
        )  # fmt: skip
        self._ledger.append(
            {"kind": "refused", "time": now_utc(), "member": contribution.member, "name": refused.name,
             "version": contribution.version, "bucket": contribution.bucket,
             "shards": [contribution.low, contribution.high], "reason": refused.reason,
             "open_version": refused.open_version}
        )  # fmt: skip

    def member(self, change: MemberChanged) -> None:
        row = {name: getattr(change, name) for name in change.__dataclass_fields__}
        self._ledger.append({"kind": "member", "time": now_utc(), **row})
        member = self._members().get(change.member)
        if change.event == "ready" and member is not None:
            self._workers[change.name] = {
                "member": change.member, "host": change.host, "pid": change.pid, "device": member.device,
                "versions": member.versions,
            }  # fmt: skip
            self._run.update_manifest(workers=self._workers)
        text = f"{change.name} {change.event} (member {change.member}, {change.host} pid {change.pid})"
        self.note(f"{text}: {change.reason}" if change.reason else text)
        if change.event == "joined" and member is not None:
            self._compare(member)

    def _compare(self, member: Member) -> None:
        """Other releases than those of the PS are allowed, and told: they may compute other bits."""
        others = [
            f"{name} {member.versions.get(name, 'unknown')} (here {ours})"
            for name, ours in self._versions.items()
            if member.versions.get(name) != ours
        ]
        if others:
            self.note(f"{member.name} has other releases, which may change the bits: {', '.join(others)}")

    def note(self, text: str) -> None:
        log.info("%s", text)
        self._reporter.event("note", text=text)

    def _fault(self, text: str) -> None:
        log.error("%s", text)
        self._reporter.event("note", text=text)

    def close(self) -> None:
        self._ledger.close()
        self._metrics.close()

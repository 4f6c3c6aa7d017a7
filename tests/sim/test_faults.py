"""One fault at a time, at every place where it can happen: the run ends in time, with the bits of the plain loop."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import BUCKET_BYTES, EXAMPLES, HEARTBEAT_S, LAYOUT, Cluster, reference, stale_gradients

from bus.codec import checksum
from bus.memory import Chances, Network
from bus.messages import (
    Contribution,
    Fetch,
    Malformed,
    Message,
    Plan,
    Weights,
)
from bus.transport import Arrival

Decide = Callable[[int, tuple[object, ...], Message], str]
Tamper = Callable[..., list[Message]]


@pytest.fixture
def tamper(monkeypatch: pytest.MonkeyPatch) -> Tamper:
    """Decide, for each message by its number, route and content, whether the network is to "lose", "double" or "delay"
    it, and for how many in all; the answer is the list of those that were."""
    carry = Network.carry

    def install(decide: Decide, limit: int = 10**9) -> list[Message]:
        count, chosen = iter(range(10**9)), []

        def tampered(self: Network, route: Any, message: Message, payload: Any, lose: float, deliver: Any) -> None:
            decision = decide(next(count), route, message) if len(chosen) < limit else ""
            if decision:
                chosen.append(message)
            for _ in range({"lose": 0, "double": 2}.get(decision, 1)):
                if decision == "delay":
                    self.at(self.now + 0.5, lambda: carry(self, route, message, payload, lose, deliver))
                else:
                    carry(self, route, message, payload, lose, deliver)

        monkeypatch.setattr(Network, "carry", tampered)
        return chosen

    return install


def started(workers: int = 2, **settings: Any) -> Cluster:
    cluster = Cluster(**{"seed": 1, "shards": 4, "steps": 6} | settings)
    for number in range(workers):
        cluster.start_worker(f"w{number}")
    return cluster


def assert_as_the_plain_loop(cluster: Cluster, limit_s: float = 60.0) -> None:
    found = cluster.run(limit_s)
    expected = reference(
        cluster.steps, cluster.shards, scale=cluster.scale, bad=cluster.bad, nonfinite=cluster.nonfinite
    )
    for mine, other in zip(found, expected, strict=True):
        assert mine.tobytes() == other.tobytes(), f"seed {cluster.seed}\n{cluster.story()}"


# One message


def carried(**settings: Any) -> int:
    """How many messages a run without faults takes until its last step is closed."""
    cluster = started(**settings)
    count = 0
    original = Network.carry

    def counting(self: Network, *rest: Any) -> None:
        nonlocal count
        count += not cluster.witness.steps or cluster.witness.steps[-1].version < cluster.steps
        original(self, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "carry", counting)
        cluster.run()
    return count


@pytest.mark.parametrize("fault", ["lose", "double", "delay"])
@pytest.mark.parametrize("workers", [1, 2])
def test_any_one_message_may_be_lost_doubled_or_late(fault: str, workers: int, tamper: Tamper) -> None:
    settings: dict[str, Any] = {"workers": workers, "shards": 3, "steps": 3}
    for victim in range(carried(**settings)):
        chosen = tamper(lambda index, route, message, victim=victim: fault if index == victim else "")
        cluster = started(**settings)
        try:
            assert_as_the_plain_loop(cluster, limit_s=10.0)
        except AssertionError as error:
            raise AssertionError(f"{fault} {chosen}") from error


@pytest.mark.parametrize(
    ("kinds", "count", "beats"),
    [
        ((Weights,), len(LAYOUT.buckets), 1),
        ((Weights,), 1, 2),
        ((Weights, Fetch), len(LAYOUT.buckets) + 1, 2),
        ((Contribution,), len(LAYOUT.buckets), 2),
        ((Contribution,), 1, 2),
    ],
    ids=["a version", "a bucket of it", "a version and the request for it", "a gradient", "a bucket of it "],
)
def test_what_is_lost_is_made_up_for_within_a_few_heartbeats(
    kinds: tuple[type[Message], ...], count: int, beats: int, tamper: Tamper
) -> None:
    """Step 5 of worker w0, where a step takes less than a heartbeat."""
    cluster = started(workers=2, steps=12)
    peer = cluster.workers["w0"].transport.peer  # type: ignore[attr-defined]

    def decide(index: int, route: tuple[object, ...], message: Message) -> str:
        ours = isinstance(message, kinds) and route[1] == peer
        return "lose" if ours and (isinstance(message, Fetch) or message.version == 5) else ""  # type: ignore[attr-defined]

    lost = tamper(decide, count)
    assert_as_the_plain_loop(cluster)
    assert len(lost) == count
    seconds = {record.from_version: record.seconds for record in cluster.witness.steps}
    assert seconds.pop(5) < (beats + 1) * HEARTBEAT_S + 0.1
    assert max(seconds.values()) < HEARTBEAT_S


def test_a_revised_plan_that_is_lost_is_made_up_for_at_the_next_heartbeat(tamper: Tamper) -> None:
    cluster = started(workers=2, steps=12)
    lost = tamper(lambda index, route, message: "lose" if isinstance(message, Plan) else "", 1)

    def leave_in_step_5() -> None:
        if cluster.server and cluster.server.machine.version == 5:
            cluster.workers["w1"].request_stop(0)
        else:
            cluster.network.at(cluster.network.now + 0.001, leave_in_step_5)

    leave_in_step_5()
    assert_as_the_plain_loop(cluster)
    assert len(lost) == 1
    seconds = {record.from_version: record.seconds for record in cluster.witness.steps}
    assert seconds[5] < 2 * HEARTBEAT_S + 0.1
    names = {change.member: change.name for change in cluster.witness.changes}
    assert {names[member] for _, _, member in cluster.witness.steps[5].shards} == {"w0"}


@pytest.mark.parametrize("seed", range(6))
def test_doubled_and_reordered_messages_change_nothing(seed: int) -> None:
    cluster = started(workers=3, seed=seed, shards=8, chances=Chances(delay_s=(0.0001, 0.05), double=0.5, reorder=0.5))
    assert_as_the_plain_loop(cluster)
    kinds = {refused.reason.split(":")[0] for refused in cluster.witness.refusals}
    assert "duplicate" in kinds and kinds <= {"duplicate", "other version", "no open step", "older session"}


# Processes


def test_a_step_waits_for_min_workers_however_late_they_come() -> None:
    cluster = started(workers=1, min_workers=2)
    cluster.network.at(3.0, lambda: cluster.start_worker("w1"))
    assert_as_the_plain_loop(cluster, limit_s=10.0)
    assert {member for _, _, member in cluster.witness.steps[0].shards} == {1, 2}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("victim", ["w0", "ps"])
def test_a_process_may_be_killed_at_any_moment(victim: str, workers: int) -> None:
    """Every 30 ms of a run of a second, and started again at once."""
    for moment in range(1, 34):
        cluster = started(workers=workers, save_every=2, seed=moment)

        def kill(cluster: Cluster = cluster) -> None:
            if victim == "ps" and cluster.server and not cluster.server.outcome:
                cluster.kill_server()
                cluster.start_server()
            elif victim != "ps":
                cluster.start_worker(victim)

        cluster.network.at(0.03 * moment, kill)
        assert_as_the_plain_loop(cluster, limit_s=20.0)


@pytest.mark.parametrize("stall_s", [1.0, 30.0])
def test_a_server_that_was_stopped_blames_nobody(stall_s: float) -> None:
    cluster = started(workers=2, steps=20)
    cluster.network.at(0.5, lambda: cluster.frozen.add("ps"))
    cluster.network.at(0.5 + stall_s, lambda: cluster.frozen.discard("ps"))
    assert_as_the_plain_loop(cluster, limit_s=60.0)
    events = [change.event for change in cluster.witness.changes]
    assert "lost" not in events
    assert ("replaced" in events) == (stall_s > 2.0), "workers dial anew when the server was silent for too long"


@pytest.mark.parametrize("seed", range(8))
def test_without_a_checkpoint_a_server_starts_a_new_run_and_takes_nothing_of_the_old_one(seed: int) -> None:
    cluster = stale_gradients(seed)
    assert_as_the_plain_loop(cluster)
    assert [record.version for record in cluster.witness.steps] == [1, 2, 3, 4]
    stale = [one for one in cluster.witness.refusals if one.contribution.session == 1]
    assert stale and {one.reason for one in stale} == {"older session"}
    assert {one.contribution.version for one in stale} == {one.open_version for one in stale} == {0}


# Gradients that are not finite


BAD = frozenset({(2, 1), (4, 0), (4, 3)})


@pytest.mark.parametrize("policy", ["skip_step", "skip_shard"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_is_not_finite_is_left_out_as_documented(policy: Any, workers: int) -> None:
    cluster = started(workers=workers, nonfinite=policy, bad=BAD, steps=8)
    assert_as_the_plain_loop(cluster)
    records = {record.from_version: record for record in cluster.witness.steps}
    assert {version: record.left_out for version, record in records.items() if record.left_out} == {2: (1,), 4: (0, 3)}
    assert [records[version].applied for version in (1, 2, 4)] == [True, policy == "skip_shard", policy == "skip_shard"]
    assert (records[2].examples, records[4].examples) == (3 * EXAMPLES, 2 * EXAMPLES)
    assert records[7].updates == (8 if policy == "skip_shard" else 6)
    assert any(note.startswith("step 2, w") and "shard 1: loss = nan; " in note for note in cluster.witness.notes)


def test_by_default_the_run_ends_with_the_weights_of_the_version_before() -> None:
    cluster = started(nonfinite="stop", bad=BAD)
    found = cluster.run()
    assert all(mine.tobytes() == other.tobytes() for mine, other in zip(found, reference(2, 4), strict=True))
    assert cluster.server and cluster.server.outcome
    outcome = cluster.server.outcome
    assert (outcome.status, outcome.exit_code) == ("failed", 1) and outcome.reason.endswith("shard 1: loss = nan")
    assert max(cluster.disk) == 2, "the last version that was good is saved"


def test_steps_that_are_skipped_in_a_row_end_the_run() -> None:
    cluster = started(nonfinite="skip_step", bad=frozenset((version, 0) for version in range(1, 9)), steps=20)
    found = cluster.run()
    assert all(mine.tobytes() == other.tobytes() for mine, other in zip(found, reference(1, 4), strict=True))
    assert cluster.server and cluster.server.outcome
    assert cluster.server.outcome.reason == "3 steps in a row were skipped, the last being step 3"


# Peers that send what is no use


def injected(cluster: Cluster, to: Any, *arrivals: Arrival) -> None:
    def arrive() -> None:
        inbox = cluster.network.server.inbox if to == "ps" else cluster.workers[to].transport.inbox  # type: ignore[union-attr]
        inbox.extend(arrivals)

    cluster.network.at(0.3, arrive)


def test_gradients_of_another_shape_or_with_another_checksum_are_refused() -> None:
    cluster = started(workers=2, steps=10)
    good = np.zeros(BUCKET_BYTES, np.uint8)

    def gradient(bucket: int, stamp: int | None = None) -> Contribution:
        version = cluster.server.machine.version if cluster.server else 0
        return Contribution(1, 1, version, bucket, 0, 4, 12, {}, checksum=stamp)

    injected(
        cluster, "ps",
        Arrival(b"", gradient(0), good[:-4]), Arrival(b"", gradient(0), np.zeros(BUCKET_BYTES + 64, np.uint8)),
        Arrival(b"", gradient(len(LAYOUT.buckets)), good), Arrival(b"", gradient(-1), good),
        Arrival(b"", gradient(0, stamp=checksum(good) ^ 1), good), Arrival(b"", Malformed("gradients", "garbage")),
    )  # fmt: skip
    assert_as_the_plain_loop(cluster)
    assert cluster.server and cluster.server.machine.refused["malformed"] == 6


def test_weights_of_another_shape_or_with_another_checksum_are_refused() -> None:
    cluster = started(workers=2, steps=10)
    good = np.zeros(BUCKET_BYTES, np.uint8)
    injected(
        cluster, "w0",
        Arrival(b"", Weights(1, 9, 0, 1, ()), good[:-4]), Arrival(b"", Weights(1, 9, 99, 1, ()), good),
        Arrival(b"", Weights(1, 9, 0, 1, (), checksum=5), good), Arrival(b"", Malformed("weights", "garbage")),
    )  # fmt: skip
    assert_as_the_plain_loop(cluster)
    assert sum(note.startswith("not understood, on weights") for note in cluster.witness.notes) == 4

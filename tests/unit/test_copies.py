"""What docs/architecture.md says of copies, counted in both loops over ZeroMQ: what travels, what memory is made."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import loops
import msgspec
import pytest
from cluster import LAYOUT
from loops import Cluster

from bus import layout, sockets

STEPS, FIRST, LAST = 60, 20, 40  # of which the steps between are counted: joining is over


@dataclass
class Counted:
    notices: list[int] = field(default_factory=list)  # bytes of each
    bulk: list[tuple[str, int]] = field(default_factory=list)  # kind of message and bytes of payload
    made: list[int] = field(default_factory=list)  # bytes of each new buffer


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    count = Counted()
    small, large, zeros = sockets._send_frames, sockets._send, layout.zeros

    def send_small(target: Any, frames: Any) -> bool:
        count.notices.append(sum(map(len, frames)))
        return small(target, frames)

    def send_large(target: Any, route: Any, message: Any, payload: Any) -> bool:
        if payload is not None:
            count.bulk.append((type(message).__name__, payload.nbytes))
        return large(target, route, message, payload)

    def make(size_bytes: int) -> Any:
        count.made.append(size_bytes)
        return zeros(size_bytes)

    monkeypatch.setattr(sockets, "_send_frames", send_small)
    monkeypatch.setattr(sockets, "_send", send_large)
    monkeypatch.setattr(layout, "zeros", make)
    return count


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def count_steps(cluster: Cluster, counted: Counted) -> int:
    """Two workers with a shard each; how many steps were counted."""
    # Without heartbeats: one that overtakes the weights it tells of makes a worker ask for a snapshot.
    cluster.serve(STEPS, shards=2, min_workers=2, balance=False, heartbeat_s=10.0, heartbeat_timeout_s=60.0)
    for name in ("w0", "w1"):
        cluster.start_worker(name)
    cluster.until_version(FIRST)
    for numbers in (counted.notices, counted.bulk, counted.made):
        numbers.clear()  # type: ignore[attr-defined]
    cluster.until_version(LAST)
    return cluster.server.machine.version - FIRST


def test_on_one_host_only_notices_travel_and_no_buffer_is_made(cluster: Cluster, counted: Counted) -> None:
    steps = count_steps(cluster, counted)
    assert counted.bulk == []
    assert counted.made == []
    assert max(counted.notices) < 300
    per_step = 3 * len(LAYOUT.buckets)  # for each bucket the weights, once, and two gradients
    assert len(counted.notices) >= per_step * (steps - 1)


def test_by_tcp_weights_are_sent_once_and_each_gradient_once(
    cluster: Cluster, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "SETTINGS", msgspec.structs.replace(loops.SETTINGS, shared_memory=False))
    steps = count_steps(cluster, counted)
    for kind, times in (("Weights", 1), ("Contribution", 2)):
        travelled = sum(size for name, size in counted.bulk if name == kind)
        assert travelled <= times * LAYOUT.size_bytes * (steps + 1), kind
        assert travelled >= times * LAYOUT.size_bytes * (steps - 1), kind
    # A worker makes a buffer for each gradient and one for the weights that it gets; the PS makes none.
    assert sum(counted.made) <= 4 * LAYOUT.size_bytes * (steps + 1)

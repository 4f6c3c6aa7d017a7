"""The report pipe: lines arrive whole, nothing blocks training, nothing raises into it."""

import contextlib
import json
import os
import threading
import time

import pytest

from gradbus.report import LIFELINE_FD, REPORT_FD, Event, Events, Reporter, lifeline


@pytest.fixture
def pipe():
    """A pipe; whatever the test did not close is closed."""
    ends = os.pipe()
    identities = [os.fstat(fd) for fd in ends]
    yield ends
    for fd, identity in zip(ends, identities, strict=True):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), identity):  # the number may belong to another file by now
                os.close(fd)


def fill(fd: int) -> None:
    os.set_blocking(fd, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(fd, b"x" * 4096)


def drain(fd: int) -> bytes:
    os.set_blocking(fd, False)
    parts = []
    try:
        while part := os.read(fd, 1 << 16):
            parts.append(part)
    except BlockingIOError:
        return b"".join(parts)
    return b"".join(parts)


def test_an_event_is_one_json_line(pipe):
    read, write = pipe
    reporter = Reporter(write)
    reporter.event("listening", control="tcp://127.0.0.1:1", session=7)
    reporter.progress(version=3, loss=float("nan"))
    first, second = drain(read).splitlines()
    assert json.loads(first) == {"event": "listening", "control": "tcp://127.0.0.1:1", "session": 7}
    assert json.loads(second) == {"event": "progress", "version": 3, "loss": None}


def test_progress_is_dropped_when_the_pipe_is_full(pipe):
    read, write = pipe
    fill(write)
    reporter = Reporter(write, wait_s=60)
    begun = time.monotonic()
    reporter.progress(version=1)
    assert time.monotonic() - begun < 1
    assert reporter.dropped == 1
    drain(read)
    reporter.progress(version=2)
    assert json.loads(drain(read))["version"] == 2


def test_another_event_waits_a_bounded_time(pipe):
    read, write = pipe
    fill(write)
    reporter = Reporter(write, wait_s=0.05)
    reporter.event("note", text="lost")
    assert reporter.dropped == 1
    drain(read)
    reporter.event("note", text="kept")
    assert json.loads(drain(read))["text"] == "kept"


def test_an_event_goes_out_once_the_launcher_reads_again(pipe):
    read, write = pipe
    fill(write)
    reporter = Reporter(write, wait_s=30)
    thread = threading.Thread(target=reporter.event, args=("finished",), kwargs={"status": "done"})
    thread.start()
    received = bytearray()
    os.set_blocking(read, True)
    while not received.endswith(b"}\n"):
        received += os.read(read, 4096)
    thread.join(10)
    assert json.loads(received.lstrip(b"x"))["status"] == "done"


def test_a_line_taken_in_part_is_finished_before_the_next(pipe):
    read, write = pipe
    reporter = Reporter(write, wait_s=0.05)
    long = "y" * (1 << 18)  # more than a pipe holds
    reporter.event("note", text=long)
    begin = drain(read)
    assert b"\n" not in begin
    reporter.progress(version=1)  # there is room for all of it only by and by
    rest = bytearray(begin)
    while rest.count(b"\n") < 2:
        rest += drain(read)
        reporter.progress(version=2)
    lines = rest.splitlines()
    assert json.loads(lines[0])["text"] == long
    assert json.loads(lines[1])["event"] == "progress"


def test_a_launcher_that_is_gone_is_not_an_error(pipe):
    read, write = pipe
    os.close(read)
    reporter = Reporter(write)
    reporter.event("note", text="anybody?")
    assert not reporter.connected
    reporter.event("note", text="again")
    reporter.progress(version=1)


def test_without_a_launcher_events_go_nowhere(monkeypatch):
    monkeypatch.delenv(REPORT_FD, raising=False)
    reporter = Reporter()
    assert not reporter.connected
    reporter.event("joined", member=1)


@pytest.mark.parametrize("value", ["seven", "", "987654"])
def test_a_wrong_descriptor_in_the_environment_is_ignored(monkeypatch, value):
    monkeypatch.setenv(REPORT_FD, value)
    monkeypatch.setenv(LIFELINE_FD, value)
    assert not Reporter().connected
    assert lifeline(lambda: None) is None


def test_grandchildren_do_not_hold_the_pipe(monkeypatch, pipe):
    _, write = pipe
    os.set_inheritable(write, True)
    monkeypatch.setenv(REPORT_FD, str(write))
    assert Reporter().connected
    assert not os.get_inheritable(write)


def test_the_lifeline_ends_with_the_launcher(monkeypatch, pipe):
    read, write = pipe
    monkeypatch.setenv(LIFELINE_FD, str(read))
    lost = threading.Event()
    thread = lifeline(lost.set)
    assert thread is not None and thread.daemon
    assert not lost.is_set()
    os.close(write)
    assert lost.wait(10)


def collect(events: Events, count: int) -> list[Event]:
    found: list[Event] = []
    deadline = time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline:
        found += events.wait(0.1)
    return found


def test_lines_of_several_children_are_put_together():
    events = Events()
    (read_a, a), (read_b, b) = os.pipe(), os.pipe()
    events.add("ps", read_a)
    events.add("w0", read_b)
    os.write(a, b'{"event": "note", "te')
    assert events.wait(0.1) == []
    os.write(b, b'{"event": "joined", "member": 4}\n')
    assert events.wait(5) == [Event("w0", "joined", {"member": 4})]
    os.write(a, b'xt": "hi"}\n{"event": "left"}\n')
    assert collect(events, 2) == [Event("ps", "note", {"text": "hi"}), Event("ps", "left")]
    os.close(b)
    assert collect(events, 1) == [Event("w0", "")]
    os.close(a)
    events.close()


@pytest.mark.parametrize("junk", [b"Traceback (most recent call last):", b"[1]", b'{"event": 3}', b"{}", b"\xff\xfe"])
def test_junk_becomes_a_note(junk):
    events = Events()
    read, write = os.pipe()
    events.add("w0", read)
    os.write(write, junk + b"\n" + b'{"event": "left"}\n')
    note, left = collect(events, 2)
    assert note.name == "note" and "unreadable" in note.fields["text"]
    assert left.name == "left"
    os.close(write)
    events.close()


def test_an_endless_line_does_not_fill_the_memory():
    events = Events(limit_bytes=1000)
    read, write = os.pipe()
    events.add("w0", read)
    for _ in range(50):
        os.write(write, b"z" * 4000)
        assert events.wait(5) == []
    assert sum(map(len, events._partial.values())) <= 1001
    os.write(write, b'\n{"event": "left"}\n')
    assert [event.name for event in collect(events, 2)] == ["note", "left"]
    os.close(write)
    events.close()


def test_a_wake_up_ends_the_wait():
    wake_read, wake_write = os.pipe()
    events = Events(wake_read)
    os.write(wake_write, b"\x02")
    begun = time.monotonic()
    assert events.wait(30) == []
    assert time.monotonic() - begun < 5
    os.close(wake_write)
    os.close(wake_read)
    events.close()


def test_what_a_dead_child_left_is_read():
    events = Events()
    read, write = os.pipe()
    events.add("ps", read)
    os.write(write, b'{"event": "finished", "status": "done"}\n')
    os.close(write)
    assert [event.name for event in events.drain("ps")] == ["finished"]
    assert events.drain("ps") == []
    events.close()

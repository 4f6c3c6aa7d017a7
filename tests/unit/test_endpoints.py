"""Addresses as people write them."""

import os
import socket
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bus.endpoints import Endpoint, advertised, bind_address, is_loopback, local, parse, port_holder, reachable, resolve
from bus.errors import EndpointError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:5555", "127.0.0.1", 5555),
        ("127.0.0.1:5555", "127.0.0.1", 5555),
        ("tcp://lab-3.example.org:65535", "lab-3.example.org", 65535),
        ("tcp://*:*", "*", None),
        ("tcp://127.0.0.1:*", "127.0.0.1", None),
        ("*:5555", "*", 5555),
        ("lab-3", "lab-3", 5555),
        ("tcp://lab-3", "lab-3", 5555),
        ("tcp://[::1]:7", "::1", 7),
        ("[fe80::1]:*", "fe80::1", None),
        ("[::1]", "::1", 5555),
    ],
)
def test_what_is_understood(text: str, host: str, port: int | None) -> None:
    assert parse(text, default_port=5555) == Endpoint(host, port)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the host is missing; expected tcp://HOST:PORT"),
        ("tcp://", "the host is missing"),
        (":5555", "the host is missing"),
        ("tcp://[]:5555", "the host is missing"),
        ("tcp://lab-3", "the port is missing; expected tcp://HOST:PORT"),
        ("tcp://lab-3:", "the port is missing"),
        ("ipc://", "expected tcp://HOST:PORT, or ipc://PATH on one machine"),
        ("http://lab-3:80", "expected tcp://HOST:PORT, or ipc://PATH on one machine"),
        ("tcp://lab-3:http", "found port 'http', expected a number from 1 to 65535"),
        ("tcp://lab-3:0", "found port '0'"),
        ("tcp://lab-3:65536", "found port '65536'"),
        ("tcp://lab-3:-1", "found port '-1'"),
        ("tcp://lab-3:5555/path", "found port '5555/path'"),
        ("tcp://lab-3:٣", "found port '٣'"),
        ("tcp://lab-3:" + "9" * 5000, "found port '9"),
        ("::1", r"an IPv6 address needs brackets, as in tcp://\[::1\]:5555"),
        ("tcp://[::1", r"expected tcp://\[IPV6\]:PORT"),
        ("tcp://[::1]5555", r"expected tcp://\[IPV6\]:PORT"),
    ],
)
def test_what_is_refused_is_said_with_the_address(text: str, said: str) -> None:
    with pytest.raises(EndpointError, match=said) as refused:
        parse(text)
    assert repr(text) in str(refused.value)


@given(st.text(max_size=30) | st.from_regex(r"(tcp://)?\[?[a-z:.*]{0,9}\]?:?[0-9*]{0,7}", fullmatch=True))
@example("tcp://[::1]:5555")
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        found = parse(text, default_port=5555)
    except EndpointError:
        return
    assert found.host and (found.port is None or 0 < found.port < 65536)


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:5555", "tcp://*:*", "tcp://[::1]:80", "tcp://lab-3:1"])
def test_an_endpoint_is_written_as_it_is_read(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("*", "tcp://*:5555"),
        ("0.0.0.0", "tcp://*:5555"),
        ("::", "tcp://[::]:5555"),
        ("127.0.0.1", "tcp://127.0.0.1:5555"),
        ("::1", "tcp://[::1]:5555"),
    ],
)
def test_what_is_handed_to_bind(host: str, address: str) -> None:
    assert bind_address(Endpoint(host, 5555), "bus.bind") == address


def test_a_name_is_resolved_before_it_is_bound() -> None:
    assert bind_address(Endpoint("localhost", None), "bus.bind") in ("tcp://127.0.0.1:*", "tcp://[::1]:*")


def test_ipv4_is_taken_where_a_name_has_both(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::7", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.7", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert resolve("lab-3", "bus.bind") == "10.0.0.7"


def test_a_name_that_nobody_knows_is_said_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(EndpointError, match=r"^bus\.bind: the name 'no\.such\.host' cannot be resolved .*; give an IP"):
        bind_address(Endpoint("no.such.host", None), "bus.bind")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("*", False),
     ("10.0.0.7", False), ("lab-3", False), ("::", False)],
)  # fmt: skip
def test_what_stays_on_this_machine(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("advertised", "dialled", "used"),
    [
        ("tcp://0.0.0.0:5556", "tcp://lab-3:5555", "tcp://lab-3:5556"),
        ("tcp://[::]:5557", "tcp://10.0.0.7:5555", "tcp://10.0.0.7:5557"),
        ("tcp://127.0.0.1:40001", "tcp://127.0.0.1:40000", "tcp://127.0.0.1:40001"),
        ("tcp://[::]:5557", "tcp://[fd00::7]:5555", "tcp://[fd00::7]:5557"),
    ],
)
def test_a_worker_uses_the_host_that_it_reached(advertised: str, dialled: str, used: str) -> None:
    assert reachable(advertised, dialled) == used


HOLD = "import socket; held = socket.create_server(('127.0.0.1', 0)); print(held.getsockname()[1], flush=True); input()"


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="only /proc tells who holds a port")
def test_the_holder_of_a_port_is_named() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout
        port = int(holder.stdout.readline())
        said = port_holder(port)
        holder.communicate("\n", timeout=10)
    assert said.startswith(f"process {holder.pid} (") and "socket.create_server" in said
    assert port_holder(port) == ""


def test_a_unix_socket_is_the_same_for_all_who_can_reach_it() -> None:
    endpoint = parse("ipc://@run-7", 5555)
    assert (endpoint.path, str(endpoint), bind_address(endpoint, "bus.bind")) == (
        "@run-7",
        "ipc://@run-7",
        "ipc://@run-7",
    )
    assert advertised("ipc://@run-7", "lab-3") == local("ipc://@run-7") == "ipc://@run-7"
    assert reachable("ipc://@run-7.weights", "ipc://@run-7") == "ipc://@run-7.weights"

"""Addresses: what may be bound, what is connected to, and who holds a port that is taken."""

import ipaddress
import os
import socket
from typing import NamedTuple

from bus.errors import EndpointError

WILDCARDS = ("*", "0.0.0.0", "::")
DEFAULT_PORT = 5555  # of the control socket; gradients and weights follow on the next two


class Endpoint(NamedTuple):
    """An address: TCP, where ``port`` is None if any free one will do, or a Unix socket of this machine, by its
    ``path`` (``@name``: one that is no file, on Linux)."""

    host: str
    port: int | None
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"ipc://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{'*' if self.port is None else self.port}"


def parse(text: str, default_port: int | None = None) -> Endpoint:
    """``tcp://host:port``, ``host:port``, ``host`` or ``[v6]:port``, where ``*`` as a port means any free one, or
    ``ipc://path``.

    Raises EndpointError naming what was found.
    """
    if text.startswith("ipc://") and text != "ipc://":
        return Endpoint("", None, text.removeprefix("ipc://"))
    rest = text.removeprefix("tcp://")
    if "://" in rest:
        raise EndpointError(f"address {text!r}: expected tcp://HOST:PORT, or ipc://PATH on one machine")
    if rest.startswith("["):
        host, closed, tail = rest[1:].partition("]")
        port_text = tail.removeprefix(":")
        if not closed or (tail and not tail.startswith(":")):
            raise EndpointError(f"address {text!r}: expected tcp://[IPV6]:PORT")
    elif rest.count(":") > 1:
        raise EndpointError(f"address {text!r}: an IPv6 address needs brackets, as in tcp://[::1]:{DEFAULT_PORT}")
    else:
        host, _, port_text = rest.partition(":")
    if not host or host.isdecimal():  # a number alone, which would be taken for an IP address
        raise EndpointError(f"address {text!r}: the host is missing; expected tcp://HOST:PORT")
    if port_text == "*":
        return Endpoint(host, None)
    if not port_text:
        if default_port is None:
            raise EndpointError(f"address {text!r}: the port is missing; expected tcp://HOST:PORT")
        return Endpoint(host, default_port)
    digits = port_text.isascii() and port_text.isdigit() and len(port_text) <= 5
    if not digits or not 0 < int(port_text) < 65536:
        raise EndpointError(f"address {text!r}: found port {port_text!r}, expected a number from 1 to 65535 or *")
    return Endpoint(host, int(port_text))


def bind_address(endpoint: Endpoint, key: str) -> str:
    """The address to hand to bind, which wants an IP address: names are resolved here. ``key`` is the setting to
    blame. Raises EndpointError."""
    if endpoint.path:
        return str(endpoint)
    if endpoint.host in WILDCARDS:
        return str(endpoint._replace(host="*" if endpoint.host == "0.0.0.0" else endpoint.host))
    return str(endpoint._replace(host=resolve(endpoint.host, key)))


def resolve(host: str, key: str) -> str:
    """The IP address of ``host``, IPv4 where it has both. Raises EndpointError naming ``key``."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EndpointError(f"{key}: the name {host!r} cannot be resolved ({error}); give an IP address") from None
    addresses = sorted({str(entry[4][0]) for entry in found}, key=lambda address: ":" in address)
    return addresses[0]


def is_loopback(host: str) -> bool:
    """Whether ``host``, a name or an IP address, is this machine talking to itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def advertised(bound: str, name: str | None) -> str:
    """``bound`` as others are to dial it: with ``name`` (``bus.advertise``) as its host, or this machine's own name
    where every address of it is bound."""
    endpoint = parse(bound)
    if endpoint.path:
        return bound
    if name is None and endpoint.host not in WILDCARDS:
        return bound
    return str(endpoint._replace(host=name or socket.gethostname()))


def local(bound: str) -> str:
    """``bound`` as processes of the same machine are to dial it."""
    endpoint = parse(bound)
    return str(endpoint._replace(host="127.0.0.1")) if endpoint.host in WILDCARDS else bound


def reachable(advertised: str, dialled: str) -> str:
    """``advertised``, an address as the PS sees itself, as a worker that reached the PS by ``dialled`` should use it:
    the port is the PS's, the host the one that is known to work."""
    if parse(advertised).path:
        return advertised
    return str(Endpoint(parse(dialled).host, parse(advertised).port))


def port_holder(port: int) -> str:
    """Who listens on ``port`` of this machine, in words, as far as /proc tells; empty if it does not."""
    inodes = {inode for table in ("/proc/net/tcp", "/proc/net/tcp6") for inode in _listeners(table, port)}
    return _owner(inodes) if inodes else ""


def _listeners(table: str, port: int) -> list[str]:
    try:
        with open(table) as rows:
            fields = [row.split() for row in rows][1:]
    except OSError:  # not Linux
        return []
    return [field[9] for field in fields if field[3] == "0A" and int(field[1].rsplit(":", 1)[1], 16) == port]


def _owner(inodes: set[str]) -> str:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
            with open(f"/proc/{pid}/cmdline", "rb") as command:
                words = command.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # gone meanwhile, or another user's
            continue
        if any(_link(f"/proc/{pid}/fd/{descriptor}") in wanted for descriptor in descriptors):
            return f"process {pid} ({words[:80]})"
    return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""

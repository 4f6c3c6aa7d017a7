"""The `bus` section of config.yaml: where and how peers talk, never what. No value here can change the weights."""

from typing import Annotated

import msgspec
from msgspec import Meta


class BusSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses, heartbeats and buffers of the bus.

    bind                 address the parameter server listens on; `*` as the port takes a free one; ipc://@name is a
                         Unix socket of this machine
    advertise            host that workers are told to connect to; null: the bound one
    heartbeat_s          seconds between two heartbeats, both ways
    heartbeat_timeout_s  silence after which a peer counts as gone; at least 3 heartbeats
    connect_timeout_s    how long a worker looks for the parameter server before it gives up
    bucket_bytes         leaves are grouped into messages of about this size
    checksum             a checksum over the data of each message
    shared_memory        workers on the host of the parameter server share memory with it, where that works
    io_threads           ZeroMQ's own I/O threads per process
    """

    bind: Annotated[
        str,
        Meta(
            pattern=r"^(tcp://[^\s/]+:(\*|[0-9]{1,5})|ipc://\S+)$",
            title="an address such as tcp://127.0.0.1:* or, on one machine, ipc://@name",
        ),
    ] = "tcp://127.0.0.1:*"
    advertise: Annotated[str, Meta(pattern=r"^[^\s/]+$", title="a host name or address")] | None = None
    heartbeat_s: Annotated[float, Meta(ge=0.01, le=3600)] = 1.0
    heartbeat_timeout_s: Annotated[float, Meta(ge=0.03, le=86400)] = 10.0
    connect_timeout_s: Annotated[float, Meta(ge=0.1, le=86400)] = 60.0
    bucket_bytes: Annotated[int, Meta(ge=4096, le=2**30, multiple_of=64)] = 4194304
    checksum: bool = False
    shared_memory: bool = True
    io_threads: Annotated[int, Meta(ge=1, le=64)] = 1

"""The vocabulary: one frozen Struct per message, header fields only. Bulk travels beside a message as its payload.

Who says what, and on which socket (docs/protocol.md has the frames):

control    worker -> PS   Hello, Ready, Fetch, Alive, Failure, Leave
           PS -> worker   Welcome, Weights (a snapshot), Serving, Refusal, Left
gradients  worker -> PS   Contribution
weights    PS -> all      Weights, Plan, Stop; Evaluate (to observers)

The first element of every header is the protocol version. Hello and Refusal keep their fields in every version, so
peers of different releases can tell each other why they part.
"""

from typing import ClassVar, Literal

import msgspec

PROTOCOL = 1

Node = tuple[int, int]  # shards low..high-1, see bus.tree


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One array of the model.

    ``trainable`` leaves get gradients; ``frozen`` ones (integers, booleans) travel unchanged; ``state`` is what a
    workload keeps beside its parameters, such as running statistics, and is averaged, not optimised.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Literal["trainable", "frozen", "state"]

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Memory of process ``pid`` that a peer on the same host may map: its descriptor ``fd``, the size of its data, and
    what it begins with (see bus.shm)."""

    pid: int
    fd: int
    size_bytes: int
    nonce: bytes


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """``member`` computes the shards ``low..high-1`` of the step a plan belongs to."""

    member: int
    low: int
    high: int


class Message(msgspec.Struct, frozen=True, array_like=True, tag=PROTOCOL, forbid_unknown_fields=True):
    """``kind`` names the message in its first frame, eight bytes wide, so that it can serve as a PUB/SUB topic."""

    kind: ClassVar[bytes]
    has_payload: ClassVar[bool] = False


class Hello(Message, frozen=True):
    """A worker asks to join. ``instance`` is drawn anew by each process, so a restart is told from a repeat."""

    kind = b"hello\0\0\0"
    name: str
    host: str
    pid: int
    instance: int
    versions: dict[str, str]


class Welcome(Message, frozen=True):
    """The whole experiment: a worker needs nothing but the PS's address.

    ``experiment`` is JSON; ``gradients`` and ``weights`` are the addresses of the other two sockets. Who can map both
    segments reads weights from ``published`` and writes gradients into ``lent``; whoever cannot, gets and sends them
    by those sockets.
    """

    kind = b"welcome\0"
    session: int
    member: int
    version: int
    experiment: str
    leaves: tuple[Leaf, ...]
    bucket_bytes: int
    gradients: str
    weights: str
    heartbeat_s: float
    heartbeat_timeout_s: float
    published: Segment | None = None
    lent: Segment | None = None


class Ready(Message, frozen=True):
    """The worker has compiled and can be planned from the next step on."""

    kind = b"ready\0\0\0"
    session: int
    member: int
    device: str


class Fetch(Message, frozen=True):
    """The worker lacks the current version (it holds ``version``, or -1) and asks for a snapshot of it."""

    kind = b"fetch\0\0\0"
    session: int
    member: int
    version: int


class Alive(Message, frozen=True):
    """A worker's heartbeat: the version it works on (-1: none yet) and, in words, what it is doing."""

    kind = b"alive\0\0\0"
    session: int
    member: int
    version: int
    doing: str


class Serving(Message, frozen=True):
    """The PS's heartbeat: the current version, the revision of its plan, and the shards of the open step that have not
    arrived."""

    kind = b"serving\0"
    session: int
    version: int
    revision: int
    missing: tuple[Node, ...]


class Failure(Message, frozen=True):
    """A worker cannot go on, for a reason that a restart would not cure."""

    kind = b"failure\0"
    session: int
    member: int
    reason: str


class Leave(Message, frozen=True):
    """A worker goes; its open shards are planned again."""

    kind = b"leave\0\0\0"
    session: int
    member: int


class Left(Message, frozen=True):
    """The PS has taken note of a Leave: nothing of this member is outstanding."""

    kind = b"left\0\0\0\0"
    session: int
    member: int


class Refusal(Message, frozen=True):
    """The PS will not have this peer. ``rejoin``: a new Hello would be welcome (the peer is of an older session)."""

    kind = b"refusal\0"
    rejoin: bool
    reason: str


class Contribution(Message, frozen=True):
    """One bucket of the summed gradient of shards ``low..high-1`` of step ``version``.

    ``sums`` holds, by name, the sum over examples of the loss and each metric. ``left_out`` are shards whose gradient
    was not finite: they count no examples and are zero in the payload; ``trouble`` says what was found, in words.
    ``waited_s`` is for how long the worker had nothing to compute before this version, ``computed_s`` how long it
    computed.
    """

    kind = b"gradient"
    has_payload = True
    session: int
    member: int
    version: int
    bucket: int
    low: int
    high: int
    examples: int
    sums: dict[str, float]
    left_out: tuple[int, ...] = ()
    trouble: str = ""
    waited_s: float = 0.0
    computed_s: float = 0.0
    checksum: int | None = None


class Weights(Message, frozen=True):
    """One bucket of version ``version``, with the plan of the step that it opens."""

    kind = b"weights\0"
    has_payload = True
    session: int
    version: int
    bucket: int
    revision: int
    plan: tuple[Assignment, ...]
    checksum: int | None = None


class Plan(Message, frozen=True):
    """The plan of an open step, revised. Higher revisions replace lower ones."""

    kind = b"plan\0\0\0\0"
    session: int
    version: int
    revision: int
    plan: tuple[Assignment, ...]


class Stop(Message, frozen=True):
    """The run is over at ``version``; members leave."""

    kind = b"stop\0\0\0\0"
    session: int
    version: int
    reason: str


class Evaluate(Message, frozen=True):
    """One bucket of the weights to evaluate at ``version``: the moving average where the experiment keeps one."""

    kind = b"evaluate"
    has_payload = True
    session: int
    version: int
    bucket: int
    checksum: int | None = None


class Malformed(msgspec.Struct, frozen=True):
    """Never on the wire: what a receiver is given in place of frames that are no message.

    ``other_protocol``: they are one, of another protocol version.
    """

    socket: str
    reason: str
    other_protocol: bool = False


class Subscribed(msgspec.Struct, frozen=True):
    """Never on the wire: the subscriptions of ``member`` have reached the publisher, so nothing published from now on
    is lost for want of them."""

    member: int


ALL: tuple[type[Message], ...] = (
    Hello, Welcome, Ready, Fetch, Alive, Serving, Failure, Leave, Left, Refusal, Contribution, Weights, Plan, Stop,
    Evaluate,
)  # fmt: skip

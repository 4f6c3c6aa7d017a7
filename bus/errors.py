"""What can go wrong on the bus, as a tree.

BusError
├── WireError       the peer sent something that is not a message; its fault, never believed
│   └── ProtocolError   it is a message, of another protocol version
├── LayoutError     two peers do not hold the same parameter tree
└── EndpointError   an address cannot be bound, reached or understood
"""


class BusError(Exception):
    """Any fault of the bus. The message is one line for a person: what was found, what was expected, what to do."""


class WireError(BusError):
    """Frames that are not a message of this protocol: wrong count, size, type, version or checksum."""


class ProtocolError(WireError):
    """A message of another protocol version: the peer is of another release, and can be told so."""


class LayoutError(BusError):
    """Parameter trees that differ between peers; names the first difference."""


class EndpointError(BusError):
    """An address that cannot be bound or reached; names the address and, where known, who holds it."""

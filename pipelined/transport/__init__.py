"""The transport contract, and what every transport shares."""

from pipelined.transport.base import (
    Capabilities,
    Endpoint,
    EndpointSpec,
    Event,
    Lane,
    MessageLink,
    Received,
    TensorLink,
    Transport,
)
from pipelined.transport.registry import installed, resolve
from pipelined.transport.rendezvous import FileRendezvous, MemoryRendezvous, Rendezvous
from pipelined.transport.topology import Coordinates, Topology
from pipelined.transport.transfer import Transfer

__all__ = [
    "Capabilities",
    "Coordinates",
    "Endpoint",
    "EndpointSpec",
    "Event",
    "FileRendezvous",
    "Lane",
    "MemoryRendezvous",
    "MessageLink",
    "Received",
    "Rendezvous",
    "TensorLink",
    "Topology",
    "Transfer",
    "Transport",
    "installed",
    "resolve",
]

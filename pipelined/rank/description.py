"""What a rank in a process of its own is started from. JSON; no pickles."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import msgspec

from pipelined.errors import ConfigError, UnknownSchemeError, nearest
from pipelined.rank.config import RankConfig
from pipelined.rank.links import LinkPlan
from pipelined.stage import ModelInfo

if TYPE_CHECKING:
    from pipelined.rank.planner import Planner
    from pipelined.stage import ModelFamily

__all__ = ["ModelPart", "PlannerRef", "RankDescription", "family", "make_planner"]

FAMILIES = "pipelined.models"


class ModelPart(msgspec.Struct, frozen=True):
    """A stage of a model: layers `[layers[0], layers[1])`."""

    info: ModelInfo
    layers: tuple[int, int]


class PlannerRef(msgspec.Struct, frozen=True):
    """A planner by name, since the rank knows only the protocol: `module:function`, called with `config` (JSON)."""

    factory: str
    config: str = "{}"


class RankDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a rank needs.

    Attributes:
        device: Kind of device, see `make_device`.
        threads: CPU threads of the stage's computations; None: torch's default.
        rendezvous: Directory in which peers find each other.
        part: The model part to build; None where the stage comes as an object.
        planner: For rank 0; None where it comes as an object, and for other ranks.
        trace_spans: Capacity of the trace's ring buffer.
        linger_s: A rank that loses its epoch keeps its stage and waits so long for the next; 0: it ends.
    """

    config: RankConfig
    links: LinkPlan
    rendezvous: str = ""
    epoch: int = 0
    secret: str = ""
    device: str = "cpu"
    threads: int | None = 1
    part: ModelPart | None = None
    planner: PlannerRef | None = None
    trace_spans: int = 65_536
    linger_s: float = 0.0

    @property
    def dtype(self) -> str:
        """What all ranks must agree on: that of the model's activations; "" for stages of one's own."""
        return self.part.info.dtype if self.part is not None else ""


def family(name: str) -> ModelFamily:
    """The model family registered under `name`.

    Raises:
        UnknownSchemeError: Names those that are known.
    """
    known = {point.name: point for point in entry_points(group=FAMILIES)}
    if name not in known:
        raise UnknownSchemeError(f"unknown model family {name!r}{nearest(name, known)}")
    made: ModelFamily = known[name].load()()
    return made


def make_planner(ref: PlannerRef) -> Planner:
    """Import and call the planner's factory.

    Raises:
        ConfigError: There is no such factory.
    """
    module, _, function = ref.factory.partition(":")
    try:
        planner: Planner = getattr(import_module(module), function)(ref.config)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"no planner {ref.factory!r}: {error}") from error
    return planner

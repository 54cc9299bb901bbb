"""What a pipeline would do: scenarios on the real runtime in virtual time, and published results replayed."""

from pipelined.planning.replay import Replayed, replay, replays
from pipelined.planning.scenario import Arrival, Chunking, Link, Published, Scenario, decode_scenario, read_scenario
from pipelined.planning.simulate import Percentiles, Served, Simulation, simulate

__all__ = [
    "Arrival",
    "Chunking",
    "Link",
    "Percentiles",
    "Published",
    "Replayed",
    "Scenario",
    "Served",
    "Simulation",
    "decode_scenario",
    "read_scenario",
    "replay",
    "replays",
    "simulate",
]

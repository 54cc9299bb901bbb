"""What a pipeline would do: scenarios in virtual time, layouts compared, chunks tuned, published results replayed."""

from pipelined.planning.layouts import Layout, layouts
from pipelined.planning.plan import Candidate, Estimate, Plan, make_plan
from pipelined.planning.plan_source import Subject, of_model, of_profile, of_scenario
from pipelined.planning.replay import Replayed, replay, replays
from pipelined.planning.scenario import Arrival, Chunking, Link, Published, Scenario, decode_scenario, read_scenario
from pipelined.planning.simulate import Percentiles, Served, Simulation, simulate
from pipelined.planning.tune import Setting, Trial, Tuned, Tuner
from pipelined.planning.tune_workload import Workload, read_workload

__all__ = [
    "Arrival",
    "Candidate",
    "Chunking",
    "Estimate",
    "Layout",
    "Link",
    "Percentiles",
    "Plan",
    "Published",
    "Replayed",
    "Scenario",
    "Served",
    "Setting",
    "Simulation",
    "Subject",
    "Trial",
    "Tuned",
    "Tuner",
    "Workload",
    "decode_scenario",
    "layouts",
    "make_plan",
    "of_model",
    "of_profile",
    "of_scenario",
    "read_scenario",
    "read_workload",
    "replay",
    "replays",
    "simulate",
]

"""Cost models of stages: how long a micro-batch takes, learnt from measured times. Pure."""

from pipelined.costs.arithmetic import added, explicit, scaled
from pipelined.costs.fitting import Fit, Sample, fit
from pipelined.costs.makespan import makespan
from pipelined.costs.nnls import nnls
from pipelined.costs.online import SHAPE, LiveCosts, OnlineFit
from pipelined.costs.pipeline import PipelineCost
from pipelined.costs.profile import (
    Fingerprint,
    Profile,
    StageProfile,
    decode_costs,
    decode_profile,
    encode_costs,
    encode_profile,
)
from pipelined.costs.stage import StageCost, Window
from pipelined.costs.work import MicroBatch

__all__ = [
    "SHAPE",
    "Fingerprint",
    "Fit",
    "LiveCosts",
    "MicroBatch",
    "OnlineFit",
    "PipelineCost",
    "Profile",
    "Sample",
    "StageCost",
    "StageProfile",
    "Window",
    "added",
    "decode_costs",
    "decode_profile",
    "encode_costs",
    "encode_profile",
    "explicit",
    "fit",
    "makespan",
    "nnls",
    "scaled",
]

"""The contracts of stages, model families and devices, and the devices."""

from pipelined.stage.base import LOGICAL_BYTES, LoadOptions, ModelFamily, ModelInfo, Payload, Stage, StageContext
from pipelined.stage.device import Device, Launch
from pipelined.stage.factory import DEVICES, make_device
from pipelined.stage.grammars import check_grammar, grammar_of, guidance

__all__ = [
    "DEVICES",
    "LOGICAL_BYTES",
    "Device",
    "Launch",
    "LoadOptions",
    "ModelFamily",
    "ModelInfo",
    "Payload",
    "Stage",
    "StageContext",
    "check_grammar",
    "grammar_of",
    "guidance",
    "make_device",
]

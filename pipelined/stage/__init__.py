"""The contracts of stages, model families and devices, and the devices."""

from pipelined.stage.base import LOGICAL_BYTES, LoadOptions, ModelFamily, ModelInfo, Payload, Stage, StageContext
from pipelined.stage.device import Device, Launch
from pipelined.stage.factory import DEVICES, make_device

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
    "make_device",
]

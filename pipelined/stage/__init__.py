"""The contracts of stages, model families and devices, and the devices."""

from pipelined.stage.base import LoadOptions, ModelFamily, ModelInfo, Payload, Stage, StageContext
from pipelined.stage.device import Device, Launch

__all__ = ["Device", "Launch", "LoadOptions", "ModelFamily", "ModelInfo", "Payload", "Stage", "StageContext"]

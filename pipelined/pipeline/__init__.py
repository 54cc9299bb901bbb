"""Pipelines of one's own, and the driver and worlds that every pipeline runs in."""

from pipelined.pipeline.custom import Pipeline
from pipelined.pipeline.driver import Driver
from pipelined.pipeline.fifo import FifoPlanner
from pipelined.pipeline.process_world import ProcessWorld
from pipelined.pipeline.worlds import TaskWorld, World, WorldNews

__all__ = ["Driver", "FifoPlanner", "Pipeline", "ProcessWorld", "TaskWorld", "World", "WorldNews"]

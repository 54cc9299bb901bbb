"""The scheduler of LLM pipelines: pure, plain and synchronous."""

from pipelined.scheduler.config import SchedulerConfig
from pipelined.scheduler.scheduler import Scheduler, from_json

__all__ = ["Scheduler", "SchedulerConfig", "from_json"]

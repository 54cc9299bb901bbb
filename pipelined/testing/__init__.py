"""Public kits: hold any transport or stage against its contract, in a program or a test of your own."""

from pipelined.testing.check import Check, CheckFailed, CheckResult
from pipelined.testing.kit import CHECKS, run_check, run_checks
from pipelined.testing.machine import link_machine
from pipelined.testing.payload_kit import check_payload_stage
from pipelined.testing.report import check_transport, list_transports, render_results, results_as_data
from pipelined.testing.stage_kit import STAGE_CHECKS, StageCheck, check_stage, run_stage_checks
from pipelined.testing.tools import ManualEvent, ScaledClock
from pipelined.testing.world import World

__all__ = [
    "CHECKS",
    "STAGE_CHECKS",
    "Check",
    "CheckFailed",
    "CheckResult",
    "ManualEvent",
    "ScaledClock",
    "StageCheck",
    "World",
    "check_payload_stage",
    "check_stage",
    "check_transport",
    "link_machine",
    "list_transports",
    "render_results",
    "results_as_data",
    "run_check",
    "run_checks",
    "run_stage_checks",
]

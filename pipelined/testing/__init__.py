"""Public kits: holds any transport against the contract, in a program or a test of your own."""

from pipelined.testing.check import Check, CheckFailed, CheckResult
from pipelined.testing.kit import CHECKS, run_check, run_checks
from pipelined.testing.report import check_transport, list_transports, render_results, results_as_data
from pipelined.testing.tools import ManualEvent, ScaledClock
from pipelined.testing.world import World

__all__ = [
    "CHECKS",
    "Check",
    "CheckFailed",
    "CheckResult",
    "ManualEvent",
    "ScaledClock",
    "World",
    "check_transport",
    "list_transports",
    "render_results",
    "results_as_data",
    "run_check",
    "run_checks",
]

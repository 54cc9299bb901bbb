"""Random workloads on random pipelines under random faults, in virtual time, on the real runtime, by seed."""

from pipelined.testing.fuzz.case import FAULTS, Case, draw
from pipelined.testing.fuzz.journal import Journal
from pipelined.testing.fuzz.play import play
from pipelined.testing.fuzz.runner import Found, Summary, fuzz, parse_faults, parse_seeds

__all__ = ["FAULTS", "Case", "Found", "Journal", "Summary", "draw", "fuzz", "parse_faults", "parse_seeds", "play"]

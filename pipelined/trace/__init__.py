"""What happened when on each rank, why a stage was idle, and pictures of both."""

from pipelined.trace.base import Span, Tracer
from pipelined.trace.chrome import read_chrome, write_chrome
from pipelined.trace.critical import CriticalPath, PathPiece, critical_path, path_text
from pipelined.trace.histogram import Histogram
from pipelined.trace.idle import BUSY, CAUSES, Segment, StageUse, attribute, segments
from pipelined.trace.picture import write_timeline
from pipelined.trace.table import stage_table
from pipelined.trace.timeline import RankTrace, Trace, Work, parse_work

__all__ = [
    "BUSY",
    "CAUSES",
    "CriticalPath",
    "Histogram",
    "PathPiece",
    "RankTrace",
    "Segment",
    "Span",
    "StageUse",
    "Trace",
    "Tracer",
    "Work",
    "attribute",
    "critical_path",
    "parse_work",
    "path_text",
    "read_chrome",
    "segments",
    "stage_table",
    "write_chrome",
    "write_timeline",
]

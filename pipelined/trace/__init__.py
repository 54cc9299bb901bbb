"""What happened when on each rank, why a stage was idle, and pictures of both."""

from pipelined.trace.base import Span, Tracer

__all__ = ["Span", "Tracer"]

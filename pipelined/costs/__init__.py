"""Cost models of stages: pure. Empty until chunk sizes are computed from measured costs."""

__all__: list[str] = []

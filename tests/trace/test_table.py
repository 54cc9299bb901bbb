from __future__ import annotations

import io

from rich.console import Console

from pipelined.trace import Trace, attribute, stage_table


def test_one_line_a_stage(busy_server: Trace) -> None:
    uses = attribute(busy_server)
    out = io.StringIO()
    Console(file=out, width=120).print(stage_table(uses))
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + len(uses)
    for line, use in zip(lines[1:], uses, strict=True):
        assert use.label in line
        assert f"{use.busy_s:.3f} s" in line
        assert use.main_cause.replace("_", " ") in line


def test_labels_are_not_markup() -> None:
    from pipelined.trace import StageUse

    out = io.StringIO()
    Console(file=out, width=80).print(stage_table([StageUse(0, "[red]x[/]", 0)]))
    assert "[red]x[/]" in out.getvalue()

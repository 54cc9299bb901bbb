"""Stages of the pipeline under attack, importable by its processes."""

from __future__ import annotations

from typing import Any


def add_one(x: dict[str, Any]) -> dict[str, Any]:
    return {"t": x["t"] + 1, "n": x["n"]}

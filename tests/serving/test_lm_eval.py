"""lm-eval over HTTP gives the scores that it gives on the same weights without a server.

Needs `pip install lm-eval tenacity` (half a gigabyte with what it wants). PIPELINED_LM_EVAL_MODEL names another model.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from processes import server_process

lm_eval = pytest.importorskip("lm_eval", reason="pip install lm-eval tenacity")

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

COLOURS = ["red", "green", "blue", "yellow"]
THINGS = ["grass", "the sky", "blood", "a lemon", "the sea", "a tomato", "a leaf", "the sun", "a frog", "a banana"]
ANSWERS = [1, 2, 0, 3, 2, 0, 1, 3, 1, 3]

TASK = {
    "task": "colours",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "train",
    "doc_to_text": "Question: which colour is {{thing}}?\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


def written(folder: Path) -> dict[str, Any]:
    data = folder / "colours.jsonl"
    draw = random.Random(0)
    rows = []
    for thing, label in zip(THINGS, ANSWERS, strict=True):
        order = draw.sample(range(4), 4)
        rows.append({"thing": thing, "choices": [COLOURS[at] for at in order], "label": order.index(label)})
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return {**TASK, "dataset_kwargs": {"data_files": str(data)}}


def scores(model: str, arguments: str, task: dict[str, Any]) -> tuple[dict[str, float], list[list[float]]]:
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[dict(task)], device="cpu", batch_size=2, bootstrap_iters=0
    )
    values = {name: value for name, value in found["results"]["colours"].items() if name.startswith("acc")}
    likely = [[pair[0] for pair in sample["filtered_resps"]] for sample in found["samples"]["colours"]]
    return values, likely


def test_scores_are_those_of_the_hf_backend(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    model = os.environ.get("PIPELINED_LM_EVAL_MODEL", tiny)
    task = written(tmp_path)
    here, here_likely = scores("hf", f"pretrained={model},dtype=float32", task)
    with server_process(model, "--pp", "2", "--served-model-name", "m") as server:
        arguments = f"model=m,base_url={server.url}/v1/completions,tokenizer={model},num_concurrent=2"
        there, there_likely = scores("local-completions", arguments, task)
    assert there == pytest.approx(here)
    for ours, theirs in zip(there_likely, here_likely, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)

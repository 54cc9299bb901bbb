"""Our models keep the contract of stages; stages that break it are told which rule they break."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import broken_stages as broken
import pytest
import torch

from pipelined.errors import ModelError
from pipelined.models.toy import reference_tokens
from pipelined.stage import LoadOptions
from pipelined.testing import STAGE_CHECKS, check_stage, run_stage_checks

TOY = "toy://?layers=6&vocab=97"

BROKEN = [
    (broken.CutMatters, "S1", "any_cut_gives_the_same"),
    (broken.BatchMatters, "S2", "any_batch_gives_the_same"),
    (broken.ChunksMatter, "S3", "any_chunks_give_the_same"),
    (broken.SharesState, "S4", "released_pages_carry_nothing_over"),
    (broken.DirtyPages, "S4", "released_pages_carry_nothing_over"),
    (broken.MixesPrefix, "S4", "a_cached_prefix_gives_the_same"),
    (broken.ForgetsGenerated, "S4", "a_resumed_request_goes_on_the_same"),
    (broken.ReadsLive, "S5", "preparing_ahead_changes_nothing"),
    (broken.CountsForwards, "S5", "a_void_step_hurts_nobody_else"),
    (broken.NeverForgets, "S6", "reset_forgets"),
    (broken.HoldsOn, "S7", "nothing_is_held_after_release"),
    (broken.DeafToNan, "S8", "a_non_finite_input_fails_its_sequence_alone"),
    (broken.FailsAll, "S8", "a_non_finite_input_fails_its_sequence_alone"),
    (broken.WritesInput, "S9", "inputs_and_outputs_are_left_alone"),
    (broken.OneBuffer, "S9", "inputs_and_outputs_are_left_alone"),
    (broken.CannotTravel, "S9", "payloads_can_travel"),
]


def outcomes(model: Any, ref: str | None = None, **settings: Any) -> dict[str, tuple[str, str]]:
    results = run_stage_checks(model, ref, **settings)
    return {result.name: (result.outcome, result.reason) for result in results}


def truth(prompt: Any, new_tokens: int, sampling: Any) -> list[int]:
    return reference_tokens(TOY, prompt, new_tokens, ignore_eos=True)


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_the_toy_conforms(page_size: int) -> None:
    options = LoadOptions(page_size=page_size, kv_cache_tokens=64 * page_size)
    found = outcomes(TOY, options=options, reference=truth, quick=True)
    unfit = {"a_non_finite_input_fails_its_sequence_alone"}  # integers flow
    assert {name for name, (outcome, _) in found.items() if outcome == "skip"} == unfit
    assert {name: reason for name, (outcome, reason) in found.items() if outcome == "fail"} == {}


def test_a_toy_of_floats_conforms_in_all() -> None:
    found = outcomes(broken.family(broken.FloatToy), TOY, reference=truth)
    assert {name: told for name, told in found.items() if told[0] != "pass"} == {}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=80,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_llama_conforms(llama: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama).eval()

    def generated(prompt: Any, new_tokens: int, sampling: Any) -> list[int] | None:
        if sampling.temperature or sampling.repetition_penalty != 1:
            return None
        tokens = torch.tensor([list(prompt)])
        with torch.inference_mode():
            for _ in range(new_tokens):
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
        return tokens[0, len(prompt) :].tolist()

    found = outcomes(str(llama), reference=generated, quick=True)
    assert {name: told for name, told in found.items() if told[0] != "pass"} == {}


@pytest.mark.parametrize(
    ("stage", "rule", "check"), BROKEN, ids=[f"{entry[0].__name__}-{entry[2]}" for entry in BROKEN]
)
def test_the_kit_fails_it_on_that_rule(stage: Any, rule: str, check: str) -> None:
    ((outcome, reason),) = outcomes(broken.family(stage), TOY, quick=True, only=[check]).values()
    assert outcome == "fail", reason
    assert reason.startswith(f"{rule}: ")
    assert "raised" not in reason or stage in (broken.NeverForgets, broken.CannotTravel), reason


def test_a_wrong_reference_is_told() -> None:
    found = outcomes(TOY, quick=True, only=["S1"], reference=lambda prompt, n, sampling: [0] * n)
    assert found["the_reference_agrees"][0] == "fail"
    assert found["any_cut_gives_the_same"][0] == "pass"


def test_every_check_is_shown_to_bite() -> None:
    shown = {check for _, _, check in BROKEN} | {"the_reference_agrees"}
    assert shown == {check.name for check in STAGE_CHECKS}


def test_whatever_a_stage_raises_fails_the_check() -> None:
    ((outcome, reason),) = outcomes(broken.family(broken.Raises), TOY, only=["S7"]).values()
    assert (outcome, "FileNotFoundError: weights.bin" in reason) == ("fail", True)


def test_a_stage_that_hangs_fails_the_check() -> None:
    ((outcome, reason),) = outcomes(broken.family(broken.Hangs), TOY, only=["S7"], deadline_s=0.5).values()
    assert outcome == "fail"
    assert "hung" in reason


def test_an_uncut_model_is_checked_without_cuts() -> None:
    found = outcomes("toy://?layers=1", quick=True)
    skipped = {name for name, (outcome, _) in found.items() if outcome == "skip"}
    assert {"any_cut_gives_the_same", "payloads_can_travel"} <= skipped
    assert not {name for name, (outcome, _) in found.items() if outcome == "fail"}


def test_as_data_and_unknown_models() -> None:
    data = check_stage(TOY, quick=True, only=["S7"])
    assert (data["model"], data["passed"], data["failed"], data["skipped"]) == (TOY, 1, 0, 0)
    assert json.loads(json.dumps(data)) == data
    with pytest.raises(ModelError):
        run_stage_checks("toy://?nothing=1")


@pytest.mark.slow
def test_on_the_command_line() -> None:
    command = [sys.executable, "-m", "pipelined", "stages"]
    done = subprocess.run([*command, "check", TOY, "--quick", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["failed"] == 0
    listed = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert {"toy", "hf"} <= {row["family"] for row in json.loads(listed.stdout)}

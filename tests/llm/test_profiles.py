"""Profiles are for the set-up that they were made on, and for no other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from pipelined.cli.main import main
from pipelined.costs import Fingerprint, Profile, Sample, StageCost, StageProfile, decode_costs, encode_profile, fit
from pipelined.errors import ConfigError
from pipelined.llm import EngineConfig, inspect_model
from pipelined.llm.partition import partition_layers
from pipelined.llm.profiles import fingerprint, known_costs, read_profile

CONFIG = EngineConfig(model="toy://", pp_size=2, workers="task", chunking="balanced", threads_per_rank=1)


def mark(config: EngineConfig = CONFIG) -> Fingerprint:
    info = inspect_model(config)
    return fingerprint(config, info, partition_layers(info, config.pp_size, config.layer_partition))


def file(folder: Path, fingerprint: Fingerprint) -> str:
    cost = StageCost(1e-8, 1e-5, 0.01)
    samples = [Sample.of(0, size, cost.c + cost.chunk_s(0, size)) for size in (64, 128, 256, 512, 1024)]
    stages = [StageProfile.of(samples, fit(samples))] * len(fingerprint.layers)
    path = folder / "profile.json"
    path.write_bytes(encode_profile(Profile.of(fingerprint, stages)))
    return str(path)


def known(config: EngineConfig) -> str:
    info = inspect_model(config)
    return known_costs(config, info, partition_layers(info, config.pp_size, config.layer_partition))


def test_a_profile_of_this_set_up_is_used(tmp_path: Path) -> None:
    assert known(CONFIG) == ""
    assert known(dataclasses.replace(CONFIG, stage_costs="given")) == "given"
    costs = decode_costs(known(dataclasses.replace(CONFIG, profile=file(tmp_path, mark()))))
    assert [stage.b for stage in costs.stages] == pytest.approx([1e-5, 1e-5])
    with pytest.raises(ConfigError, match="both a profile and stage_costs"):
        dataclasses.replace(CONFIG, profile="here", stage_costs="there")


@pytest.mark.may_block(reason="the command reads the file before anything is started")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"machine": "another, 4 cores"}, "machine 'another, 4 cores', not '"),
        ({"threads": 7}, "threads 7, not 1"),
        ({"dtype": "float8"}, "dtype 'float8', not"),
        ({"digest": "other"}, "other weights or configuration of model 'toy://'"),
        ({"digest": "other", "model": "bloom"}, "model 'bloom', not 'toy://'"),
        ({"layers": (1, 1)}, r"layers (1, 1), not"),
        ({"layers": (7,)}, r"layers (7,), not"),
    ],
)
def test_one_of_another_set_up_is_refused(
    changes: dict[str, object], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(tmp_path, msgspec.structs.replace(mark(), **changes))
    options = ["--pp-size", "2", "--workers", "task", "--threads-per-rank", "1", "--chunking", "balanced"]
    assert main(["generate", "toy://", *options, "--prompt-tokens", "1,2,3", "--profile", path]) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert f"{path} is of another set-up" in said
    assert text in said


def test_a_model_is_known_by_its_weights_whatever_its_name() -> None:
    here = mark()
    assert here.digest
    assert not msgspec.structs.replace(here, model="elsewhere").differences(here)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b"[1, 2", "is not a profile"),
        (b'{"version": 1, "fingerprint": 3, "stages": []}', "$.fingerprint"),
        (b'{"version": 99}', "version 99"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(content: bytes | None, text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    assert text in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_on_a_cpu_threads_and_cores_count() -> None:
    assert mark().threads == 1
    assert mark(dataclasses.replace(CONFIG, threads_per_rank=2)) != mark()
    assert "cores" in mark().machine

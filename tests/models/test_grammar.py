from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
import torch

from pipelined.errors import InvalidRequestError
from pipelined.messages import SamplingParams
from pipelined.models.grammar import Constraints
from pipelined.models.sampler import SampleRequest, outcomes, sample
from pipelined.models.toy import ToyFamily
from pipelined.stage import LoadOptions, ModelInfo, check_grammar

pytest.importorskip("llguidance")
tokenizers = pytest.importorskip("tokenizers")

VOCAB = 264
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(folder)
    return described(str(folder))


def described(tokenizer: str) -> ModelInfo:
    toy = ToyFamily().inspect("toy://?layers=1", LoadOptions())
    return msgspec.structs.replace(toy, tokenizer=tokenizer, vocab_size=VOCAB, eos_token_ids=(256,))


def text_of(info: ModelInfo, tokens: list[int]) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(info.tokenizer).decode(tokens, skip_special_tokens=True))


def generated(info: ModelInfo, params: SamplingParams, seed: int, fresh_every: int = 10_000) -> list[int]:
    """Tokens of random logits under a constraint, whose matcher is forgotten now and then."""
    noise = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    constraints = Constraints(info)
    for number in range(400):
        if number % fresh_every == fresh_every - 1:
            constraints.keep(())
        constraint = constraints.of(1, params)
        request = SampleRequest(params, 0, len(tokens), len(tokens), output_ids=tuple(tokens), constraint=constraint)
        output = sample(torch.randn(1, VOCAB, generator=noise), [request])
        tokens.append(int(output["tokens"][0]))
        if tokens[-1] == 256:
            return tokens
    raise AssertionError(text_of(info, tokens))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_logits_make_json_that_follows_the_schema(info: ModelInfo, seed: int, temperature: float) -> None:
    params = SamplingParams(json_schema=SCHEMA, temperature=temperature, seed=seed)
    found = json.loads(text_of(info, generated(info, params, seed)))
    assert set(found) == {"name", "age"}
    assert isinstance(found["age"], int)
    assert len(found["name"]) <= 8


def test_a_pattern_is_matched_whole(info: ModelInfo) -> None:
    params = SamplingParams(regex=r"[a-c]{3}-\d{2}", temperature=0)
    assert re.fullmatch(r"[a-c]{3}-\d{2}", text_of(info, generated(info, params, 3)))


def test_a_matcher_made_anew_changes_nothing(info: ModelInfo) -> None:
    params = SamplingParams(json_schema=SCHEMA, temperature=1, seed=4)
    assert generated(info, params, 4) == generated(info, params, 4, fresh_every=3)


def test_where_the_grammar_ends_min_tokens_gives_way(info: ModelInfo) -> None:
    params = SamplingParams(regex="ab", temperature=0)
    constraint = Constraints(info).of(1, params)
    request = SampleRequest(params, 0, 2, 2, banned=(256,), output_ids=tuple(tokens_of("ab")), constraint=constraint)
    assert int(sample(torch.zeros(1, VOCAB), [request])["tokens"][0]) == 256


def tokens_of(text: str) -> list[int]:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index(letter) for letter in text]


def test_output_that_left_its_grammar_fails_alone(info: ModelInfo) -> None:
    params = SamplingParams(regex="ab", temperature=0)
    constraint = Constraints(info).of(1, params)
    request = SampleRequest(params, 0, 1, 1, output_ids=tuple(tokens_of("x")), constraint=constraint)
    other = SampleRequest(SamplingParams(temperature=0), 0, 1, 1)
    output = sample(torch.zeros(2, VOCAB), [request, other])
    failed, fine = outcomes([1, 2], [request, other], output)
    assert "left its grammar" in failed.error.message  # type: ignore[union-attr]
    assert fine.token == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"json_schema": "{"}, "no JSON object"),
        ({"json_schema": "[]"}, "no JSON object"),
        ({"json_schema": '{"type": "objec"}'}, "Invalid type"),
        ({"regex": "("}, "unclosed"),
        ({"regex": "a", "json_schema": "{}"}, "not both"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_followed_is_refused(params: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        sampling = SamplingParams(**params)
        sampling.check()
        check_grammar(sampling)


def test_without_constraints_nothing_is_held(info: ModelInfo) -> None:
    constraints = Constraints(info)
    assert constraints.of(1, SamplingParams()) is None
    one = constraints.of(2, SamplingParams(regex="a"))
    assert constraints.of(2, SamplingParams(regex="a")) is one
    constraints.keep([3])
    assert constraints.of(2, SamplingParams(regex="a")) is not one

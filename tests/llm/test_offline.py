"""The engine for scripts."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest
from llm_tools import TOY, greedy, right

from pipelined.errors import ConfigError, EngineClosedError, InvalidRequestError, NonFiniteError, PipelinedError
from pipelined.llm import LLM
from pipelined.messages import SamplingParams


def opened(model: str = TOY, **settings: Any) -> LLM:
    return LLM(model, **({"workers": "task", "page_size": 4, "chunked_prefill_size": 32} | settings))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pipelined")]


def test_prompts_with_params_each() -> None:
    prompts = [[n] * (n + 1) for n in range(20)]
    params = [greedy(n + 1) for n in range(20)]
    with opened(pp_size=3) as llm:
        outputs = llm.generate(prompts, params)
        assert [output.prompt_token_ids for output in outputs] == prompts
        for n, output in enumerate(outputs):
            right(TOY, prompts[n], output.outputs[0].token_ids, n + 1)
        (one,) = llm.generate([5, 6, 7], greedy(3))
        right(TOY, [5, 6, 7], one.outputs[0].token_ids, 3)
        assert llm.generate([], greedy(3)) == []
        assert sorted(llm.stats()) == [0, 1, 2]
    assert not threads()


def test_nothing_is_started_if_one_prompt_is_bad() -> None:
    with opened() as llm:
        for prompts, params, match in (
            ([[1], []], None, "empty"),
            ([[1], [2]], [greedy(1)], "1 sampling params for 2 prompts"),
            ([[1], [2]], [greedy(1), SamplingParams(top_p=2)], "top_p"),
        ):
            with pytest.raises(InvalidRequestError, match=match):
                llm.generate(prompts, params)
        assert llm.stats()[0]["steps_applied"] == 0


def test_one_that_fails_is_raised_after_the_others_have_ended() -> None:
    model = TOY + "&fail_seq_token=13&fail_layer=2"
    with opened(model, pp_size=2) as llm:
        with pytest.raises(NonFiniteError):
            llm.generate([[1], [13], [2]], greedy(30))
        (one,) = llm.generate([[1]], greedy(3))
        right(model, [1], one.outputs[0].token_ids, 3)


def test_closing() -> None:
    llm = opened()
    llm.close()
    llm.close()
    assert not threads()
    with pytest.raises(EngineClosedError):
        llm.generate([1], greedy(1))
    with pytest.raises(PipelinedError):
        llm.stats()
    with llm:
        pass


def test_forgetting_it_closes_it() -> None:
    llm = opened()
    llm.generate([1], greedy(1))
    del llm
    gc.collect()
    assert not threads()


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'pp_sise'; did you mean 'pp_size'"):
        LLM(TOY, pp_sise=2)
    assert not threads()


def test_ranks_that_cannot_start_leave_nothing() -> None:
    with pytest.raises(PipelinedError):
        opened(TOY.replace("kv=65536", "kv=2"))
    assert not threads()


def test_called_from_several_threads() -> None:
    with opened(pp_size=2) as llm:
        results: dict[int, Any] = {}

        def ask(n: int) -> None:
            results[n] = llm.generate([[n] * 9], greedy(8))

        many = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in many:
            thread.start()
        for thread in many:
            thread.join()
        for n, (output,) in results.items():
            right(TOY, [n] * 9, output.outputs[0].token_ids, 8)


SCRIPT = """
import sys
from pipelined.llm import LLM
from pipelined.messages import SamplingParams

if __name__ == "__main__":
    print("starting", flush=True)
    llm = LLM({model!r}, pp_size=2)
    print("started", flush=True)
    llm.generate([[1, 2]] * 8, SamplingParams(max_tokens=10**6, temperature=0))
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "started"])
def test_ctrl_c(when: str, tmp_path: Any) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        SCRIPT.format(model=TOY.replace("context=2048", "context=4000000").replace("kv=65536", "kv=4000000"))
    )
    script = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert script.stdout is not None
        while script.stdout.readline().strip() != when:
            pass
        time.sleep(1.0)
        pids = [child.pid for child in psutil.Process(script.pid).children(recursive=True)]
        script.send_signal(signal.SIGINT)
        _, err = script.communicate(timeout=20)
        assert "KeyboardInterrupt" in err
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
    finally:
        script.kill()
        script.communicate()


@pytest.mark.slow
def test_in_processes() -> None:
    with LLM(TOY, pp_size=2, page_size=4, chunked_prefill_size=32) as llm:
        prompts = [[n] * 50 for n in range(10)]
        for prompt, output in zip(prompts, llm.generate(prompts, greedy(12)), strict=True):
            right(TOY, prompt, output.outputs[0].token_ids, 12)
        assert len({rank["digest"] for rank in llm.stats().values()}) == 1

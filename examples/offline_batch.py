"""Completes several prompts at once on a model split over two ranks.

Run it: python examples/offline_batch.py [MODEL]
"""

from __future__ import annotations

import sys

from pipelined import LLM, SamplingParams

PROMPTS = ["The capital of France is", "One, two, three, four,", "Water boils at"]


def main(model: str = "smollm2") -> list[str]:
    with LLM(model, pp_size=2) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0.0))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"{prompt}{output.outputs[0].text!r}")
    return [output.outputs[0].text for output in outputs]


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The checks that hold the stages of a model against their contract. Each raises `CheckFailed`, or returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipelined.testing.check import SkipCheck
from pipelined.testing.stage_script import mixed

if TYPE_CHECKING:
    from pipelined.stage import Payload
    from pipelined.testing.stage_chain import StageChain
    from pipelined.testing.stage_script import Planned, Script
    from pipelined.testing.stage_world import StageWorld

__all__ = [
    "check_a_cached_prefix_gives_the_same",
    "check_a_non_finite_input_fails_its_sequence_alone",
    "check_a_resumed_request_goes_on_the_same",
    "check_a_void_step_hurts_nobody_else",
    "check_any_batch_gives_the_same",
    "check_any_chunks_give_the_same",
    "check_any_cut_gives_the_same",
    "check_inputs_and_outputs_are_left_alone",
    "check_nothing_is_held_after_release",
    "check_payloads_can_travel",
    "check_preparing_ahead_changes_nothing",
    "check_released_pages_carry_nothing_over",
    "check_reset_forgets",
    "check_the_reference_agrees",
]

_BIG = 1 << 30


def check_the_reference_agrees(world: StageWorld) -> None:
    """Uncut and alone, the tokens are those of the reference that was given."""
    if world.reference is None:
        raise SkipCheck("no reference was given")
    for asked, answer in zip(world.requests, world.truth, strict=True):
        tokens = world.reference(asked.prompt, asked.new_tokens, asked.sampling)
        if tokens is not None and list(tokens) != answer.tokens:
            world.fail(f"request {asked.name!r} is answered with {answer.tokens}", f"{list(tokens)}, by the reference")


def check_any_cut_gives_the_same(world: StageWorld) -> None:
    """One to four stages, cut where it is legal: the tokens of the uncut model."""
    if not world.info.cuts:
        raise SkipCheck("the model declares no legal cut")
    for edges in world.cuts():
        with world.chain(edges) as chain:
            script = world.script(chain)
            for request in range(len(world.requests)):
                chain.run(script.alone(request, [_BIG]), world.judge(f"cut at {edges[1:-1]}"))


def check_any_chunks_give_the_same(world: StageWorld) -> None:
    """A prompt in chunks of any sizes: one by one, a page less or more, at random."""
    page = world.page_size
    sizes = [[1], [page - 1], [page], [page + 1], [1, _BIG], [3, 1, page, 2, _BIG]]
    with world.chain(world.cut()) as chain:
        script = world.script(chain)
        for chunks in sizes:
            for request in range(len(world.requests)):
                chain.run(script.alone(request, [max(1, size) for size in chunks]), world.judge(f"chunks of {chunks}"))


def check_any_batch_gives_the_same(world: StageWorld) -> None:
    """Requests in random batches, in any order and any chunks, with pages from anywhere: each as if it were alone."""
    for seed in range(3 if world.quick else 20):
        with world.chain(world.cut()) as chain:
            script = world.script(chain, seed)
            order = script.rng.sample(range(len(world.requests)), len(world.requests))
            chain.run(mixed(script, order), world.judge(f"random batches, seed {seed}"))


def check_released_pages_carry_nothing_over(world: StageWorld) -> None:
    """Requests on pages that others have filled and released, and alone between others: the same tokens."""
    everyone = range(len(world.requests))
    with world.chain(world.cut()) as chain:
        script = world.script(chain)
        for first in (*everyone, *reversed(everyone)):
            for request in (first, (first + 1) % len(everyone), first):
                chain.run(script.alone(request, [_BIG]), world.judge("on released pages"))


def check_a_cached_prefix_gives_the_same(world: StageWorld) -> None:
    """A prefix whose KV another sequence has left in its pages need not be run again, by two readers at once."""
    page = world.page_size
    longest = max(range(len(world.requests)), key=lambda request: len(world.requests[request].prompt))
    whole = (len(world.requests[longest].prompt) - 1) // page
    if not whole:
        raise SkipCheck(f"no prompt is longer than a page of {page} tokens")
    with world.chain(world.cut()) as chain:
        script = world.script(chain)
        steps = []
        owner = script.admit(longest)
        while not script.running[owner].over:
            script.advance(owner, _BIG)
            steps.append(script.step())
        held = script.running[owner].pages
        readers = [script.admit(longest, prefix=held[:pages]) for pages in {1, whole}]
        script.release(owner)
        while not all(script.running[reader].over for reader in readers):
            for reader in readers:
                if not script.running[reader].over:
                    script.advance(reader, 3)
            steps.append(script.step())
        chain.run(steps, world.judge(f"with {whole} pages of its prefix cached"))


def check_a_resumed_request_goes_on_the_same(world: StageWorld) -> None:
    """A request that was released in the middle and is run again with what it had generated goes on as before."""
    with world.chain(world.cut()) as chain:
        script = world.script(chain)
        for request, asked in enumerate(world.requests):
            for generated in range(1, asked.new_tokens):
                chain.run(
                    script.alone(request, [world.page_size - 1 or 1], generated=generated),
                    world.judge(f"resumed with {generated} new tokens"),
                )


def check_preparing_ahead_changes_nothing(world: StageWorld) -> None:
    """Steps prepared 1, 3, or all ahead of their launch: batches refer to nothing that a later `prepare` changes."""
    for ahead in (1, 3, _BIG):
        with world.chain(world.cut()) as chain:
            script = world.script(chain, seed=ahead % 7)
            steps = mixed(script, range(len(world.requests)))
            chain.run(steps, world.judge(f"prepared {'all' if ahead == _BIG else ahead} ahead"), ahead=ahead)


def check_a_void_step_hurts_nobody_else(world: StageWorld) -> None:
    """A step that is prepared and never launched: its sequences are released, all others are unaffected."""
    with world.chain(world.cut()) as chain:
        script = world.script(chain)
        longest = len(world.requests) - 1
        bystander = script.admit(longest)
        script.advance(bystander, 2)
        steps = [script.step()]
        victims = [script.admit(request) for request in range(2)]
        for victim in victims:
            script.advance(victim, 3)
        steps.append(script.step())
        for victim in victims:
            script.release(victim)
        fresh = script.admit(1)
        while not script.running[bystander].over or not script.running[fresh].over:
            for seq in (bystander, fresh):
                if not script.running[seq].over:
                    script.advance(seq, 5)
            steps.append(script.step())
        chain.run(steps, world.judge("after a void step"), void=frozenset({1}))


def check_reset_forgets(world: StageWorld) -> None:
    """After `reset` in the middle of work nothing is held, and the same sequence numbers begin anew."""
    with world.chain(world.cut()) as chain:
        last = len(world.requests) - 1
        script = world.script(chain)
        steps = mixed(script, range(len(world.requests)))
        half = steps[: len(steps) // 2]
        chain.run(half, world.judge("before a reset"))
        script = world.script(chain, seed=1)
        chain.reset()
        world.expect(not chain.held(), f"after reset() {chain.held()} are held", "nothing")
        order = [last - request for request in range(last + 1)]
        chain.run(mixed(script, order), world.judge("after reset()"))


def check_nothing_is_held_after_release(world: StageWorld) -> None:
    """Once all sequences are released, `integrity` counts nothing, at every stage."""
    with world.chain(world.cut()) as chain:
        script = world.script(chain)
        for round_ in range(3):
            chain.run(mixed(script, range(len(world.requests))), world.judge(f"round {round_}"))
            world.expect(not chain.held(), f"{chain.held()} are held with all sequences released", "nothing")


def check_inputs_and_outputs_are_left_alone(world: StageWorld) -> None:
    """A stage writes neither to what it received nor to what it gave before, which may still be leaving."""
    with world.chain(world.cut()) as chain:
        chain.run(mixed(world.script(chain), range(len(world.requests))), lambda planned, outcomes: None)
        world.expect(not chain.complaints, "; ".join(chain.complaints[:3]), "memory of others left alone")


def check_payloads_can_travel(world: StageWorld) -> None:
    """What a stage gives holds tensors and builtins that a link can carry, one row of activations a token."""
    if not world.info.cuts:
        raise SkipCheck("the model declares no legal cut: nothing flows between stages")

    def look(index: int, planned: Planned, payload: Payload) -> None:
        tensors = [value for value in payload.values() if isinstance(value, torch.Tensor)]
        rows = planned.step.rows
        if index and not any(tensor.dim() and tensor.shape[0] == rows for tensor in tensors):
            shapes = [list(tensor.shape) for tensor in tensors]
            world.fail(f"{rows} rows flow as tensors of {shapes}", "at least one with a row for each token")

    with world.chain(world.cut()) as chain:
        steps = mixed(world.script(chain), range(len(world.requests)))
        chain.run(steps, lambda planned, outcomes: None, tamper=look)


def check_a_non_finite_input_fails_its_sequence_alone(world: StageWorld) -> None:
    """NaN in one sequence's rows on the way: that sequence fails, the others and who gets its pages don't notice."""
    if not world.info.options.check_finite:
        raise SkipCheck("the model was loaded without check_finite")
    if not world.info.cuts:
        raise SkipCheck("the model declares no legal cut: nothing flows between stages")
    for value in (float("nan"), float("inf")):
        with world.chain(world.cut()) as chain:
            _poisoned_batch(world, chain, world.script(chain), value)


def _poisoned_batch(world: StageWorld, chain: StageChain, script: Script, value: float) -> None:
    def tamper(index: int, planned: Planned, payload: Payload) -> None:
        if index != 1 or planned.step.number != 1:
            return
        (row, count), rows = planned.rows[victim], planned.step.rows
        tensors = [tensor for tensor in payload.values() if isinstance(tensor, torch.Tensor) and tensor.dim()]
        hit = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.shape[0] == rows]
        if not hit:
            raise SkipCheck("no rows of floating-point numbers flow between its stages")
        for tensor in hit:
            tensor[row : row + count] = value

    last = len(world.requests) - 1
    neighbours = [script.admit(1), script.admit(last)]
    victim = script.admit(last - 1)
    for seq in neighbours:
        script.advance(seq, 2)
    steps = [script.step()]
    script.advance(neighbours[0], 3)
    script.advance(victim, _BIG)
    script.advance(neighbours[1], 3)
    steps.append(script.step())
    script.release(victim)
    neighbours.append(script.admit(last - 1))  # on the pages of the victim
    while any(seq in script.running and not script.running[seq].over for seq in neighbours):
        for seq in neighbours:
            if not script.running[seq].over:
                script.advance(seq, 4)
        steps.append(script.step())
    chain.run(steps, world.judge(f"{value} in the rows of another", frozenset({victim})), tamper=tamper)

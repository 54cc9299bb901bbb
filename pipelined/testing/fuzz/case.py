"""One case: a pipeline, a workload and its faults, drawn from a seed. Knows nothing of how it is run.

The pipeline, the workload and each kind of fault have random streams of their own, so that leaving a kind of fault out
changes nothing else.
"""

from __future__ import annotations

import random

import msgspec

__all__ = ["FAULTS", "Cancellation", "Case", "Kill", "Prompted", "draw"]

FAULTS = ("drop", "delay", "kill", "cancel", "capacity", "skew", "corrupt", "duplicate", "stage")
"""Kinds of faults. `kill` ends or hangs a rank; `stage` has stages fail on some prompts."""

SHARE = 0.25
"""Of the cases that have a given kind of fault."""

FAIL_TOKEN, RAISE_TOKEN = 3, 4
"""Prompts with these make a stage fail, where the case has faults of stages; ordinary prompts have neither."""

_FIRST_TOKEN = 5


class Prompted(msgspec.Struct, frozen=True):
    """A request: when it comes, its prompt, and how it ends."""

    number: int
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __str__(self) -> str:
        usual = Prompted(self.number, self.at_s, self.prompt, self.max_tokens)
        names = ("min_tokens", "stop_token_ids", "ignore_eos", "n", "logprobs", "prompt_logprobs")
        more = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != getattr(usual, name)]
        return " ".join(
            (f"request {self.number} at {self.at_s:g} s: {self.prompt}, max_tokens={self.max_tokens}", *more)
        )


class Cancellation(msgspec.Struct, frozen=True):
    """A request is given up.

    Attributes:
        when: "submitted" (at once), "later" (`delay_s` after that), "tokens" (once `count` of them came), "applying"
            (within the preparation, on `rank`, of the `count`-th step after that).
        how: "abort" (by its id), "task" (its task is cancelled), "close" (its generator is closed).
    """

    number: int
    when: str
    how: str
    delay_s: float = 0.0
    count: int = 0
    rank: int = 0

    def __str__(self) -> str:
        where = {
            "later": f" {self.delay_s:g} s",
            "tokens": f" {self.count}",
            "applying": f" {self.count} rank {self.rank}",
        }
        return f"cancel request {self.number} by {self.how}, {self.when}{where.get(self.when, '')}"


class Kill(msgspec.Struct, frozen=True):
    """A rank ends, or its device never completes again.

    Attributes:
        phase: "setup", "prefill", "decode", "idle", "closing", or "restart" (while the next epoch begins).
        how: "task" (ended, closing its links), "abort" (its links break off), "hang" (in prefill and decode: the device
            stops).
        count: Which step of that phase, applied on that rank, starts the clock.
        delay_s: How long after that.
    """

    rank: int
    phase: str
    how: str
    count: int = 0
    delay_s: float = 0.0

    def __str__(self) -> str:
        return f"kill rank {self.rank} by {self.how} in {self.phase} {self.count} after {self.delay_s:g} s"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run depends on."""

    seed: int
    ranks: int
    layers: int
    hidden: int
    vocab: int
    context: int
    kv: tuple[int, ...]
    eos: tuple[int, ...]
    page_size: int
    chunk: int
    policy: str
    depth: int
    running: int
    radix: bool
    device: str
    launch_s: float
    row_s: float
    slow: tuple[float, ...]
    link: str
    requests: tuple[Prompted, ...]
    close_at_s: float | None = None
    step_timeout_s: float = 20.0
    skews_s: tuple[float, ...] = ()
    lossy: str = ""
    delayed: str = ""
    stages_fail: bool = False
    cancels: tuple[Cancellation, ...] = ()
    kills: tuple[Kill, ...] = ()
    recover: bool = False

    @property
    def model(self) -> str:
        """URI of the toy."""
        lists = f"kv={','.join(map(str, self.kv))}&eos={','.join(map(str, self.eos))}"
        uri = f"toy://?layers={self.layers}&hidden={self.hidden}&vocab={self.vocab}&context={self.context}&{lists}"
        if self.stages_fail:
            last = self.layers - 1
            uri += f"&fail_seq_token={FAIL_TOKEN}&fail_layer={last // 2}&raise_token={RAISE_TOKEN}&raise_layer={last}"
        return uri

    @property
    def transport(self) -> str:
        """URI of the links."""
        if not (self.lossy or self.delayed):
            return f"sim://?{self.link}"
        parts = [f"seed={self.seed}", self.lossy, self.delayed, self.link]
        return "faulty+sim://?" + "&".join(part for part in parts if part)

    @property
    def capacity_tokens(self) -> int:
        """What the ranks agree on: the least that any of them has, in whole pages."""
        return min(tokens // self.page_size for tokens in self.kv) * self.page_size

    @property
    def bound_s(self) -> float:
        """Virtual time by which everything must be over. No wait may be longer than its deadline."""
        tokens = sum((len(one.prompt) + one.max_tokens) * one.n for one in self.requests)
        work_s = 4 * tokens * self.ranks * (self.launch_s + self.row_s) * max(self.slow, default=1.0)
        losses = 0
        if self.recover:  # a token between them, or few; links that lose frames lose the pipeline again and again
            losses = 4 * (tokens if self.lossy else len(self.kills))
        late_s = max((one.at_s for one in self.requests), default=0.0) + 4 * self.step_timeout_s
        return 120.0 + late_s + work_s * (1 + losses) + losses * (self.step_timeout_s + 60.0)

    def describe(self) -> list[str]:
        """Lines for people."""
        lines = [
            f"{self.ranks} ranks, {self.transport}, {self.device} device, {self.policy} chunks of {self.chunk}, pages "
            f"of {self.page_size}, {self.capacity_tokens} tokens of KV, depth {self.depth}, {self.running} running",
            self.model,
        ]
        lines += ["recovers"] if self.recover else []
        lines += [f"clocks skewed by {self.skews_s}"] if self.skews_s else []
        lines += [f"closed at {self.close_at_s:g} s"] if self.close_at_s is not None else []
        return lines + [str(one) for one in (*self.requests, *self.cancels, *self.kills)]


def draw(seed: int, faults: tuple[str, ...] = FAULTS) -> Case:
    """The case of a seed, with faults of these kinds at most."""
    case = _load(_pipeline(seed), random.Random(f"{seed} workload"))
    for kind in FAULTS:
        chance = random.Random(f"{seed} {kind}")
        if chance.random() < SHARE and kind in faults:
            case = _ADD[kind](case, chance)
    return _recovering(case, random.Random(f"{seed} recover"))


def _pipeline(seed: int) -> Case:
    chance = random.Random(f"{seed} pipeline")
    ranks = chance.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8))
    page_size = chance.choice((1, 2, 4, 4, 8, 16))
    vocab = chance.choice((13, 61, 997))
    context = chance.choice((64, 128, 128, 256))
    return Case(
        seed=seed,
        ranks=ranks,
        layers=ranks + chance.choice((0, 0, 0, 1, 2)),
        hidden=chance.choice((2, 2, 3)),
        vocab=vocab,
        context=context,
        kv=(8192,),
        eos=chance.choice(((), (0,), (0, 1))),
        page_size=page_size,
        chunk=page_size * max(1, chance.choice((4, 8, 16, 32, 64)) // page_size),
        policy=chance.choice(("fixed", "fixed", "fixed", "dynamic", "balanced")),
        depth=chance.randint(1, 4),
        running=chance.choice((1, 2, 4, 8, 64, 64)),
        radix=chance.random() < 0.9,
        device=chance.choice(("emulated", "emulated", "stream")),
        launch_s=chance.choice((1e-4, 1e-3, 1e-2)),
        row_s=chance.choice((0.0, 1e-5, 1e-4)),
        slow=tuple(chance.choice((0.5, 1.0, 1.0, 1.0, 3.0)) for _ in range(ranks)),
        link=chance.choice(
            (
                "latency_us=0&bandwidth_gbytes_per_s=inf",
                "latency_us=5",
                "latency_us=500&bandwidth_gbytes_per_s=0.01",
                "latency_us=5000&bandwidth_gbytes_per_s=0.001&egress_gbytes_per_s=0.002",
            )
        ),
        requests=(),
    )


def _load(case: Case, chance: random.Random) -> Case:
    requests = chance.randint(6, 13)
    span_s = chance.choice((0.0, 0.05, 0.5, 2.0))
    longest = chance.choice((12, 40, 80))
    roots = [_tokens(case, chance, chance.randint(1, longest)) for _ in range(chance.randint(1, 3))]
    drawn = [_request(case, chance, number, roots, longest) for number in range(requests)]
    times = sorted(chance.uniform(0.0, span_s) for _ in drawn)
    timed = [msgspec.structs.replace(one, at_s=round(at_s, 6)) for one, at_s in zip(drawn, times, strict=True)]
    for index in range(1, requests):  # the same at the same time: one waits for the other's prefill
        if chance.random() < 0.15:
            twin = timed[index - 1]
            timed[index] = msgspec.structs.replace(timed[index], prompt=twin.prompt, at_s=twin.at_s)
    close_at_s = round(chance.uniform(0.0, 1.0), 6) if chance.random() < 0.08 else None
    return msgspec.structs.replace(case, requests=tuple(timed), close_at_s=close_at_s)


def _tokens(case: Case, chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(_FIRST_TOKEN, case.vocab) for _ in range(count))


def _request(case: Case, chance: random.Random, number: int, roots: list[tuple[int, ...]], longest: int) -> Prompted:
    prompt = _tokens(case, chance, chance.randint(1, longest))
    if chance.random() < 0.6:
        root = chance.choice(roots)
        shared = root[: chance.randint(1, len(root))] if chance.random() < 0.5 else root
        prompt = shared if chance.random() < 0.3 else shared + prompt[: chance.randint(1, len(prompt))]
    if chance.random() < 0.01:
        prompt = (prompt * case.context)[: case.context + chance.randint(-2, 2)]
    max_tokens = chance.choice((1, 2, 16, 24, 32, 40))
    stops = tuple(chance.randrange(case.vocab) for _ in range(3)) if chance.random() < 0.2 else ()
    return Prompted(
        number=number,
        at_s=0.0,
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=chance.randint(0, max_tokens) if chance.random() < 0.2 else 0,
        stop_token_ids=stops,
        ignore_eos=chance.random() < 0.3,
        n=chance.choice((1,) * 12 + (2, 3)),
        logprobs=chance.choice((None,) * 6 + (0, 2)),
        prompt_logprobs=chance.choice((None,) * 12 + (0, 1)),
    )


def _recovering(case: Case, chance: random.Random) -> Case:
    """Some engines go on after losses: then there may be more of them."""
    after_kills, after_frames, again = chance.random() < 0.6, chance.random() < 0.3, chance.random() < 0.5
    if not (case.kills and after_kills) and not (case.lossy and after_frames):
        return case
    kills = case.kills
    if kills and after_kills and again and kills[0].phase not in ("setup", "closing"):
        phase = chance.choice(("restart", "restart", "prefill", "decode", "decode"))
        how = chance.choice(("task", "abort") if phase == "restart" else ("task", "abort", "hang"))
        count = 0 if phase == "restart" else chance.randint(0, 12)
        delay_s = chance.choice((0.0, round(chance.uniform(0.0, 0.02), 6)))
        kills += (Kill(rank=chance.randrange(case.ranks), phase=phase, how=how, count=count, delay_s=delay_s),)
    return msgspec.structs.replace(case, kills=kills, recover=True)


# ---- faults ----


def _drop(case: Case, chance: random.Random) -> Case:
    return _lose(case, chance, "drop")


def _corrupt(case: Case, chance: random.Random) -> Case:
    return _lose(case, chance, "corrupt")


def _lose(case: Case, chance: random.Random, what: str) -> Case:
    option = f"{what}={chance.choice((0.0002, 0.0005, 0.002, 0.01))}"
    return msgspec.structs.replace(case, lossy="&".join(part for part in (case.lossy, option) if part))


def _delay(case: Case, chance: random.Random) -> Case:
    option = f"delay={chance.choice((0.01, 0.1, 0.5))}&delay_ms={chance.choice((1, 20, 200))}"
    return msgspec.structs.replace(case, delayed=option)


def _duplicate(case: Case, chance: random.Random) -> Case:
    option = f"duplicate={chance.choice((0.01, 0.1))}"
    return msgspec.structs.replace(case, delayed="&".join(part for part in (case.delayed, option) if part))


def _kill(case: Case, chance: random.Random) -> Case:
    phase = chance.choice(("setup", "prefill", "prefill", "decode", "decode", "decode", "idle", "closing"))
    hows = ("task", "abort", "hang") if phase in ("prefill", "decode") else ("task", "abort")
    kill = Kill(
        rank=chance.randrange(case.ranks),
        phase=phase,
        how=chance.choice(hows),
        count=chance.randint(0, 12) if phase in ("prefill", "decode") else chance.randint(0, 1),
        delay_s=chance.choice((0.0, 0.0, round(chance.uniform(0.0, 0.02), 6))),
    )
    return msgspec.structs.replace(case, kills=(kill,), step_timeout_s=chance.choice((10.0, 30.0)))


def _cancel(case: Case, chance: random.Random) -> Case:
    share, cancels = chance.choice((0.2, 0.5, 1.0)), []
    for request in case.requests:
        if chance.random() > share:
            continue
        when = chance.choice(("submitted", "later", "tokens", "applying", "applying"))
        cancels.append(
            Cancellation(
                number=request.number,
                when=when,
                how=chance.choice(("abort", "task", "close") if when == "tokens" else ("abort", "task")),
                delay_s=round(chance.uniform(0.0, 0.3), 6),
                count=chance.randint(1, request.max_tokens) if when == "tokens" else chance.randint(0, 20),
                rank=chance.randrange(case.ranks),
            )
        )
    return msgspec.structs.replace(case, cancels=tuple(cancels))


def _capacity(case: Case, chance: random.Random) -> Case:
    """Room for about one long sequence, and ranks that have different amounts of it."""
    longest = max((len(one.prompt) for one in case.requests if len(one.prompt) < case.context), default=8)
    least = max(case.page_size * 2, int((longest + 8) * chance.choice((0.7, 1.0, 1.0, 1.3, 1.6))))
    kv = [least + chance.choice((0, 0, 7, 64, 1000)) for _ in range(case.ranks)]
    return msgspec.structs.replace(case, kv=tuple(kv))


def _skew(case: Case, chance: random.Random) -> Case:
    skews_s = tuple(round(chance.uniform(-1, 1) * chance.choice((1.0, 1e3, 1e6)), 3) for _ in range(case.ranks + 1))
    return msgspec.structs.replace(case, skews_s=skews_s)


def _stage(case: Case, chance: random.Random) -> Case:
    requests = list(case.requests)
    for index in chance.sample(range(len(requests)), chance.randint(1, 2)):
        prompt, token = list(requests[index].prompt), chance.choice((FAIL_TOKEN, FAIL_TOKEN, RAISE_TOKEN))
        prompt[chance.randrange(len(prompt))] = token
        requests[index] = msgspec.structs.replace(requests[index], prompt=tuple(prompt))
    return msgspec.structs.replace(case, requests=tuple(requests), stages_fail=True)


_ADD = {
    "drop": _drop,
    "delay": _delay,
    "kill": _kill,
    "cancel": _cancel,
    "capacity": _capacity,
    "skew": _skew,
    "corrupt": _corrupt,
    "duplicate": _duplicate,
    "stage": _stage,
}

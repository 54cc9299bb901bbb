"""The scenario file, TOML or JSON: stages, links, a chunk policy, and requests that arrive.

Every error is one line that names the place in the file.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from pipelined.chunking import POLICIES
from pipelined.costs import PipelineCost, StageCost, Window
from pipelined.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Arrival", "Chunking", "Link", "Published", "Scenario", "StagePart", "decode_scenario", "read_scenario"]

MOST_BYTES = 32 << 20
MOST_SECONDS = 1e6
MOST_ARRIVAL_S = 1e5  # heartbeats go on while nothing happens: a thousand virtual seconds take about one real one
MOST_PROMPT_TOKENS = 1 << 24

Cost = Annotated[float, Meta(ge=0, le=1e6)]
Text = Annotated[str, Meta(max_length=2000)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class WindowPart(_Part, frozen=True, kw_only=True):
    """As `pipelined.costs.Window`."""

    tokens: Annotated[int, Meta(ge=1, le=1 << 40)]
    a: Cost = 0.0
    d: Cost = 0.0


class StagePart(_Part, frozen=True, kw_only=True):
    """As `pipelined.costs.StageCost`: seconds."""

    a: Cost = 0.0
    b: Cost = 0.0
    c: Cost = 0.0
    d: Cost = 0.0
    windows: tuple[WindowPart, ...] = ()
    per_decode: Cost | None = None
    per_context: Cost | None = None

    def cost(self) -> StageCost:
        """The model with these."""
        windows = tuple(Window(part.tokens, part.a, part.d) for part in self.windows)
        return StageCost(self.a, self.b, self.c, self.d, windows, self.per_decode, self.per_context)

    @classmethod
    def of(cls, cost: StageCost) -> StagePart:
        """As it would stand in a file."""
        windows = tuple(WindowPart(tokens=one.tokens, a=one.a, d=one.d) for one in cost.windows)
        return cls(
            a=cost.a,
            b=cost.b,
            c=cost.c,
            d=cost.d,
            windows=windows,
            per_decode=cost.per_decode,
            per_context=cost.per_context,
        )


class Chunking(_Part, frozen=True, kw_only=True):
    """How prompts are cut. Settings left out are the engine's defaults.

    Attributes:
        policy: "fixed", "dynamic" or "balanced".
        known_costs: The policy is told the costs of the stages at the start; false: it learns them from measured times.
        least_share: Dynamic chunks are never below this share of the first.
        prefix_cost: Dynamic chunks also count what a prefix costs whatever the chunk (`d`), unlike the published rule.
    """

    policy: Text = "balanced"
    chunked_prefill_size: Annotated[int, Meta(ge=1, le=MOST_PROMPT_TOKENS)] = 8192
    smoothing_factor: Annotated[float, Meta(ge=0, le=1)] = 0.75
    max_micro_batch_tokens: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
    target_itl_s: Annotated[float, Meta(gt=0, le=MOST_SECONDS)] | None = None
    known_costs: bool = True
    least_share: Annotated[float, Meta(ge=0, le=1)] = 0.25
    prefix_cost: bool = False


class Link(_Part, frozen=True, kw_only=True):
    """From each stage to the next. Left out, links are free."""

    latency_us: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    bandwidth_gbytes_per_s: Annotated[float, Meta(gt=0)] | None = None

    @property
    def uri(self) -> str:
        """As a transport."""
        bandwidth = self.bandwidth_gbytes_per_s or math.inf
        return f"sim://?latency_us={self.latency_us}&bandwidth_gbytes_per_s={bandwidth}"


class Arrival(_Part, frozen=True, kw_only=True):
    """A request.

    Attributes:
        at_s: When it comes, counted from the start.
        prompt_tokens, output_tokens: Lengths.
        count: So many alike at the same moment.
    """

    prompt_tokens: Annotated[int, Meta(ge=1, le=MOST_PROMPT_TOKENS)]
    output_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    at_s: Annotated[float, Meta(ge=0, le=MOST_ARRIVAL_S)] = 0.0
    count: Annotated[int, Meta(ge=1, le=100_000)] = 1


class Published(_Part, frozen=True, kw_only=True):
    """What others measured for the first request, for replays.

    Attributes:
        name: Model and machine.
        setting: Theirs, in words.
        ttft_s: Time to first token.
        overhead_s: Added to the cost of each launch before policies are compared, where the model has none.
        align_tokens: Step of the sizes among which the best cut is looked for.
        note: What the reader should know.
    """

    name: Text
    setting: Text
    ttft_s: Annotated[float, Meta(gt=0, le=MOST_SECONDS)]
    overhead_s: Cost = 0.0
    align_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 64
    note: Text = ""


class Scenario(_Part, frozen=True, kw_only=True):
    """A whole file.

    Attributes:
        name: For people.
        pp_size: Stages, where one `stage` describes them all.
        stage: Cost of each of the stages alike. stages: of each, the first first. One of the two.
        arrivals: In the order of time.
        hidden: Elements of two bytes that a token's hidden state has: what the links carry.
        page_size: Tokens of a KV page.
        kv_cache_tokens: Capacity; None: all requests fit.
        max_running_requests: Most at a time.
        depth: Steps in flight beyond one a stage.
    """

    arrivals: Annotated[tuple[Arrival, ...], Meta(min_length=1, max_length=100_000)]
    name: Text = "scenario"
    pp_size: Annotated[int, Meta(ge=1, le=1024)] | None = None
    stage: StagePart | None = None
    stages: Annotated[tuple[StagePart, ...], Meta(min_length=1, max_length=1024)] | None = None
    chunking: Chunking = Chunking()
    link: Link = Link()
    hidden: Annotated[int, Meta(ge=1, le=1 << 24)] = 4096
    page_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 64
    kv_cache_tokens: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
    max_running_requests: Annotated[int, Meta(ge=1, le=1 << 20)] = 64
    depth: Annotated[int, Meta(ge=1, le=1024)] = 2
    published: Published | None = None

    @property
    def cost(self) -> PipelineCost:
        """Of the pipeline."""
        if self.stages is not None:
            return PipelineCost(tuple(part.cost() for part in self.stages))
        assert self.stage is not None, "a checked scenario has one of both"
        return PipelineCost.even(self.stage.cost(), self.pp_size or 1)

    def requests(self) -> Iterator[Arrival]:
        """One at a time."""
        for arrival in self.arrivals:
            for _ in range(arrival.count):
                yield arrival


def read_scenario(path: str | Path) -> Scenario:
    """The scenario in a file; TOML unless its name ends with `.json`.

    Raises:
        ConfigError: There is no such file, or it is no sound scenario.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the scenario file {str(path)!r} cannot be read: {error.strerror}") from error
    return decode_scenario(content, str(path))


def decode_scenario(content: bytes, source: str = "scenario.toml") -> Scenario:
    """The scenario in a file's content; `source` is its name, whose ending tells JSON from TOML.

    Raises:
        ConfigError: One line, with the place in the file, for whatever is no sound scenario.
    """
    if not content.strip():
        raise ConfigError(f"{source} is empty; expected a scenario with at least a stage and arrivals")
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{source} has {len(content)} bytes; a scenario has at most {MOST_BYTES}")
    try:
        plain: Any = msgspec.json.decode(content) if source.endswith(".json") else tomllib.loads(content.decode())
        scenario = msgspec.convert(plain, Scenario)
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{source} is no scenario: {' '.join(str(error).split())}") from error
    _check_numbers(plain, source, "$")
    _check_stages(scenario, source)
    _check_chunking(scenario, f"{source}: $.chunking")
    _check_arrivals(scenario, source)
    return scenario


def _check_numbers(node: Any, source: str, place: str) -> None:
    """TOML has infinity and not-a-number; nothing here can be either."""
    if isinstance(node, float) and not math.isfinite(node):
        raise ConfigError(f"{source}: {place} is {node}; expected a finite number")
    if isinstance(node, dict):
        for key, value in node.items():
            _check_numbers(value, source, f"{place}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            _check_numbers(value, source, f"{place}[{index}]")


def _check_stages(scenario: Scenario, source: str) -> None:
    if (scenario.stage is None) == (scenario.stages is None):
        had = "both" if scenario.stage is not None else "neither"
        raise ConfigError(f"{source}: $ has {had} of `stage` and `stages`; expected one of them")
    if scenario.stages is not None and scenario.pp_size not in (None, len(scenario.stages)):
        raise ConfigError(
            f"{source}: $.pp_size is {scenario.pp_size}, but $.stages has {len(scenario.stages)} entries; leave it out"
        )
    parts = scenario.stages if scenario.stages is not None else (scenario.stage,)
    for index, part in enumerate(parts):
        place = "$.stage" if scenario.stages is None else f"$.stages[{index}]"
        if part is not None and part.cost().chunk_s(0, 1) <= 0:
            raise ConfigError(f"{source}: {place}: time does not grow with tokens; expected a or b above 0")


def _check_chunking(scenario: Scenario, place: str) -> None:
    chunking, page = scenario.chunking, scenario.page_size
    size = chunking.chunked_prefill_size
    if chunking.policy not in POLICIES:
        raise ConfigError(f"{place}.policy: unknown {chunking.policy!r}{nearest(chunking.policy, POLICIES)}")
    if size % page:
        raise ConfigError(f"{place}.chunked_prefill_size is {size}; expected a multiple of $.page_size={page}")
    for name in ("max_micro_batch_tokens", "target_itl_s"):
        if getattr(chunking, name) is not None and chunking.policy != "balanced":
            raise ConfigError(f"{place}.{name} is of policy 'balanced' alone, not {chunking.policy!r}; leave it out")
    if chunking.max_micro_batch_tokens is not None and chunking.max_micro_batch_tokens < page:
        raise ConfigError(f"{place}.max_micro_batch_tokens is less than a page of {page} tokens")


def _check_arrivals(scenario: Scenario, source: str) -> None:
    before_s = 0.0
    for index, arrival in enumerate(scenario.arrivals):
        place = f"{source}: $.arrivals[{index}]"
        if arrival.at_s < before_s:
            raise ConfigError(f"{place}.at_s is {arrival.at_s}, before the {before_s} ahead of it; expected time order")
        before_s = arrival.at_s
        tokens, capacity = arrival.prompt_tokens + arrival.output_tokens, scenario.kv_cache_tokens
        if capacity is not None and tokens > capacity // scenario.page_size * scenario.page_size:
            raise ConfigError(
                f"{place} has {tokens} tokens; $.kv_cache_tokens={capacity} holds "
                f"{capacity // scenario.page_size} pages of {scenario.page_size}"
            )

"""The result document ``epdecode.result/1``: its types, and nothing of how the figures came about.

Every duration is in microseconds, every size in bytes. ``None`` means not measured, or measured
but not fit to be called a speed (ranks shared a GPU, the numbers were wrong).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from epdecode.result.stats import Stats

STAGES = (
    "route",
    "dispatch_send",
    "dispatch_wait",
    "gate_up_gemm",
    "act_quant",
    "down_gemm",
    "expert_chain",
    "combine_send",
    "combine_wait",
    "shared_expert",
)
"""Stage names in the order of a layer; the same in result, NVTX ranges and traces. ``expert_chain``
stands for the three before it where one launch does them all."""

WAIT_STAGES = ("dispatch_wait", "combine_wait")

RunStatus = Literal["passed", "wrong", "degraded", "interrupted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What ended a run, as far as anyone knows: the first fault, not the first victim."""

    kind: str
    """exited, stopped, stalled, exception, config, out_of_memory, preempted ... (failures.md)."""
    message: str
    rank: int | None = None
    host: str | None = None
    step: int | None = None
    stage: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank ran."""

    rank: int
    host: str
    pid: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Enough to run it again."""

    epdecode: str
    """Version of this package."""
    commit: str | None
    """Commit of the source tree, with '+dirty' when files differ; null when there is no tree."""
    versions: Mapping[str, str | None]
    """Libraries as loaded in rank 0, not as installed; null = not loaded."""
    gpu: str | None
    ranks: tuple[RankPlace, ...]
    command: tuple[str, ...]
    started_utc: str
    finished_utc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How it was measured."""

    world_size: int
    layers: int
    tokens_per_rank: int
    transport: str
    wire: str
    experts: str
    graph: bool
    """The timed steps replay CUDA graphs."""
    warmup_steps: int
    steps: int
    clock: Literal["host", "cuda_event"]
    cache: Literal["cold", "hot"]
    """cold = weights come from memory in every layer (several layers, or a flush)."""
    shared_gpu: bool
    """Ranks share a GPU: right for correctness, no speed is reported."""
    align: str = "none"
    """What lined the ranks up in front of an instrumented step, and why nothing did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """One rank's own step times and stages."""

    rank: int
    step: Stats
    stages: Mapping[str, Stats]
    """Microseconds in one layer."""
    wait_share: float | None
    """Share of the layer spent in dispatch_wait and combine_wait, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extremes:
    """Fastest and slowest rank by median step."""

    fastest_rank: int
    fastest_us_p50: float
    slowest_rank: int
    slowest_us_p50: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What the time went into."""

    step: Stats
    """Headline, plain (uninstrumented) steps: per step, the slowest rank."""
    layer: Stats
    """The headline divided by the layers."""
    instrumented_step: Stats | None = None
    """Per step, the slowest rank, with stage stamps in the step."""
    stages: Mapping[str, Stats] = field(default_factory=dict)
    """Microseconds in one layer, all ranks and steps together, from the instrumented steps."""
    per_rank: tuple[RankTiming, ...] = ()
    extremes: Extremes
    wait_share: float | None = None
    """Mean of the ranks' wait shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Tokens through the whole loop of layers, all ranks, at the headline's median."""

    tokens_per_step: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least a stage can cost on the device, one layer, busiest rank."""

    bytes: int
    flops: int
    floor_us: float
    fraction: float | None = None
    """floor / measured median; 1 = as fast as the hardware allows, null = not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Rows per (logical) expert and step."""

    max: float
    mean: float
    imbalance: float
    """max / mean; 1 = even."""
    rank_imbalance: float | None = None
    """The same over ranks' sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """What padding costs where rows are packed: the busiest rank, means over layers and steps."""

    rows: float
    """That hold a token."""
    aligned_rows: float
    """With each expert's block filled up: what the grouped GEMMs work on."""
    planned_rows: int
    """That buffers hold; work follows the rows there are."""
    worst_case: bool
    """Received rows are taken as many as could arrive; false = the host waited for their number."""
    buffer_bytes: int
    """Of the buffers that have planned_rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """One category of device memory on the fullest rank, bytes."""

    planned: int
    peak: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsUse:
    """Where the weights came from, and how fast."""

    source: Literal["seeded", "checkpoint"]
    format: str
    """What the GEMMs read."""
    bytes: int
    """Read from files, all ranks together."""
    seconds: float
    """Until the slowest rank had them on its device."""
    gb_s: float | None = None
    """bytes / seconds, 1e9 bytes/s; files a machine has read before come from its page cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """How the timed steps ran: there is no silent fallback."""

    graph: int
    eager: int
    skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Comparison with the plain path, same weights and routes, row by row."""

    passed: bool
    rows: int
    worst_row: int | None
    worst_error: float | None
    """Relative to the scale of the row; null when it was not finite."""
    tolerance: float
    reference: str
    worst_rank: int | None = None
    routes_differing: int = 0
    """Rows whose experts are not those of the gate in plain torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Values that were NaN or infinite, and the first of them."""

    counts: Mapping[str, int]
    """Per stage."""
    first_rank: int | None = None
    first_step: int | None = None
    first_stage: str | None = None
    first_expert: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The whole of result.json. Performance figures count only with status passed."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "use_attribute_docstrings": True,
        "extra": "forbid",
    }

    schema: Literal["epdecode.result/1"] = "epdecode.result/1"
    status: RunStatus
    name: str
    """Name of the config, as in the run folder's name."""
    config: Mapping[str, Any]
    """Resolved; the run folder's config.yaml says the same."""
    config_digest: str
    plan: Mapping[str, Any]
    provenance: Provenance
    method: Method
    timing: Timing | None = None
    first_call_us: float | None = None
    """The first step of the run, slowest rank: compilation and lazy loading, in no other figure."""
    throughput: Throughput | None = None
    layer_floor: Floor | None = None
    floors: Mapping[str, Floor] = field(default_factory=dict)
    """Per stage."""
    expert_load: ExpertLoad | None = None
    packed_rows: PackedRows | None = None
    memory: Mapping[str, MemoryUse] = field(default_factory=dict)
    """Per category, and 'total'."""
    weights: WeightsUse | None = None
    step_counts: StepCounts | None = None
    verification: Verification | None = None
    non_finite: NonFinite | None = None
    cause: Cause | None = None
    """Why the status is not passed."""
    warnings: tuple[str, ...] = ()

"""What the user wrote: frozen, strict, never adjusted. Whatever follows from it is in plan.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

# The bounds are read by the loader, the JSON Schema and the documentation alike.
Count = Annotated[int, Ge(0)]
Size = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Expert parallelism."""

    ep: Size | Literal["auto"] = "auto"
    """Ranks that share the experts; auto = the world size, and no other value than that runs."""
    stand_in_ep: Size | None = None
    """Take the place of the ranks of a larger EP group: each rank holds num_experts / stand_in_ep
    experts, so that one GPU shows the expert load that it would have in that group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """The all-to-all."""

    name: Literal["torch_a2a", "deepep_ll", "deepep_ht"] = "torch_a2a"
    """torch_a2a = bytes through torch.distributed, on any machine; deepep_ll = DeepEP's
    low-latency kernels; deepep_ht = its high-throughput (normal) kernels."""
    max_tokens_per_rank: Size = 128
    """Rows one rank may dispatch in one step; sizes every buffer, the same on all ranks."""
    wire: Literal["fp8", "bf16"] = "fp8"
    """Format of dispatched rows. bf16 quantises after dispatch, in the experts."""
    layout: Literal["auto", "masked", "packed"] = "auto"
    """How rows arrive: masked = a block of fixed size per expert; packed = one block after the
    other; auto = masked, and packed from deepep_ht, which knows no other."""
    num_sms: Size = 20
    """SMs that deepep_ht's kernels run on; even."""
    worst_case_rows: bool | Literal["auto"] = "auto"
    """Packed rows: take as many as could arrive, so that the host need not wait for their number;
    one node only. auto = with deepep_ht in CUDA graphs, which can do no other."""
    fused_reduce: bool = True
    """Packed rows: gather, multiply by router weights and sum in one kernel; off = plain torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The grouped SwiGLU."""

    name: Literal["auto", "torch_loop", "deepgemm", "triton_gemm", "tuned"] = "auto"
    """torch_loop = plain PyTorch, on any machine; deepgemm = DeepGEMM's grouped FP8 GEMMs;
    triton_gemm = our own in Triton; tuned = for each bucket the faster of these two, by the table
    of `epdecode bench experts --tune` on this machine, else by a rule from one H200; auto = tuned
    for FP8 weights and masked rows on Hopper, deepgemm for FP8 weights otherwise, triton_gemm for
    bf16 weights (packed: torch_loop), torch_loop without a GPU. The plan lists each bucket's."""
    scale_format: Literal["auto", "fp32", "ue8m0"] = "auto"
    """Scales of quantised activations; auto = what the GPU's GEMM takes."""
    row_alignment: Size | Literal["auto"] = "auto"
    """Packed rows: each expert's block starts at a multiple of this; auto = what the GEMM asks."""
    fused_activation: bool = True
    """SiLU * mul and quantisation in one kernel over valid rows only; off = plain torch."""
    fused_quant_layout: bool = True
    """Write scales in the GEMM's layout inside the quantisation; off = a pass of its own."""
    placement: Literal["contiguous", "balanced", "balanced_by_node"] = "contiguous"
    """contiguous = rank r holds the r-th block of experts; balanced = experts are replicated and
    packed so that ranks get even loads; balanced_by_node = the same node by node, a router's group
    of experts on one node, so that a token crosses to few nodes."""
    redundant: Count = 0
    """Copies of hot experts in a layer, beside the model's own; balanced placement only."""
    load: str | None = None
    """A recorded trace or a table of counts that the placement is balanced for; null = the load
    that ``routing`` gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    """Where the experts' weights come from."""

    source: Literal["seeded", "checkpoint"] = "seeded"
    """seeded = random, each matrix seeded by layer and expert, the same for any number of ranks;
    checkpoint = a folder of safetensors files as Hugging Face has it."""
    path: str | None = None
    """The checkpoint's folder, with its config.json; null = the folder of ``model``."""
    format: Literal["auto", "fp8_block128", "bf16"] = "auto"
    """What the GEMMs read: a checkpoint in another format is converted while it is loaded; auto =
    as the model has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Tokens per step."""

    buckets: tuple[Size, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Padded batch sizes; one CUDA graph each."""
    tokens_per_rank: Size = 128
    """Tokens each rank has in a step; the most of them with ``vary``."""
    vary: bool = False
    """Draw each rank's and step's count from 0 to tokens_per_rank, the same on every machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """Where tokens go."""

    kind: Literal[
        "model",
        "uniform",
        "balanced",
        "zipf",
        "lognormal",
        "hot_rank",
        "hot_expert",
        "stress",
        "trace",
        "load_table",
    ] = "model"
    """model = the gate; uniform = random distinct experts; balanced = every expert the same count;
    zipf and lognormal = some experts more likely; hot_rank, hot_expert = a share goes to rank 0's
    experts, to expert 0; stress = every token to rank 0's experts; trace = recorded routes;
    load_table = drawn from recorded counts."""
    seed: Count = 0
    """Seeds the routes that are drawn."""
    alpha: Positive = 1.0
    """zipf: the n-th likeliest expert has a likelihood of 1 / n ** alpha."""
    sigma: Positive = 1.0
    """lognormal: likelihoods are exp(sigma * standard normal)."""
    share: Share = 0.5
    """hot_rank: part of all choices that fall on rank 0's experts; hot_expert: part of the tokens
    that choose expert 0."""
    path: str | None = None
    """trace: .npy, .npz or .safetensors of expert ids [tokens, moe_layers, top_k]; load_table:
    .csv or .json of counts per layer and expert."""
    wrap: bool = False
    """Begin a trace again at its end; off = a trace shorter than the run is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """CUDA graphs."""

    enabled: bool = True
    """Capture one graph per bucket and replay it; off = launch every kernel of every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapConfig:
    """Work done while the all-to-all waits."""

    shared_expert: bool = True
    """Run the shared expert on a side stream during dispatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The timed loop."""

    warmup_steps: Count = 10
    """Steps before the timed ones; every shape is compiled before these."""
    steps: Size = 100
    """Timed steps."""
    verify: bool = True
    """Compare the outputs with the plain PyTorch path, with the same weights and routes."""
    seed: Count = 0
    """Seeds weights and inputs."""
    record_routing: bool = False
    """Write the routes of every distinct batch to routing.safetensors in the run's folder, a trace
    that ``routing.path`` and ``experts.load`` read."""
    align: Literal["none", "auto", "nvshmem"] = "none"
    """Line the ranks up on the GPU before each timed region, so that stage times hold the moving of
    bytes and not the wait for a late peer: by an NVSHMEM barrier. auto = where each rank has a GPU
    and DeepEP has started NVSHMEM, else none; the result says which. The barrier was proven beside
    a DeepEP buffer, a whole run with it was not: so none is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Seconds until a wait is called a fault."""

    join_s: Positive = 120
    """Until every rank has joined the group."""
    warmup_s: Positive = 1800
    """For weights, compilation, warm-up and capture; ranks may differ by minutes here."""
    step_s: Positive = 20
    """For one step; past it the run is ended, naming the ranks that are behind."""
    stale_s: Positive = 3
    """Without a sign of life from a rank until it counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """The GPU that the plan's floors and memory are for."""

    device: Literal["auto", "cpu", "h100", "h200", "h800", "b200", "gb200"] = "auto"
    """A row of the device table; auto = the GPU found, none on CPU; cpu = none, thus no floors."""
    memory_gib: Positive | Literal["auto"] = "auto"
    """Memory the plan may count on; auto = the device table's figure."""
    hbm_tb_s: Positive | Literal["auto"] = "auto"
    """Read bandwidth used for floors, 1e12 bytes/s; auto = the device table's measured figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """Looking closer, at the cost of speed; and faults for epdecode's own tests."""

    non_finite: bool = False
    """Count rows with NaN or infinite values per stage and name the first; a run with any ends
    with exit code 5."""
    faults: bool = False
    """Allow the fault that EPDECODE_FAULT asks for (docs/failures.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole file."""

    model: str = "tiny"
    """A name in configs/models; the path of such a file, of a Hugging Face folder or of its
    config.json; or org/name, which is looked for in the local Hub cache."""
    layers: Size | tuple[Count, ...] = 2
    """MoE layers in the loop, each with its own weights: a count, from the model's first MoE layer
    on, or a list of the model's own layer numbers, as [3, 10]."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    run: RunConfig = field(default_factory=RunConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def num_layers(self) -> int:
        """MoE layers in the loop."""
        return self.layers if isinstance(self.layers, int) else len(self.layers)

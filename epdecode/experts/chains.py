"""The two ways triton_gemm runs a chain, and which one a GPU and a model get."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from epdecode.batch import ExpertWeights, Fp8Rows, Mark, Rows
from epdecode.kernels.fp8 import mn_major_scales, num_groups
from epdecode.kernels.grouped_gemm import Tile, down, gate_up_swiglu
from epdecode.plan.expert_choice import Choice, ExpertShape

log = logging.getLogger(__name__)

LEAST_CAPACITY = 64
"""Rows of the fused kernel's largest box: a block of an expert holds at least one."""

Chain = Callable[[Rows, ExpertWeights, torch.Tensor, torch.Tensor, Choice, Mark], None]
"""chain(rows, weights, counts, out, choice, mark) writes the valid rows of out [E, M, H]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainShape:
    """What a chain's workspaces and limits follow from."""

    shape: ExpertShape
    capacity: int
    fp8: bool
    packed_scales: bool


class TwoKernels:
    """Gate-up with the activation and its quantisation, then down, through plain Triton."""

    def __init__(self, chain: ChainShape, device: torch.device) -> None:
        shape = (chain.shape.experts, chain.capacity, chain.shape.size)
        self._act: Rows = (
            empty_fp8(shape, device)
            if chain.fp8
            else torch.empty(shape, dtype=torch.bfloat16, device=device)
        )

    def __call__(
        self,
        rows: Rows,
        weights: ExpertWeights,
        counts: torch.Tensor,
        out: torch.Tensor,
        choice: Choice,
        mark: Mark,
    ) -> None:
        """See Chain."""
        first, second = grouped_tiles(min(choice.tokens, 64))
        gate_up_swiglu(rows, weights.gate_up, counts, self._act, first)
        mark("gate_up_gemm")
        down(self._act, weights.down, counts, out, second)
        mark("down_gemm")


def grouped_tiles(tokens: int) -> tuple[Tile, Tile]:
    """Tiles of gate_up_swiglu and of down: the best of a sweep on an H200."""
    if tokens <= 32:
        first = Tile(tokens=tokens, stages=4, warps=4, programs_per_sm=1)
        return first, Tile(tokens=tokens, stages=4, warps=4, programs_per_sm=2)
    first = Tile(tokens=tokens, stages=4, warps=8, programs_per_sm=1)
    return first, Tile(tokens=tokens, stages=3, warps=4, programs_per_sm=3)


class FusedChain:
    """One persistent kernel for the whole chain, on Hopper."""

    def __init__(self, chain: ChainShape, device: torch.device) -> None:
        from epdecode.kernels import expert_chain

        self._run = expert_chain.expert_chain
        self._tile = expert_chain.ChainTile
        self._shape = chain.shape
        self._space = expert_chain.empty_space(
            chain.shape.experts, chain.capacity, chain.shape.size, device
        )

    def __call__(
        self,
        rows: Rows,
        weights: ExpertWeights,
        counts: torch.Tensor,
        out: torch.Tensor,
        choice: Choice,
        mark: Mark,
    ) -> None:
        """See Chain."""
        assert isinstance(rows, Fp8Rows), "a fused chain is built for FP8 rows only"
        tile = self._tile(
            tokens=choice.tokens,
            stages=choice.stages,
            narrow=choice.narrow and choice.tokens <= 32 and self._shape.size % 256 == 0,
            splits=choice.splits if self._shape.hidden % (128 * choice.splits) == 0 else 1,
        )
        self._run(rows, weights, counts, self._space, out, tile)
        mark("expert_chain")


def build_chain(chain: ChainShape, device: torch.device) -> Chain:
    """The fused kernel where it runs, else two plain ones; says in the log why not."""
    reason = why_not_fused(chain, device)
    if reason:
        log.info("triton_gemm: two kernels, not one: %s", reason)
        return TwoKernels(chain, device)
    return FusedChain(chain, device)


def why_not_fused(chain: ChainShape, device: torch.device) -> str:
    """What keeps the fused kernel from running here; empty when nothing does."""
    if device.type != "cuda":
        return "no GPU"
    shape = chain.shape
    capability = torch.cuda.get_device_capability(device)
    checks = {
        f"compute capability {capability} is not 9.x": capability[0] == 9,
        "weights are bfloat16": chain.fp8,
        "scales are packed exponents": not chain.packed_scales,
        f"hidden size {shape.hidden} is no multiple of 256": shape.hidden % 256 == 0,
        f"expert size {shape.size} is no multiple of 128": shape.size % 128 == 0,
        f"capacity {chain.capacity} is no multiple of 4 from {LEAST_CAPACITY} up": (
            chain.capacity % 4 == 0 and chain.capacity >= LEAST_CAPACITY
        ),
    }
    return "; ".join(what for what, good in checks.items() if not good) or _why_not_loadable()


def _why_not_loadable() -> str:
    """Gluon is young: other Triton versions may lack what the fused kernel is written with."""
    try:
        importlib.import_module("epdecode.kernels.expert_chain")
    except ImportError as error:
        return f"triton {triton.__version__}: {error}"
    return ""


def empty_fp8(shape: tuple[int, int, int], device: torch.device) -> Fp8Rows:
    """e4m3 [E, M, H], uninitialised, with MN-major float32 scales."""
    experts, rows, size = shape
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Rows(data, mn_major_scales(experts, rows, num_groups(size), "fp32", device))

"""What `epdecode bench experts` runs: shapes, loads, inputs, weights, references."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epdecode.batch import ExpertWeights, Fp8Rows
from epdecode.kernels.fp8 import (
    dequantize,
    dequantize_block,
    mn_major_scales,
    quantize_ref,
)
from epdecode.plan.expert_choice import ExpertShape, Spread, fuller

LAYERS = 6
"""Layers with their own weights in one timed graph, so that no weight is found in L2."""
LOADS: dict[str, Spread] = {"even": "even", "uniform": "drawn", "skew": "skewed"}


@dataclass(frozen=True, slots=True)
class ExpertCase:
    """One row of the table.

    load: even = every expert ``rows`` rows; uniform = each row to a random expert; skew = half the
    experts empty, the others as 1 / rank^1.2; the same mean in all.
    """

    shape: ExpertShape
    rows: int
    load: str = "even"

    @property
    def layer_bytes(self) -> int:
        """Bytes of FP8 weights of one layer's experts."""
        return self.shape.experts * 3 * self.shape.hidden * self.shape.size

    @property
    def fuller_rows(self) -> int:
        """What a choice for this load goes by."""
        return fuller(self.rows, LOADS[self.load])

    def counts(self) -> list[int]:
        """Rows of each expert, the same in every run."""
        experts, total = self.shape.experts, self.shape.experts * self.rows
        if self.load == "even":
            return [self.rows] * experts
        chance = torch.ones(experts)
        generator = torch.Generator().manual_seed(experts * 1000 + self.rows)
        if self.load == "skew":
            chance = torch.arange(1, experts + 1).float() ** -1.2
            chance[torch.randperm(experts, generator=generator)[: experts // 2]] = 0
        drawn = torch.multinomial(chance, total, replacement=True, generator=generator)
        return torch.bincount(drawn, minlength=experts).tolist()

    def floor_bytes(self) -> int:
        """Weights of the experts that got rows: what one layer must read at least."""
        hit = sum(count > 0 for count in self.counts())
        return self.layer_bytes // self.shape.experts * hit


@dataclass(frozen=True, slots=True)
class Inputs:
    """One case's tensors. x: e4m3 [E, M, H], NaN past the counts; out: bfloat16 [E, M, H]."""

    x: Fp8Rows
    counts: torch.Tensor
    layers: tuple[ExpertWeights, ...]
    out: torch.Tensor


def make_inputs(case: ExpertCase, layers: int, device: torch.device) -> Inputs:
    """Random rows and ``layers`` layers of random weights."""
    shape, counts = case.shape, case.counts()
    capacity = max(128, -(-max(counts) // 128) * 128)
    rows = (shape.experts, capacity, shape.hidden)
    data = torch.full(rows, 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = mn_major_scales(*rows[:2], shape.hidden // 128, "fp32", device).fill_(torch.nan)
    for expert, count in enumerate(counts):
        made = quantize_ref(torch.randn(count, shape.hidden, device=device))
        data[expert, :count] = made.data
        scales[expert, :count] = made.scales
    return Inputs(
        Fp8Rows(data, scales),
        torch.tensor(counts, dtype=torch.int32, device=device),
        tuple(_weights(shape, device) for _ in range(layers)),
        torch.empty(rows, dtype=torch.bfloat16, device=device),
    )


def _weights(shape: ExpertShape, device: torch.device) -> ExpertWeights:
    return ExpertWeights(
        _matrices(shape.experts, 2 * shape.size, shape.hidden, device),
        _matrices(shape.experts, shape.hidden, shape.size, device),
    )


def _matrices(experts: int, rows: int, columns: int, device: torch.device) -> Fp8Rows:
    """e4m3 [E, rows, columns] and block scales, so that a product has about unit variance."""
    data = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=device)
    for matrix in data:
        matrix.copy_(torch.randn(rows, columns, device=device))
    spread = 0.5 + torch.rand(experts, rows // 128, columns // 128, device=device)
    return Fp8Rows(data, spread / columns**0.5)


def error_of(inputs: Inputs) -> float:
    """Relative Frobenius error of ``out`` for the first layer; infinite when it is not finite.

    Against float32 arithmetic on the same FP8 inputs and weights, the activation quantised where
    the fast path does. Anything may stand in rows past a count, as in the Experts contract.
    """
    difference = norm = 0.0
    weights = inputs.layers[0]
    for expert, count in enumerate(inputs.counts.tolist()):
        if count == 0:
            continue
        x = dequantize(Fp8Rows(inputs.x.data[expert, :count], inputs.x.scales[expert, :count]))
        gate, up = (x @ _matrix(weights.gate_up, expert).T).chunk(2, dim=-1)
        act = dequantize(quantize_ref(torch.nn.functional.silu(gate) * up))
        want = act @ _matrix(weights.down, expert).T
        difference += (inputs.out[expert, :count].float() - want).square().sum().item()
        norm += want.square().sum().item()
    relative = (difference / norm) ** 0.5 if norm else 0.0
    return relative if relative == relative else float("inf")


def untouched(inputs: Inputs) -> bool:
    """No row past a count was written; ``out`` was NaN before. triton_gemm promises that much."""
    counts = inputs.counts.tolist()
    return all(
        bool(out[count:].isnan().all()) for out, count in zip(inputs.out, counts, strict=True)
    )


def _matrix(weights: object, expert: int) -> torch.Tensor:
    assert isinstance(weights, Fp8Rows), "the bench's weights are FP8"
    return dequantize_block(Fp8Rows(weights.data[expert], weights.scales[expert]))

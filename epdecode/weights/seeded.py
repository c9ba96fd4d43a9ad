"""A layer's weights on one rank: what they are, and how they are made from seeds.

Seeded by layer and expert, so that an expert's weights are the same wherever it is placed and
however often. weights_load.py reads them from a checkpoint instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epdecode.batch import ExpertWeights, Fp8Rows, Rows
from epdecode.kernels.fp8 import GROUP, dequantize_block, quantize_block
from epdecode.models import ModelShape

FP8_NAN = 0x7F
"""The bits of e4m3fn's NaN, without its sign."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One MoE layer on one rank.

    norm: bfloat16 [H]; gate: bfloat16 [num_experts, H]; bias: float32 [num_experts] or None;
    experts: the rank's; shared: one expert of the shared size, or None.
    """

    norm: torch.Tensor
    gate: torch.Tensor
    bias: torch.Tensor | None
    experts: ExpertWeights
    shared: ExpertWeights | None


def generator(device: torch.device, *names: object) -> torch.Generator:
    """A generator seeded by names, so that a tensor's values depend on what it is alone."""
    digest = hashlib.sha256(repr(names).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def unwritten(count: int, model: ModelShape, size: int, device: torch.device) -> ExpertWeights:
    """``count`` experts of ``size``, all NaN: what nobody writes cannot pass for a weight."""
    shapes = ((count, 2 * size, model.hidden), (count, model.hidden, size))
    gate_up, down = (_nan(shape, model.weight_format, device) for shape in shapes)
    return ExpertWeights(gate_up, down)


def has_nan(rows: Rows) -> torch.Tensor:
    """bool [E], on the device: whether an expert's matrix [E, N, K] holds a NaN (bfloat16: or an
    infinity), looked at one expert at a time, since a mask of all would double the memory."""
    if isinstance(rows, Fp8Rows):
        bits = rows.data.view(torch.uint8)
        data = [(one & FP8_NAN == FP8_NAN).any() for one in bits]
        return torch.stack(data) | ~torch.isfinite(rows.scales).flatten(1).all(1)
    return torch.stack([~torch.isfinite(one).all() for one in rows])


@dataclass(frozen=True, slots=True)
class SeededWeights:
    """Random weights; matrices have unit gain (standard deviation 1 / sqrt(inputs)).

    model: the shape as it runs; plain_size: the model's own expert size, which the shape's may
    exceed by the padding of FP8 blocks; seed: run.seed.
    """

    model: ModelShape
    plain_size: int
    seed: int
    device: torch.device

    def layer(self, number: int, local_experts: Sequence[int]) -> LayerWeights:
        """The model's layer ``number`` with these experts (global logical ids)."""
        model = self.model
        shape = (model.num_experts, model.hidden)
        bias = None
        if model.router.bias:
            bias = 0.05 * self._randn((model.num_experts,), number, "bias")
        shared = None
        if model.num_shared_experts:
            plain = model.num_shared_experts * self.plain_size
            shared = self._experts(model.shared_size, plain, ["shared"], number)
        return LayerWeights(
            norm=(1 + 0.1 * self._randn((model.hidden,), number, "norm")).to(torch.bfloat16),
            gate=self._matrix(shape, number, "gate").to(torch.bfloat16),
            bias=bias,
            experts=self.experts(number, local_experts),
            shared=shared,
        )

    def experts(self, number: int, local_experts: Sequence[int]) -> ExpertWeights:
        """The routed experts alone."""
        return self._experts(self.model.expert_size, self.plain_size, local_experts, number)

    def _experts(
        self, size: int, plain: int, names: Sequence[object], number: int
    ) -> ExpertWeights:
        """Made one matrix at a time: a whole layer in float32 would not fit beside it."""
        hidden = self.model.hidden
        made = unwritten(len(names), self.model, size, self.device)
        for slot, name in enumerate(names):
            gate, up = self._matrix((2 * plain, hidden), number, "gate_up", name).chunk(2)
            down = self._matrix((hidden, plain), number, "down", name)
            put_expert(made, slot, gate, up, down)
        return made

    def _matrix(self, shape: tuple[int, int], *names: object) -> torch.Tensor:
        unit: torch.Tensor = self._randn(shape, *names) / shape[1] ** 0.5
        return unit

    def _randn(self, shape: tuple[int, ...], *names: object) -> torch.Tensor:
        made = generator(self.device, self.seed, *names)
        return torch.randn(shape, device=self.device, generator=made)


def part(target: Rows, slot: int, start: int, stop: int) -> Rows:
    """Rows start to stop of one expert's matrix [N, K], views; whole blocks where FP8."""
    if not isinstance(target, Fp8Rows):
        return target[slot, start:stop]
    blocks = target.scales[slot, start // GROUP : -(-stop // GROUP)]
    return Fp8Rows(target.data[slot, start:stop], blocks)


def put(target: Rows, matrix: Rows) -> None:
    """Write a matrix [N, K] into a target at least as large, and zeros around it.

    The matrix is FP8 with its block scales, or float values, which are brought into the target's
    format. Gate and up have a target each, so that a block scale never spans both.
    """
    if isinstance(target, Fp8Rows):
        made = matrix if isinstance(matrix, Fp8Rows) else quantize_block(matrix)
        _put_padded(target.data.view(torch.uint8), made.data.view(torch.uint8), 0)
        _put_padded(target.scales, made.scales, 1)
    else:
        _put_padded(target, dequantize_block(matrix) if isinstance(matrix, Fp8Rows) else matrix, 0)


def put_expert(target: ExpertWeights, slot: int, gate: Rows, up: Rows, down: Rows) -> None:
    """Write one expert's three matrices."""
    rows = _shape(target.gate_up)[1]
    put(part(target.gate_up, slot, 0, rows // 2), gate)
    put(part(target.gate_up, slot, rows // 2, rows), up)
    put(part(target.down, slot, 0, _shape(target.down)[1]), down)


def _put_padded(target: torch.Tensor, matrix: torch.Tensor, padding: int) -> None:
    rows, columns = matrix.shape
    target[:rows, :columns] = matrix
    target[:rows, columns:] = padding
    target[rows:] = padding


def _shape(rows: Rows) -> torch.Size:
    return (rows.data if isinstance(rows, Fp8Rows) else rows).shape


def _nan(shape: tuple[int, int, int], weight_format: str, device: torch.device) -> Rows:
    if weight_format == "bf16":
        return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
    data = torch.full(shape, FP8_NAN, dtype=torch.uint8, device=device)
    blocks = (shape[0], -(-shape[1] // GROUP), -(-shape[2] // GROUP))
    return Fp8Rows(data.view(torch.float8_e4m3fn), torch.full(blocks, torch.nan, device=device))

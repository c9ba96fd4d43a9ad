"""One expert in plain torch, with the formats of the fast path: what every member must compute."""

from __future__ import annotations

import torch

from epdecode.batch import Fp8Rows, Rows
from epdecode.kernels.fp8 import ScaleFormat, dequantize, dequantize_block, quantize_ref


def plain(rows: Rows) -> torch.Tensor:
    """float32 values of activation rows, whichever way they are held."""
    return dequantize(rows) if isinstance(rows, Fp8Rows) else rows.float()


def plain_weights(weights: Rows) -> torch.Tensor:
    """float32 values of a weight matrix, whichever way it is held."""
    return dequantize_block(weights) if isinstance(weights, Fp8Rows) else weights.float()


def expert_mlp(
    rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, scale_format: ScaleFormat | None
) -> torch.Tensor:
    """down @ (silu(gate @ x) * (up @ x)) for rows [n, H] of one expert; bfloat16 [n, H].

    rows, gate_up [2I, H] and down [H, I] are float32 values. Rounds where the fast path does: the
    gate-up output to bfloat16, the activation to FP8 when ``scale_format`` is 'fp32' or 'ue8m0'
    (None = bfloat16 weights, no FP8), the result to bfloat16.
    """
    both = (rows @ gate_up.T).to(torch.bfloat16).float()
    gate, up = both.chunk(2, dim=-1)
    activation = torch.nn.functional.silu(gate) * up
    if scale_format is None:
        activation = activation.to(torch.bfloat16).float()
    else:
        activation = dequantize(quantize_ref(activation, scale_format))
    return (activation @ down.T).to(torch.bfloat16)


def as_fp8_input(rows: torch.Tensor, scale_format: ScaleFormat | None) -> torch.Tensor:
    """float32 values of rows as the first GEMM sees them."""
    if scale_format is None:
        return rows
    return dequantize(quantize_ref(rows, scale_format))


def select(weights: Rows, expert: int) -> Rows:
    """One expert's matrix out of [E, N, K]."""
    if isinstance(weights, Fp8Rows):
        return Fp8Rows(weights.data[expert], weights.scales[expert])
    return weights[expert]

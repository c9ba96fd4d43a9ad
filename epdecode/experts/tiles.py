"""How triton_gemm's kernels are cut for a number of rows per expert."""

from __future__ import annotations

from epdecode.kernels.grouped_gemm import Tile


def token_tile(expected_rows: int) -> int:
    """Token rows of a tile: the power of two from 16 to 64 that holds the mean load."""
    return min(64, max(16, 1 << (expected_rows - 1).bit_length())) if expected_rows > 1 else 16


def grouped_tiles(expected_rows: int, fp8: bool) -> tuple[Tile, Tile]:
    """Tiles of gate_up_swiglu and of down, as measured on an H200 (docs/expert_chain.md)."""
    tokens = token_tile(expected_rows)
    if tokens <= 32:
        first = Tile(tokens=tokens, stages=4, warps=4, programs_per_sm=1)
        return first, Tile(tokens=tokens, stages=4, warps=4, programs_per_sm=2)
    first = Tile(tokens=tokens, stages=4, warps=8, programs_per_sm=1)
    return first, Tile(tokens=tokens, stages=3, warps=4, programs_per_sm=3)

"""Read memory once, or copy it: the measure of what this device's memory does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""int32 words one program takes at a time."""


@triton.jit
def _read_kernel(source, sums, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    block = program.to(tl.int64)
    while block < blocks:
        total ^= tl.load(source + block * BLOCK + lanes)
        block += tl.num_programs(0)
    tl.store(sums + program, tl.xor_sum(total, 0))


@triton.jit
def _copy_kernel(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))


def read_stream(source: torch.Tensor, sums: torch.Tensor) -> None:
    """Xor whole blocks of int32 ``source`` into ``sums``, int32 [programs], one word a program."""
    _read_kernel[(sums.numel(),)](source, sums, source.numel() // BLOCK, BLOCK=BLOCK, num_warps=8)


def copy_stream(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy whole blocks of int32 ``source`` to ``target`` of the same size."""
    _copy_kernel[(source.numel() // BLOCK,)](source, target, BLOCK=BLOCK, num_warps=8)


def read_stream_ref(source: torch.Tensor, sums: torch.Tensor) -> None:
    """What ``read_stream`` writes, in plain torch."""
    programs = sums.numel()
    blocks = source[: source.numel() // BLOCK * BLOCK].view(-1, BLOCK)
    for program in range(programs):
        mine = blocks[program::programs].reshape(-1)
        bits = (mine.view(-1, 1) >> torch.arange(32, device=mine.device)) & 1
        parity = bits.sum(0) % 2
        word = (parity << torch.arange(32, device=mine.device)).sum()
        sums[program] = word.where(word < 2**31, word - 2**32)

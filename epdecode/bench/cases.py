"""What a kernel bench case is, and how loads and cold buffer sets are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from epdecode.batch import Fp8Rows
from epdecode.bench.kernel_shapes import Shape
from epdecode.kernels.fp8 import dequantize

Call = Callable[[], object]
POISON = 0x55
"""Byte that fills outputs before a check: what nobody may write must still hold it afterwards."""


@dataclass(frozen=True, slots=True)
class Built:
    """A case with its tensors.

    calls: the fused kernel, one per buffer set. plain: the unfused way in plain torch over the
    valid rows. padded: the same over the whole padded block, None where there is no padding.
    difference: "" when the kernel gives what its plain twin gives, else what is wrong.
    """

    calls: tuple[Call, ...]
    plain: Call
    padded: Call | None
    difference: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: an op on a shape, the bytes one call must move, how to build it."""

    op: str
    shape: Shape
    num_bytes: int
    build: Callable[[torch.device, int], Built]


def expert_counts(experts: int, capacity: int, live: int, load: str) -> list[int]:
    """Valid rows per expert, none above ``capacity``.

    even: the same for all, the first ones take the rest. skew: as 1 / rank. one: all on expert 0.
    What a full expert cannot take is lost, as in a masked batch.
    """
    if load == "even":
        wanted = [live // experts + (expert < live % experts) for expert in range(experts)]
    elif load == "skew":
        total = sum(1 / (expert + 1) for expert in range(experts))
        wanted = [int(live / (expert + 1) / total) for expert in range(experts)]
        for expert in range(live - sum(wanted)):
            wanted[expert % experts] += 1
    else:
        wanted = [live] + [0] * (experts - 1)
    return [min(rows, capacity) for rows in wanted]


def windows(
    shape: tuple[int, int, int], most: int, sets: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """``sets`` dense [E, M, N] tensors over few allocations.

    A call touches the first ``most`` rows of each expert's block only. Neighbouring tensors start
    ``most`` rows apart in shared memory, so what they touch does not overlap.
    """
    experts, capacity, size = shape
    each = max(1, capacity // max(1, most))
    block = experts * capacity * size
    found: list[torch.Tensor] = []
    while len(found) < sets:
        pool = torch.empty(block + capacity * size, dtype=dtype, device=device)
        for window in range(min(each, sets - len(found))):
            offset = window * most * size
            strides = (capacity * size, size, 1)
            found.append(pool.as_strided(shape, strides, offset))
    return found


def quantized_difference(got: Fp8Rows, want: Fp8Rows, exact: bool) -> str:
    """How two quantised outputs differ: by any byte, or when not ``exact`` by too much.

    Triton's interpreter loses the carry when rounding to e4m3: about 3% of its values come out
    one FP8 step off or halved, so there all values must be within half and 95% within a step,
    give or take eight values.
    """
    if exact:
        parts = {"scales": (got.scales, want.scales), "data": (got.data, want.data)}
        return "; ".join(f"{name} differ" for name, pair in parts.items() if not _same_bytes(*pair))
    mine, theirs = dequantize(got), dequantize(want)
    atol = float(theirs.abs().max()) / 448 * 2**-8
    far = ~torch.isclose(mine, theirs, rtol=0.55, atol=atol)
    off = ~torch.isclose(mine, theirs, rtol=2**-3, atol=atol)
    wrong = far.any() or int(off.sum()) > 0.05 * off.numel() + 8
    return f"{int(off.sum())} of {off.numel()} values are off" if wrong else ""


def _same_bytes(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bit for bit; a view of the same element size takes any strides."""
    whole = {1: torch.uint8, 4: torch.int32}[got.element_size()]
    return torch.equal(got.view(whole), want.view(whole))

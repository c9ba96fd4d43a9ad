"""The nouns of the decode layer. Shape letters, used in every file:

T tokens of this rank, K experts per token (top_k), H hidden size, I expert (intermediate) size,
E local experts, M rows an expert can receive (capacity), R received rows, G = 128 (FP8 group).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T_co = TypeVar("T_co", covariant=True)

Mark = Callable[[str], None]
"""``mark(stage)`` notes that ``stage`` has just been enqueued on the current stream."""


def no_mark(stage: str) -> None:
    """The mark of an uninstrumented step."""


@dataclass(frozen=True, slots=True)
class Route:
    """Which experts each token goes to.

    topk_ids: int64 [T, K], global (physical) expert ids, -1 = no expert in this slot.
    topk_weights: float32 [T, K]; the weight of a -1 slot is never read.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows quantised in groups of 128 along the last dimension.

    data: float8_e4m3fn [..., H].
    scales: float32 [..., H/128], or int32 [..., H/512] of four packed UE8M0 exponents, low byte
    first. Strides are the producer's: DeepGEMM wants them MN-major (token dimension contiguous).
    """

    data: torch.Tensor
    scales: torch.Tensor


Rows = torch.Tensor | Fp8Rows
"""Rows on the wire or in front of a GEMM: bfloat16 tensor or quantised."""


@dataclass(frozen=True, slots=True)
class MaskedBatch:
    """Received rows, one fixed-capacity block per local expert (the masked grouped GEMM's input).

    rows: [E, M, H]; rows past counts[e] hold anything and are never read.
    counts: int32 [E], on the device: it is not known on the host.
    expected_rows: host hint, mean rows per expert; picks a tile shape, never bounds correctness.
    handle: the transport's own, for the way back.
    """

    rows: Rows
    counts: torch.Tensor
    expected_rows: int
    handle: Any = None


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Received rows sorted by local expert (the contiguous grouped GEMM's input).

    rows: [R, H], each expert's block starting at a multiple of the GEMM's row alignment.
    labels: int32 [R], local expert id of each row, -1 in gaps and in the tail.
    counts: int32 [E], rows per local expert, on the device.
    expected_rows: host hint, mean rows per expert; picks a tile shape, never bounds correctness.
    handle: the transport's own, for the way back.
    """

    rows: Rows
    labels: torch.Tensor
    counts: torch.Tensor
    expected_rows: int
    handle: Any = None


Batch = MaskedBatch | PackedBatch


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One layer's local experts, gate rows first in ``gate_up``.

    gate_up: [E, 2I, H], down: [E, H, I]; bfloat16, or FP8 with float32 scales per 128x128 block.
    """

    gate_up: Rows
    down: Rows


class Pending(Generic[T_co]):
    """Something under way; ``wait()`` enqueues (or does) the rest and gives the value.

    Hides event, hook and Work, so that serial and overlapped order are the same code.
    """

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], T_co]) -> None:
        self._finish = finish

    def wait(self) -> T_co:
        """Complete and return the value. Call exactly once."""
        return self._finish()


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """bfloat16 [T, H] each. out: what the layer adds; hidden: the stream after it; normed: the
    next layer's input, ``hidden`` itself where no norm follows.
    """

    out: torch.Tensor
    hidden: torch.Tensor
    normed: torch.Tensor

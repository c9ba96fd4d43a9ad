"""The FP8 rule, in plain torch: the only owner of how values become e4m3 and scales.

Groups of 128 along the last dimension; amax = max(largest magnitude, 1e-4); scale = amax / 448;
UE8M0 rounds the scale UP to a power of two before anything is quantised; data = clamp(x / scale)
cast to e4m3. x / scale is taken as x * (448 / amax), one division a group, so that the kernels
can give the same bytes. A non-finite value stays non-finite when dequantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from epdecode.batch import Fp8Rows
from epdecode.errors import ConfigError, nearest

GROUP = 128
FP8_MAX = 448.0
AMAX_FLOOR = 1e-4
SCALES_PER_WORD = 4
MN_ALIGNMENT = 4
"""Rows to which DeepGEMM pads a column of scales: 16 bytes of float32 or int32 (its TMA stride)."""
ONE_UE8M0 = 0x7F7F7F7F
"""Four UE8M0 scales of one; what padding lanes hold until something is written there."""

ScaleFormat = Literal["fp32", "ue8m0"]
SCALE_FORMATS: tuple[ScaleFormat, ...] = ("fp32", "ue8m0")


def num_groups(size: int, what: str = "last dimension") -> int:
    """Groups in ``size`` values; refuses a size that is not whole groups."""
    if size % GROUP or size == 0:
        below = size // GROUP * GROUP
        near = f"{below} or {below + GROUP}" if below else str(GROUP)
        raise ConfigError(
            f"FP8 quantisation: {what} is {size}; accepted: multiples of {GROUP} (one scale per "
            f"{GROUP} values); nearest: {near}"
        )
    return size // GROUP


def check_scale_format(scale_format: str) -> None:
    """Refuse an unknown scale format."""
    if scale_format not in SCALE_FORMATS:
        raise ConfigError(
            f"scale_format: got {scale_format!r}, accepted: {', '.join(SCALE_FORMATS)}"
            f"{nearest(scale_format, SCALE_FORMATS)}"
        )


def scale_words(groups: int, scale_format: str) -> int:
    """Elements of the scale tensor's last dimension: one per group, or one int32 per four."""
    check_scale_format(scale_format)
    return groups if scale_format == "fp32" else -(-groups // SCALES_PER_WORD)


def scale_dtype(scale_format: str) -> torch.dtype:
    """float32, or int32 of four packed exponents."""
    check_scale_format(scale_format)
    return torch.float32 if scale_format == "fp32" else torch.int32


def round_up_to_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """The least power of two not below each positive float32 (normal range), by its bits."""
    bits = scales.view(torch.int32)
    return (((bits + 0x7FFFFF) >> 23) << 23).view(torch.float32)


def group_scales(amax: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (scale, factor) for each group's largest magnitude; data = x * factor.

    Divides by a tensor: torch turns division by a Python number into a product on the GPU.
    """
    check_scale_format(scale_format)
    amax = amax.clamp(min=AMAX_FLOOR)
    most = torch.full_like(amax, FP8_MAX)
    scales = amax / most
    if scale_format == "fp32":
        return scales, most / amax
    scales = round_up_to_power_of_two(scales)
    return scales, torch.ones_like(scales) / scales


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Clamp to +-448 and cast (round to nearest even)."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def largest_magnitude(values: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """amax over ``dims``, kept, that overlooks NaN: NaN values turn into NaN one by one."""
    return values.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(list(dims), keepdim=True)


def quantize_ref(x: torch.Tensor, scale_format: ScaleFormat = "fp32") -> Fp8Rows:
    """x [..., H] -> e4m3 [..., H] with contiguous scales [..., H/128] or packed [..., H/512]."""
    groups = num_groups(x.shape[-1])
    grouped = x.float().unflatten(-1, (groups, GROUP))
    scales, factor = group_scales(largest_magnitude(grouped, [-1]), scale_format)
    data = to_e4m3(grouped * factor).flatten(-2)
    scales = scales.squeeze(-1)
    return Fp8Rows(data, scales if scale_format == "fp32" else _pack_exponents(scales))


def dequantize(rows: Fp8Rows) -> torch.Tensor:
    """float32 [..., H] = data * scale; tells packed scales by their dtype, takes any strides."""
    groups = num_groups(rows.data.shape[-1])
    scales = rows.scales
    if scales.dtype == torch.int32:
        scales = unpack_ue8m0(scales)[..., :groups]
    values: torch.Tensor = rows.data.float().unflatten(-1, (groups, GROUP)) * scales[..., None]
    return values.flatten(-2)


def quantize_block(weights: torch.Tensor) -> Fp8Rows:
    """weights [..., N, K] -> e4m3 of the same shape, one float32 scale per 128x128 block.

    Scales [..., ceil(N/128), ceil(K/128)]; blocks at the edge are smaller.
    """
    rows, columns = weights.shape[-2:]
    blocks = _as_blocks(weights.float())
    scales, factor = group_scales(largest_magnitude(blocks, [-3, -1]), "fp32")
    data = to_e4m3(blocks * factor).flatten(-4, -3).flatten(-2)[..., :rows, :columns]
    return Fp8Rows(data.contiguous(), scales[..., 0, :, 0].contiguous())


def dequantize_block(rows: Fp8Rows) -> torch.Tensor:
    """float32 [..., N, K] = data * its block's scale (a checkpoint's weight_scale_inv is this)."""
    num_rows, columns = rows.data.shape[-2:]
    blocks = _as_blocks(rows.data.float()) * rows.scales[..., :, None, :, None]
    return blocks.flatten(-4, -3).flatten(-2)[..., :num_rows, :columns].contiguous()


def _as_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """[..., N, K] -> [..., N/128, 128, K/128, 128], zeros in what an edge block lacks."""
    rows, columns = matrix.shape[-2:]
    matrix = torch.nn.functional.pad(matrix, (0, -columns % GROUP, 0, -rows % GROUP))
    blocks: torch.Tensor = matrix.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    return blocks


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """float32 powers of two [..., G] -> int32 [..., ceil(G/4)], low byte first, zero bytes past G.

    Raises ConfigError for a scale that is not a normal power of two: dropping its mantissa would
    shrink it by up to half, silently. An infinite scale becomes byte 255, UE8M0's NaN.
    """
    bits = scales.float().contiguous().view(torch.int32)
    exponents = bits >> 23
    wrong = (bits & 0x7FFFFF != 0) | (exponents <= 0)
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise ConfigError(
            f"pack_ue8m0: scales{at} is {scales[tuple(at)].item():.9g}; accepted: powers of two "
            f"from 2^-126 to 2^127; round up with round_up_to_power_of_two before quantising"
        )
    return _pack_exponents(scales)


def _pack_exponents(scales: torch.Tensor) -> torch.Tensor:
    """pack_ue8m0 for scales that are powers of two already; asks nothing of the host."""
    exponents = scales.float().contiguous().view(torch.int32) >> 23
    exponents = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % SCALES_PER_WORD))
    return exponents.to(torch.uint8).contiguous().view(torch.int32)


def unpack_ue8m0(packed: torch.Tensor) -> torch.Tensor:
    """int32 [..., W], any strides -> float32 [..., 4W]; a zero byte (padding) gives 0."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=packed.device)
    exponents = (packed[..., None] >> shifts) & 0xFF
    return (exponents << 23).view(torch.float32).flatten(-2)


def mn_major_scales(
    local: int,
    rows: int,
    groups: int,
    scale_format: ScaleFormat = "fp32",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A scale tensor [local, rows, words] in DeepGEMM's layout: the row dimension contiguous.

    float32 with words = groups (SM90), or int32 with words = ceil(groups / 4) (SM100). Strides
    (words * A, 1, A) with A = rows padded to 16 bytes. Every lane starts as a scale of one.
    """
    words = scale_words(groups, scale_format)
    aligned = -(-rows // MN_ALIGNMENT) * MN_ALIGNMENT
    one = 1.0 if scale_format == "fp32" else ONE_UE8M0
    storage = torch.full(
        (local, words, aligned), one, dtype=scale_dtype(scale_format), device=device
    )
    return storage.transpose(1, 2)[:, :rows]

"""The whole expert chain in one persistent kernel for Hopper: gate-up, SwiGLU, quantisation, down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from epdecode.batch import ExpertWeights, Fp8Rows
from epdecode.kernels.launch import persistent_programs, power_of_two
from epdecode.kernels.quant_math import group_scale, silu_mul


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _fence_proxies():
    """Order ordinary global accesses against bulk copies of other programs."""
    gl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_acquire(pointer):
    return gl.inline_asm_elementwise("ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [pointer.to(gl.uint64)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    wrapped = stage + 1 == STAGES
    return gl.where(wrapped, 0, stage + 1), phase ^ wrapped.to(gl.int32)


@gluon.jit
def _load_counts(counts, E: gl.constexpr, E_POW2: gl.constexpr, TOKENS: gl.constexpr):
    """Expert ids, their rows and the running total of their token tiles, int32 [E_POW2], one warp."""
    layout: gl.constexpr = gl.BlockedLayout([E_POW2 // 32], [32], [1], [0])
    experts = gl.arange(0, E_POW2, layout=layout)
    rows = gl.load(counts + experts, mask=experts < E, other=0)
    return experts, rows, gl.associative_scan((rows + TOKENS - 1) // TOKENS, 0, _add)


@gluon.jit
def _locate(tile, experts, rows, ends, J1: gl.constexpr, J2: gl.constexpr):
    """(is down, expert, column, token tile, rows of the expert)"""
    token_tiles = gl.max(ends, 0)
    down = tile >= token_tiles * J1
    columns = gl.where(down, J2, J1)
    index = gl.where(down, tile - token_tiles * J1, tile)
    before = ends * columns <= index
    expert = gl.sum(before.to(gl.int32), 0)
    start = gl.max(gl.where(before, ends, 0), 0)
    count = gl.sum(gl.where(experts == expert, rows, 0), 0)
    mine = gl.sum(gl.where(experts == expert, ends, 0), 0) - start
    local = index - start * columns
    return down, expert, local // mine, local % mine, count


@gluon.jit
def _post(schedule, slot, expert, column, token_tile, count):
    """Tell the other warps which tile comes next; expert < 0 ends the work."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    schedule.index(4 * slot).store(gl.full([1], expert, gl.int32, layout=one))
    schedule.index(4 * slot + 1).store(gl.full([1], column, gl.int32, layout=one))
    schedule.index(4 * slot + 2).store(gl.full([1], token_tile, gl.int32, layout=one))
    schedule.index(4 * slot + 3).store(gl.full([1], count, gl.int32, layout=one))


@gluon.jit
def _next_tile(tickets, total):
    """Take the next tile; whoever takes the last ticket winds the counter back."""
    programs = gl.num_programs(0)
    ticket = gl.atomic_add(tickets, 1, sem="relaxed")
    active = gl.minimum(programs, total)
    last = gl.maximum(total - programs, 0) + active - 1
    if ticket == last:
        gl.store(tickets, 0)
    return programs + ticket


@gluon.jit
def _load_weights(
    w1, w2, counts, tickets, weights, full, empty, schedule, schedule_full, schedule_empty,
    E: gl.constexpr, E_POW2: gl.constexpr, H: gl.constexpr, I: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    J1: gl.constexpr = I // 128
    J2: gl.constexpr = H // 256
    experts, rows, ends = _load_counts(counts, E, E_POW2, TOKENS)
    total = gl.max(ends, 0) * (J1 + J2)
    tile = gl.program_id(0)
    stage = 0
    phase = 1
    slot = 0
    slot_phase = 1
    while tile < total:
        down, expert, column, token_tile, count = _locate(tile, experts, rows, ends, J1, J2)
        mbarrier.wait(schedule_empty.index(slot), slot_phase)
        _post(schedule, slot, expert, column + down.to(gl.int32) * J1, token_tile, count)
        mbarrier.arrive(schedule_full.index(slot), count=1)
        slot, slot_phase = _advance(slot, slot_phase, SLOTS)
        if down:
            row = expert * H + column * 256
            for step in range(I // 128):
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, 2 * 128 * 128)
                tma.async_copy_global_to_shared(w2, [row, step * 128], bar, weights.index(2 * stage))
                tma.async_copy_global_to_shared(w2, [row + 128, step * 128], bar, weights.index(2 * stage + 1))
                stage, phase = _advance(stage, phase, STAGES)
        else:
            row = expert * (2 * I) + column * 128
            for step in range(H // 128):
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, 2 * 128 * 128)
                tma.async_copy_global_to_shared(w1, [row, step * 128], bar, weights.index(2 * stage))
                tma.async_copy_global_to_shared(w1, [row + I, step * 128], bar, weights.index(2 * stage + 1))
                stage, phase = _advance(stage, phase, STAGES)
        tile = _next_tile(tickets, total)
    mbarrier.wait(schedule_empty.index(slot), slot_phase)
    _post(schedule, slot, -1, 0, 0, 0)
    mbarrier.arrive(schedule_full.index(slot), count=1)


@gluon.jit
def _take(schedule, schedule_full, schedule_empty, slot, slot_phase):
    """(expert, column, token tile, rows of the expert) of the next tile."""
    warps: gl.constexpr = gl.num_warps()
    one: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    mbarrier.wait(schedule_full.index(slot), slot_phase)
    expert = gl.max(schedule.index(4 * slot).load(one), 0)
    column = gl.max(schedule.index(4 * slot + 1).load(one), 0)
    token_tile = gl.max(schedule.index(4 * slot + 2).load(one), 0)
    count = gl.max(schedule.index(4 * slot + 3).load(one), 0)
    gl.thread_barrier()
    mbarrier.arrive(schedule_empty.index(slot), count=1)
    return expert, column, token_tile, count


@gluon.jit
def _load_tokens(
    x, act, ready, tokens, full, empty, schedule, schedule_full, schedule_empty,
    M: gl.constexpr, H: gl.constexpr, I: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    J1: gl.constexpr = I // 128
    J2: gl.constexpr = H // 256
    stage = 0
    phase = 1
    slot = 0
    slot_phase = 0
    expert, column, token_tile, count = _take(
        schedule, schedule_full, schedule_empty, slot, slot_phase
    )
    while expert >= 0:
        slot, slot_phase = _advance(slot, slot_phase, SLOTS)
        down = column >= J1
        row = expert * M + token_tile * TOKENS
        if down:
            flag = ready + expert * ((M + TOKENS - 1) // TOKENS) + token_tile
            while _load_acquire(flag) < J1:
                pass
            _fence_proxies()
            if gl.atomic_add(flag, 1, sem="relaxed") == J1 + J2 - 1:
                gl.store(flag, 0)
            for step in range(I // 128):
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(full.index(stage), TOKENS * 128)
                tma.async_copy_global_to_shared(act, [row, step * 128], full.index(stage), tokens.index(stage))
                stage, phase = _advance(stage, phase, STAGES)
        else:
            for step in range(H // 128):
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(full.index(stage), TOKENS * 128)
                tma.async_copy_global_to_shared(x, [row, step * 128], full.index(stage), tokens.index(stage))
                stage, phase = _advance(stage, phase, STAGES)
        expert, column, token_tile, count = _take(
            schedule, schedule_full, schedule_empty, slot, slot_phase
        )


@gluon.jit
def _accumulate(
    a, b, weights, tokens, full, empty, stage, phase, x_scale_at, x_valid, stride_g, scale_a, scale_b,
    STEPS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    zeros = gl.zeros([128, TOKENS], gl.float32, layout=mma)
    mbarrier.wait(full.index(stage), phase)
    x_next = gl.load(x_scale_at, mask=x_valid, other=0.0, cache_modifier=".cg")
    a_next = gl.load(scale_a)
    b_next = gl.load(scale_b)
    for step in range(STEPS):
        x_scale = x_next
        a_scale = a_next
        b_scale = b_next
        more = step + 1 < STEPS
        x_scale_at += stride_g
        x_next = gl.load(x_scale_at, mask=x_valid & more, other=0.0, cache_modifier=".cg")
        a_next = gl.load(scale_a + step + 1, mask=more, other=0.0)
        b_next = gl.load(scale_b + step + 1, mask=more, other=0.0)
        mbarrier.wait(full.index(stage), phase)
        x_tile = tokens.index(stage).permute((1, 0))
        w_a = weights.index(2 * stage)
        w_b = weights.index(2 * stage + 1)
        if OVERLAP:
            part_a = warpgroup_mma(w_a, x_tile, zeros, use_acc=False, is_async=True)
            part_b = warpgroup_mma(w_b, x_tile, zeros, use_acc=False, is_async=True)
            part_a = warpgroup_mma_wait(1, deps=[part_a])
            a += part_a * (x_scale * a_scale)[None, :]
            part_b = warpgroup_mma_wait(0, deps=[part_b])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            b += part_b * (x_scale * b_scale)[None, :]
        else:
            part_a = warpgroup_mma(w_a, x_tile, zeros, use_acc=False)
            a += part_a * (x_scale * a_scale)[None, :]
            part_b = warpgroup_mma(w_b, x_tile, zeros, use_acc=False)
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            b += part_b * (x_scale * b_scale)[None, :]
        stage, phase = _advance(stage, phase, STAGES)
    return a, b, stage, phase


@gluon.jit
def _store(out, values, tokens_first, count, columns, wide: gl.constexpr, TOKENS: gl.constexpr, ):
    """values [128, TOKENS] -> out[token, 128 columns from its pointer]; out is at row 0 of the tile."""
    values = gl.convert_layout(values.permute((1, 0)), wide)
    row = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, wide))
    col = gl.arange(0, 128, layout=gl.SliceLayout(0, wide))
    gl.store(out + row[:, None] * columns + col[None, :], values, mask=(row + tokens_first < count)[:, None])


@gluon.jit
def _consume(
    x_scales, w1_scales, w2_scales, ready, act, act_scales, out,
    x_stride_e, x_stride_m, x_stride_g, a_stride_e, a_stride_m, a_stride_g,
    weights, tokens, full, empty, schedule, schedule_full, schedule_empty,
    M: gl.constexpr, H: gl.constexpr, I: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, OVERLAP: gl.constexpr,
    POW2: gl.constexpr,
):  # fmt: skip
    J1: gl.constexpr = I // 128
    J2: gl.constexpr = H // 256
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, TOKENS, 32])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, mma))
    expert, column, token_tile, count = _take(
        schedule, schedule_full, schedule_empty, slot, slot_phase
    )
    while expert >= 0:
        slot, slot_phase = _advance(slot, slot_phase, SLOTS)
        down = column >= J1
        column = gl.where(down, column - J1, column)
        first = token_tile * TOKENS
        at = token + first
        valid = at < count
        a = gl.zeros([128, TOKENS], gl.float32, layout=mma)
        b = gl.zeros([128, TOKENS], gl.float32, layout=mma)
        if down:
            scale_a = w2_scales + (expert * (H // 128) + column * 2) * (I // 128)
            scale_at = act_scales + expert.to(gl.int64) * a_stride_e + at * a_stride_m
            a, b, stage, phase = _accumulate(
                a, b, weights, tokens, full, empty, stage, phase, scale_at, valid, a_stride_g,
                scale_a, scale_a + I // 128, I // 128, TOKENS, STAGES, OVERLAP, mma)  # fmt: skip
            out_at = out + (expert.to(gl.int64) * M + first) * H + column * 256
            _store(out_at, a.to(gl.bfloat16), first, count, H, wide, TOKENS)
            _store(out_at + 128, b.to(gl.bfloat16), first, count, H, wide, TOKENS)
        else:
            scale_a = w1_scales + (expert * (2 * I // 128) + column) * (H // 128)
            scale_at = x_scales + expert.to(gl.int64) * x_stride_e + at * x_stride_m
            a, b, stage, phase = _accumulate(
                a, b, weights, tokens, full, empty, stage, phase, scale_at, valid, x_stride_g,
                scale_a, scale_a + (I // 128) * (H // 128), H // 128, TOKENS, STAGES, OVERLAP, mma)  # fmt: skip
            a = silu_mul(a, b)
            scale, factor = group_scale(gl.max(gl.abs(a), 0), POW2)
            if POW2:
                scale = (scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)
            a = tl.clamp(a * factor[None, :], -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            gl.store(act_scales + expert.to(gl.int64) * a_stride_e + at * a_stride_m + column * a_stride_g, scale, mask=valid)
            act_at = act + (expert.to(gl.int64) * M + first) * I + column * 128
            _store(act_at, a.to(gl.float8e4nv), first, count, I, wide, TOKENS)
            _fence_proxies()
            gl.thread_barrier()
            gl.atomic_add(ready + expert * ((M + TOKENS - 1) // TOKENS) + token_tile, 1, sem="release")
        expert, column, token_tile, count = _take(
            schedule, schedule_full, schedule_empty, slot, slot_phase
        )


@gluon.jit
def _chain_kernel(
    x, w1, act_rows, w2, x_scales, w1_scales, w2_scales, counts, tickets, ready, act, act_scales, out,
    x_stride_e, x_stride_m, x_stride_g, a_stride_e, a_stride_m, a_stride_g,
    E: gl.constexpr, E_POW2: gl.constexpr, M: gl.constexpr, H: gl.constexpr, I: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, POW2: gl.constexpr,
):  # fmt: skip
    SLOTS: gl.constexpr = 2
    weights = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], w1.layout)
    tokens = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TOKENS, 128], x.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    schedule = gl.allocate_shared_memory(gl.int32, [4 * SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    schedule_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    schedule_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(schedule_full.index(i), count=1)
        mbarrier.init(schedule_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_consume, (
                x_scales, w1_scales, w2_scales, ready, act, act_scales, out,
                x_stride_e, x_stride_m, x_stride_g, a_stride_e, a_stride_m, a_stride_g,
                weights, tokens, full, empty, schedule, schedule_full, schedule_empty,
                M, H, I, TOKENS, STAGES, SLOTS, OVERLAP, POW2,
            )),
            (_load_weights, (
                w1, w2, counts, tickets, weights, full, empty, schedule, schedule_full, schedule_empty,
                E, E_POW2, H, I, TOKENS, STAGES, SLOTS,
            )),
            (_load_tokens, (
                x, act_rows, ready, tokens, full, empty, schedule, schedule_full, schedule_empty,
                M, H, I, TOKENS, STAGES, SLOTS,
            )),
        ],
        [1, 1],
        [40, 40],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainTile:
    """How the fused chain is cut: 256 weight rows times ``tokens`` rows of one expert."""

    tokens: int = 16
    stages: int = 6
    overlap: bool = True


@dataclass(frozen=True, slots=True)
class ChainSpace:
    """act and the counters."""

    act: Fp8Rows
    tickets: torch.Tensor
    ready: torch.Tensor


def _described(rows, block_rows):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    flat = rows.view(-1, rows.shape[-1])
    return TensorDescriptor.from_tensor(flat, [block_rows, 128], layout)


def expert_chain(x: Fp8Rows, weights: ExpertWeights, counts, space: ChainSpace, out, tile: ChainTile, programs=None):
    experts, capacity, hidden = x.data.shape
    size = space.act.data.shape[-1]
    grid = programs or persistent_programs(x.data.device, 1, 1 << 30)
    return _chain_kernel[(grid,)](
        _described(x.data, tile.tokens), _described(weights.gate_up.data, 128),
        _described(space.act.data, tile.tokens), _described(weights.down.data, 128),
        x.scales, weights.gate_up.scales, weights.down.scales, counts, space.tickets, space.ready,
        space.act.data, space.act.scales, out, *x.scales.stride(), *space.act.scales.stride(),
        E=experts, E_POW2=max(32, power_of_two(experts)), M=capacity, H=hidden, I=size,
        TOKENS=tile.tokens, STAGES=tile.stages, OVERLAP=tile.overlap, POW2=False, num_warps=8,
    )  # fmt: skip

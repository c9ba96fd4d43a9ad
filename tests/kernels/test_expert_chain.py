"""The fused chain's program under a CPU stand-in for Gluon: right rows, no hang, clean counters.

Speed, layouts and memory ordering need the GPU: tests/experts/test_triton_gemm.py --gpu.
"""

from __future__ import annotations

import pytest
import torch

from epdecode.batch import ExpertWeights, Fp8Rows
from epdecode.errors import ConfigError
from epdecode.kernels.fp8 import (
    dequantize,
    dequantize_block,
    mn_major_scales,
    quantize_block,
    quantize_ref,
)
from tests.fakes.gluon import Machine, load_kernels
from tests.fakes.gluon_memory import Descriptor, Pointer

EXPERTS, CAPACITY, HIDDEN, SIZE = 3, 132, 512, 256


def rows_of(counts):
    """Quantised random rows; NaN past the counts."""
    shape = (EXPERTS, CAPACITY, HIDDEN)
    data = torch.full(shape, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = mn_major_scales(EXPERTS, CAPACITY, HIDDEN // 128).fill_(torch.nan)
    for expert, count in enumerate(counts):
        made = quantize_ref(torch.randn(count, HIDDEN))
        data[expert, :count], scales[expert, :count] = made.data, made.scales
    return Fp8Rows(data, scales)


def scale_matrix(scales):
    return scales.transpose(1, 2).reshape(-1, CAPACITY)


class Launch:
    """One space and one set of weights, launched again and again."""

    def __init__(self, tokens, narrow, splits=1, places=0):
        self.tokens, self.narrow = tokens, narrow
        self.splits, self.places = splits, places
        self.gate_up = quantize_block(torch.randn(EXPERTS, 2 * SIZE, HIDDEN) / HIDDEN**0.5)
        self.down = quantize_block(torch.randn(EXPERTS, HIDDEN, SIZE) / SIZE**0.5)
        self.act = torch.zeros(EXPERTS, CAPACITY, SIZE).to(torch.float8_e4m3fn)
        self.act_scales = torch.zeros(EXPERTS, SIZE // 128, CAPACITY)
        self.tickets = torch.zeros(1, dtype=torch.int32)
        flags = EXPERTS * -(-CAPACITY // 16) * (SIZE // 128 + 1)
        self.ready = torch.zeros(flags, dtype=torch.int32)
        self.partials = torch.full((max(1, places * (splits - 1)), 256 * tokens), torch.nan)
        self.arrived = torch.zeros(2 * max(1, places), dtype=torch.int32)

    def __call__(self, x, counts, programs):
        """bfloat16 [E, M, H], 9 where nothing was written."""
        out = torch.full((EXPERTS, CAPACITY, HIDDEN), 9.0, dtype=torch.bfloat16)
        machine = Machine(programs, seed=sum(counts))
        kernels = load_kernels(
            machine, *(f"expert_chain{part}.py" for part in (
                "_shape", "_tiles", "_load", "_sums", "_weights_left", "_rows_left", "_math", "",
            )),
        )  # fmt: skip
        rows = min(self.tokens, 64)
        box, lanes = (rows, 128), (1, max(32, rows))
        machine.launch(
            kernels._chain_kernel,
            Descriptor(x.data.view(-1, HIDDEN), box),
            Descriptor(scale_matrix(x.scales), lanes),
            Descriptor(self.gate_up.data.view(-1, HIDDEN), (64, 128)),
            Descriptor(self.act.view(-1, SIZE), box),
            Descriptor(self.act_scales.view(-1, CAPACITY), lanes),
            Descriptor(self.down.data.view(-1, SIZE), (64, 128)),
            Pointer(self.gate_up.scales.view(-1)), Pointer(self.down.scales.view(-1)),
            Pointer(torch.tensor(counts, dtype=torch.int32)),
            Pointer(self.tickets), Pointer(self.ready), Pointer(self.partials),
            Pointer(self.arrived), Pointer(self.act), Pointer(self.act_scales), Pointer(out),
            EXPERTS, 32, CAPACITY, HIDDEN, SIZE, self.tokens, 3, self.narrow,
            self.splits, self.places,
        )  # fmt: skip
        return out

    def expected(self, x, expert, count):
        head = Fp8Rows(x.data[expert, :count], x.scales[expert, :count])
        gate_up, down = dequantize_block(self.gate_up)[expert], dequantize_block(self.down)[expert]
        gate, up = (dequantize(head) @ gate_up.T).chunk(2, dim=-1)
        act = dequantize(quantize_ref(torch.nn.functional.silu(gate) * up))
        return act @ down.T


LOADS = (([7, 0, 40], 3), ([0, 0, 0], 2), ([64, 130, 1], 5), ([0, 33, 0], 40))
"""Rows of each expert, programs."""


def check(launch, counts, programs):
    x = rows_of(counts)
    out = launch(x, counts, programs)
    for counter in (launch.tickets, launch.ready, launch.arrived):
        assert not counter.any()
    for expert, count in enumerate(counts):
        want = launch.expected(x, expert, count)
        error = (out[expert, :count].float() - want).norm() / (want.norm() + 1e-9)
        assert error < 0.02
        assert (out[expert, count:] == 9.0).all()
    return out


@pytest.mark.parametrize(
    ("tokens", "narrow"), [(16, False), (16, True), (32, True), (64, False), (128, False)]
)
def test_the_program(tokens, narrow):
    launch = Launch(tokens, narrow)
    for counts, programs in LOADS:
        check(launch, counts, programs)


@pytest.mark.parametrize(("tokens", "narrow"), [(16, True), (64, False), (128, False)])
@pytest.mark.parametrize("splits", [2, 4])
def test_parts_of_k(tokens, narrow, splits):
    launch = Launch(tokens, narrow, splits=splits, places=24)
    for counts, programs in LOADS:
        check(launch, counts, programs)
    assert not launch.partials.isnan().all()


def test_the_order_of_arrival_changes_nothing():
    launch = Launch(16, narrow=True, splits=4, places=24)
    x = rows_of([7, 0, 40])
    first = launch(x, [7, 0, 40], 3)
    for programs in (1, 2, 7, 30):
        assert torch.equal(first, launch(x, [7, 0, 40], programs))


@pytest.mark.parametrize(("places", "split"), [(8, True), (7, False)])
def test_tiles_without_places_are_not_split(places, split):
    launch = Launch(16, narrow=True, splits=2, places=places)
    check(launch, [7, 0, 40], 3)
    assert launch.partials.isnan().all() == (not split)


def test_narrow_tiles_of_many_rows_are_refused():
    chain = pytest.importorskip("epdecode.kernels.expert_chain")
    launch, x = Launch(64, narrow=False), rows_of([7, 0, 40])
    weights = ExpertWeights(launch.gate_up, launch.down)
    space = chain.empty_space(EXPERTS, CAPACITY, SIZE, torch.device("cpu"))
    out = torch.empty(EXPERTS, CAPACITY, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="narrow tiles' tokens is 64; accepted: 16 or 32"):
        chain.expert_chain(
            x, weights, torch.zeros(EXPERTS), space, out, chain.ChainTile(tokens=64, narrow=True)
        )

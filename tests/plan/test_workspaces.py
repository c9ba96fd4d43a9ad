"""Bytes of the workspaces that stages and layers share: masked, and the two of packed experts."""

from __future__ import annotations

import pytest
import torch

from epdecode.plan.workspaces import chain_partials, masked_bytes, quantised_bytes, workspace_bytes
from tests.small import small_model

ROWS, HIDDEN, SIZE = 256, 1024, 512


def sizes(name: str, wire: str, fused: bool, layout: bool) -> tuple[int, int]:
    return workspace_bytes(
        name,
        small_model(hidden=HIDDEN, expert_size=SIZE),
        rows=ROWS,
        wire=wire,
        fused_activation=fused,
        fused_quant_layout=layout,
    )


@pytest.mark.parametrize(
    ("wire", "fused", "layout", "first", "second"),
    [
        ("fp8", True, True, 4 * SIZE, SIZE + SIZE // 32),
        ("fp8", True, False, 4 * SIZE, SIZE + 2 * SIZE // 32),
        ("fp8", False, True, 4 * SIZE, 4 * SIZE),
        ("bf16", True, True, 4 * SIZE, HIDDEN + HIDDEN // 32),
    ],
)
def test_the_larger_tenant_decides(
    wire: str, fused: bool, layout: bool, first: int, second: int
) -> None:
    assert sizes("deepgemm", wire, fused, layout) == (ROWS * first, ROWS * second)


def test_wide_outputs_decide_where_they_live() -> None:
    wide = small_model(hidden=8192, expert_size=SIZE)
    made = {
        fused: workspace_bytes(
            "deepgemm",
            wide,
            rows=ROWS,
            wire="fp8",
            fused_activation=fused,
            fused_quant_layout=True,
        )
        for fused in (True, False)
    }
    assert made[True] == (ROWS * 2 * 8192, quantised_bytes(ROWS, SIZE))
    assert made[False] == (ROWS * 4 * SIZE, ROWS * 2 * 8192)


def test_bfloat16_weights_need_no_quantised_rows() -> None:
    made = workspace_bytes(
        "deepgemm",
        small_model(hidden=HIDDEN, expert_size=SIZE, weight_format="bf16"),
        rows=ROWS,
        wire="bf16",
        fused_activation=True,
        fused_quant_layout=True,
    )
    assert made[1] == quantised_bytes(ROWS, SIZE)


def test_the_plain_loop_keeps_its_output_only() -> None:
    assert sizes("torch_loop", "fp8", True, True) == (ROWS * 2 * HIDDEN, 0)


PARTS = 8 * 8 * SIZE
OUT, ACT, ARRIVING = 2 * HIDDEN, SIZE + SIZE // 32, HIDDEN + HIDDEN // 32


@pytest.mark.parametrize(
    ("backends", "weights", "wire", "row"),
    [
        (("torch_loop",), "fp8_block128", "fp8", OUT),
        (("triton_gemm",), "fp8_block128", "fp8", OUT + ACT + PARTS),
        (("triton_gemm",), "fp8_block128", "bf16", OUT + ACT + ARRIVING + PARTS),
        (("triton_gemm",), "bf16", "bf16", OUT + 2 * SIZE),
        (("deepgemm",), "fp8_block128", "fp8", OUT + ACT + 4 * SIZE),
        (("deepgemm", "triton_gemm"), "fp8_block128", "fp8", 2 * (OUT + ACT) + 4 * SIZE + PARTS),
    ],
)
def test_masked_backends_keep_their_own(
    backends: tuple[str, ...], weights: str, wire: str, row: int
) -> None:
    model = small_model(hidden=HIDDEN, expert_size=SIZE, weight_format=weights)
    assert masked_bytes(backends, model, rows=ROWS, wire=wire) == ROWS * row


@pytest.mark.parametrize(("experts", "capacity", "size"), [(2, 64, 256), (32, 128, 2048)])
def test_sums_of_parts_are_planned_as_the_kernel_takes_them(
    experts: int, capacity: int, size: int
) -> None:
    chain = pytest.importorskip("epdecode.kernels.expert_chain")
    space = chain.empty_space(experts, capacity, size, torch.device("cpu"))
    taken = space.partials.numel() * space.partials.element_size()
    assert chain_partials(experts * capacity, size) == taken
